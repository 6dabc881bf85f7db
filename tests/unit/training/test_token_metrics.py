"""Metrics of tokens, whichever micro-batches and ranks they are on."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from grpo_components.training.token_metrics import UpdateMetrics


@pytest.fixture
def over_ranks(monkeypatch):
    """Metrics over ranks, of which the last has what all of them sent."""

    def metrics(ranks, total_tokens, ranks_per_sample):
        sent = []

        def all_gather(gathered, own):
            sent.append(own)
            gathered[:] = sent

        monkeypatch.setattr(dist, "get_world_size", lambda: len(ranks))
        monkeypatch.setattr(dist, "all_gather_object", all_gather)
        return [rank.over_ranks(total_tokens, ranks_per_sample) for rank in ranks][-1], sent

    return metrics


def numpy_metrics(d, weights, fresh):
    log_ratio = d.astype(np.float64).clip(-20, 20)
    ratio, k3 = np.exp(log_ratio), np.expm1(log_ratio) - log_ratio
    found = {"mismatch/generator_kl": k3.mean(), "mismatch/ratio_max": ratio.max()}
    size = ratio.sum() ** 2 / (len(d) * np.square(ratio).sum())
    found |= {"mismatch/effective_sample_size": size, "loss/total": log_ratio.mean()}
    found |= {"ratio/max": log_ratio.max(), "off_policy/masked_fraction": np.mean(weights == 0)}
    found["off_policy/correction_mass"] = weights.astype(np.float64).mean()
    if fresh.any():
        found |= {"mismatch/fresh_kl": k3[fresh].mean(), "mismatch/fresh_tokens": fresh.sum()}
    return found


@pytest.mark.parametrize("seed", range(20))
def test_metrics_are_those_of_all_tokens_however_they_are_split(over_ranks, seed):
    """Over micro-batches, over ranks of which some have none, and over ranks with equal tokens."""
    rng = np.random.default_rng(seed)
    size, ranks_per_sample = rng.integers(1, 2000), 1 + seed % 2
    d = rng.normal(0, 10.0 ** rng.integers(-7, 2), size).astype(np.float32)
    weights = (rng.random(size) * (rng.random(size) < 0.8)).astype(np.float32)
    fresh = rng.random(size) < rng.choice([0, 0.5, 1])
    ranks = [UpdateMetrics() for _ in range(4 * ranks_per_sample)]
    for part in np.array_split(np.arange(size), rng.integers(1, 9)):
        if len(part):
            first = ranks_per_sample * rng.integers(4)
            for rank in ranks[first : first + ranks_per_sample]:
                columns = [torch.from_numpy(each[part]) for each in (d, weights, fresh)]
                own = columns[0].double().clamp(-20, 20)
                rank.add({"loss/total": own, "ratio/max": own})
                rank.add_mismatch(*columns)
    metrics, sent = over_ranks(ranks, size, ranks_per_sample)
    expected = numpy_metrics(d, weights, fresh)
    quantiles = [metrics.pop(f"mismatch/ratio_{name}") for name in ("p01", "p50", "p99")]
    assert metrics == pytest.approx(expected, rel=1e-11)
    assert sorted(quantiles) == quantiles and quantiles[-1] <= metrics["mismatch/ratio_max"]
    assert max(flat.numel() for _, flat in sent) < 2000, "what a rank sends must not grow"


def test_a_maximum_that_is_no_number_is_told_whichever_rank_has_it(over_ranks):
    for values in ([np.nan, 1.0], [1.0, np.nan]):
        ranks = [UpdateMetrics() for _ in values]
        for rank, value in zip(ranks, values, strict=True):
            rank.add({"ratio/max": torch.tensor([value])})
        assert np.isnan(over_ranks(ranks, 2, 1)[0]["ratio/max"])
