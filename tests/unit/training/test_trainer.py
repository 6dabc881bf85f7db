"""The real trainer over gloo: however a batch is cut up, it is the one update written down here.

Rank processes stay alive over all tests and build a fresh Trainer for each of them.
Updates are by SGD, whose steps are the gradients: Adam would blow round-off up to whole steps.
"""

import copy
import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from lib.logprobs import whole_logprobs
from lib.trainer_ranks import (
    ADVANTAGES,
    LEARNING_RATE,
    LOPSIDED,
    RAGGED,
    SIBLINGS,
    SMALL,
    WHOLE,
    Ends,
    Mean,
    Steep,
    assert_is_update,
    assert_metrics_close,
    assert_weights_close,
    expected_update,
    export,
    exported,
    fresh,
    hf_weights,
    largest_change,
    make,
    step,
    to_hf,
    untimed,
    whole_model,
)

from grpo_components.errors import ConfigError
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.objective.aggregation import ConstantLength, SequenceMean
from grpo_components.objective.losses import DecoupledPPOLoss, GRPOLoss, GSPOLoss
from grpo_components.objective.off_policy import (
    MaskedIS,
    NoCorrection,
    OffPolicySequenceMask,
    SequenceTIS,
    TokenTIS,
)
from grpo_components.objective.token_advantages import TokenNormalizedAdvantages
from grpo_components.training.sample import SupervisedExamples
from grpo_components.trajectory import TokenSequence

# ---- one update ---------------------------------------------------------------------------------


VARIANTS = {
    "whole": {},
    "micro-batches": {"tokens_per_micro_batch": SMALL},
    "one response each": {"tokens_per_micro_batch": 1},
    "recomputed activations": {"enable_activation_checkpointing": True},
}
HOT = [replace(trajectory, temperature=0.5 + 0.2 * n) for n, trajectory in enumerate(fresh())]
BATCHES = {"ragged": RAGGED, "siblings": SIBLINGS, "lopsided": LOPSIDED}
BATCHES |= {"fewer than ranks": RAGGED[:1], "own temperatures": HOT}
CASES = [*itertools.product((1, 2), ("ragged", "siblings"), VARIANTS)]
CASES += itertools.product((2,), ("lopsided", "fewer than ranks"), list(VARIANTS)[:3])
CASES += [(1, "own temperatures", "micro-batches")]


@pytest.mark.parametrize(("num_ranks", "batch", "variant"), CASES)
def test_a_step_is_the_plain_update_however_it_is_computed(ranks, base, num_ranks, batch, variant):
    trajectories = BATCHES[batch]
    advantages = np.resize(ADVANTAGES, len(trajectories))
    weights, metrics = expected_update(base, trajectories, advantages)
    assert largest_change(hf_weights(base), weights) > 1e-2, "else this test sees nothing"
    results = ranks.step(base, num_ranks, trajectories, advantages, **VARIANTS[variant])
    assert all(untimed(measured) == untimed(results[0][0]) for measured, *_ in results)
    assert_is_update(results, weights, metrics)


EXAMPLES = [([5, 9, 2], [7, 7, 1]), ([11], [3, 30, 4, 8, 21]), ([1, 2, 3, 4, 5, 6], [40])]


def supervised_gradient(base):
    """Mean over all tokens of the examples, and its gradient by parameter, one at a time."""
    model = whole_model(base)
    said = [TokenSequence(*map(np.array, example), 1.0) for example in EXAMPLES]
    loss = -torch.cat([whole_logprobs(model, each)[0] for each in said]).mean()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.item(), to_hf(gradients)


@pytest.mark.parametrize(("num_ranks", "budget"), [(1, WHOLE), (2, 8)])
def test_the_supervised_loss_adds_its_own_gradient_whatever_the_ranks(
    ranks, base, num_ranks, budget
):
    alone, metrics = expected_update(base, RAGGED, ADVANTAGES)
    loss, gradients = supervised_gradient(base)
    ptx = SupervisedExamples(EXAMPLES, coeff=0.5, examples_per_update=3, seed=0)
    changes = {"tokens_per_micro_batch": budget, "ptx": ptx}
    results = ranks.step(base, num_ranks, RAGGED, ADVANTAGES, **changes)
    weights = {name: alone[name] - LEARNING_RATE * 0.5 * gradients[name] for name in alone}
    assert largest_change(alone, weights) > 1e-2, "else this test sees nothing"
    assert_weights_close(exported(results, 2), weights)
    for measured, *_ in results:
        assert measured["loss/ptx"] == pytest.approx(loss, rel=1e-4)
        assert measured["loss/total"] == pytest.approx(metrics["loss/total"] + 0.5 * loss, rel=1e-4)
        assert measured["loss/policy"] == pytest.approx(metrics["loss/policy"], rel=1e-4, abs=1e-6)


def test_the_update_is_clipped_and_the_norm_before_it_is_logged(ranks, base):
    weights, metrics = expected_update(base, RAGGED, ADVANTAGES, max_grad_norm=0.01)
    assert metrics["grad_norm"] > 0.1
    results = ranks.step(base, 2, RAGGED, ADVANTAGES, clip_grad_norm=0.01)
    assert_metrics_close(results[0][0], metrics)
    after, before = exported(results, 2), hf_weights(base)
    assert_weights_close(after, weights)
    moved = math.sqrt(sum(((after[n] - before[n]) ** 2).sum().item() for n in before))
    assert moved == pytest.approx(0.01 * LEARNING_RATE, rel=1e-3)


def test_what_the_environment_said_is_read_and_not_learned(ranks, base):
    """Whatever stands beside its tokens, which have no version; their ids are context."""
    weights, metrics = expected_update(base, RAGGED, ADVANTAGES)
    batch = copy.deepcopy(RAGGED)
    for trajectory in batch:
        said = ~trajectory.response_mask
        trajectory.generator_logprobs[said] = trajectory.reference_logprobs[said] = math.nan
        trajectory.token_versions[said] = -1
    changes = {"tokens_per_micro_batch": SMALL, "contract": StalenessContract(0, 1)}
    results = ranks.step(base, 2, batch, ADVANTAGES, **changes)
    assert_is_update(results, weights, metrics)
    batch[1].response_ids[1] += 1  # one token that the environment said
    results = ranks.step(base, 2, batch, ADVANTAGES, **changes)
    assert largest_change(exported(results, 2), weights) > 1e-5


# ---- what else the objective is made of ----------------------------------------------------------


def untrained():
    """Four responses of which no token is trained, each for another reason."""
    cut_off = make(40, 4, [True] * 6, finish_reason="length")
    failed = make(41, 3, [True] * 6, finish_reason="error")
    failed.generator_logprobs[:] = -1e4  # would overflow the ratio
    silent = make(42, 2, [False] * 3)
    stale = make(43, 5, [True] * 4)
    stale.token_versions[:] = -9  # of a trainer at version 0 with a bound of 2
    return [cut_off, failed, silent, stale]


@pytest.mark.parametrize("aggregation", [SequenceMean(), ConstantLength(length=9)])
def test_s_counts_the_responses_without_a_trained_token(ranks, base, aggregation):
    """As in the papers: the sum over what is trained, by the number of all responses."""
    size = len(RAGGED) + 4

    def over_all(counts):
        return 1 / (size * (counts if isinstance(aggregation, SequenceMean) else counts * 0 + 9.0))

    weights, metrics = expected_update(base, RAGGED, ADVANTAGES, aggregation=over_all)
    none = untrained()
    batch = [none[0], *RAGGED[:3], none[1], none[2], *RAGGED[3:], none[3]]
    advantages = np.concatenate(
        [[5.0], ADVANTAGES[:3], [math.nan, 1.0], ADVANTAGES[3:], [3.0]], dtype=np.float32
    )
    options = {"contract": StalenessContract(2, 1), "tokens_per_micro_batch": SMALL}
    options |= {"aggregation": aggregation, "mask_overlong": True}
    assert_is_update(ranks.step(base, 2, batch, advantages, **options), weights, metrics)


def test_token_advantages_are_those_of_the_whole_batch_whatever_the_ranks(ranks, base):
    component = TokenNormalizedAdvantages(kl_coeff=0.2)
    rewards = np.array([1.0, 0.0, 0.5, 0.0, 1.0, 0.0, 0.25], np.float32)
    batch = copy.deepcopy(RAGGED)
    for trajectory, reward in zip(batch, rewards.tolist(), strict=True):
        trajectory.advantage = reward
    made = component.per_token(batch, [t.response_mask for t in batch], 0)
    weights, metrics = expected_update(base, RAGGED, rewards, token_advantages=made)
    changes = {"token_advantages": component.per_token, "tokens_per_micro_batch": SMALL}
    assert_is_update(ranks.step(base, 2, RAGGED, rewards, **changes), weights, metrics)


SEQUENCE_RATIOS = [
    {"loss": GSPOLoss(clip_low=0.5, clip_high=0.5), "off_policy": NoCorrection()},
    {"loss": GRPOLoss(), "off_policy": SequenceTIS(cap=5.0)},
    {"loss": GRPOLoss(), "off_policy": MaskedIS(low=0.0, high=3.0, level="sequence")},
]


@pytest.mark.parametrize("objective", SEQUENCE_RATIOS)
def test_the_ratio_of_a_partly_stale_response_is_that_of_its_trained_tokens(ranks, base, objective):
    """T is their number: the update is that of a response whose first tokens were only read."""
    size = 6
    partly = [make(i, 3, [True] * size) for i in range(4)]
    read = [make(i, 3, [False, False] + [True] * (size - 2)) for i in range(4)]
    for trajectory in partly:
        trajectory.generator_logprobs[:2] = -60.0  # would change every sum and mean
        trajectory.token_versions[:2] = -3
    advantages = ADVANTAGES[:4]
    weights, metrics = expected_update(base, read, advantages, **objective)
    assert largest_change(hf_weights(base), weights) > 1e-3, "else this test sees nothing"
    cut = {"contract": StalenessContract(2, 1), "tokens_per_micro_batch": SMALL}
    results = ranks.step(base, 2, partly, advantages, **objective, **cut)
    metrics |= {"mismatch/fresh_kl": math.nan, "mismatch/fresh_tokens": math.nan}  # none is new
    assert_is_update(results, weights, metrics)


@pytest.mark.parametrize(
    "off_policy", [TokenTIS(cap=1.2), MaskedIS(low=0.8, high=1.25), OffPolicySequenceMask(0.2)]
)
def test_a_correction_weighs_tokens_by_the_policy_that_the_step_starts_from(
    ranks, base, off_policy
):
    weights, metrics = expected_update(base, RAGGED, ADVANTAGES, off_policy=off_policy)
    assert 0 < metrics["off_policy/correction_mass"] < 1.2
    changes = {"off_policy": off_policy, "tokens_per_micro_batch": SMALL}
    results = ranks.step(base, 2, RAGGED, ADVANTAGES, **changes)
    assert_is_update(results, weights, metrics)
    counted, sampled = results[1][0]["group_tokens"], sum(t.response_mask.sum() for t in RAGGED)
    masked = sum(causes.get("off_policy", 0) for causes in counted.values())
    assert masked == round(metrics["off_policy/masked_fraction"] * sampled)
    assert masked + sum(causes.get("trained", 0) for causes in counted.values()) == sampled


@pytest.mark.parametrize(("loss", "problem"), [(Mean, "shape []"), (Ends, "SystemExit")])
def test_a_loss_that_breaks_its_contract_is_an_error_by_its_name(ranks, base, loss, problem):
    """It is not a skipped step."""
    for error in ranks.run(base, 2, [step(RAGGED, ADVANTAGES)], loss=loss(), raises=True):
        assert isinstance(error, ConfigError) and error.key == "loss" and problem in error.problem
        assert error.problem.split()[0].endswith(loss.__name__)


def test_a_skipped_step_tells_which_number_is_not_finite(ranks, base):
    spoiled = ADVANTAGES.copy()
    spoiled[[4, 2]] = math.nan
    calls = [step(RAGGED, spoiled), step(RAGGED, ADVANTAGES, 1)]
    for first, second in ranks.run(base, 2, calls, tokens_per_micro_batch=SMALL):
        assert first["skipped_because"].startswith("loss/total is nan")
        assert all(causes.keys() == {"skipped"} for causes in first["group_tokens"].values())
        assert all(causes.keys() == {"trained"} for causes in second["group_tokens"].values())
        assert second["skipped_because"] == ""
    for (steep,) in ranks.run(base, 2, calls[1:], loss=Steep()):
        assert steep["skipped_because"].startswith("grad_norm is ")


def test_proximal_logprobs_are_those_of_the_start_of_the_step_in_every_update(ranks, base):
    """A correction that was made anew after an update would weigh by the moved policy."""
    loss = DecoupledPPOLoss(max_weight=2.0)
    options = {"loss": loss, "ppo_epochs": 3, "tokens_per_micro_batch": SMALL}
    optimizers = (partial(torch.optim.SGD, lr=lr) for lr in (0.05, 0.0))
    moved, unmoved = (
        ranks.step(base, 2, RAGGED, ADVANTAGES, build_optimizer=optimizer, **options)[0][0]
        for optimizer in optimizers
    )
    assert moved["ratio/max"] != pytest.approx(unmoved["ratio/max"])
    kept = [key for key in moved if key.startswith(("mismatch", "off_policy"))]
    assert_metrics_close(*({key: each[key] for key in kept} for each in (moved, unmoved)))


def test_tokens_over_the_bound_and_responses_cut_off_train_nothing(ranks, base):
    """The update is that of the batch in which the policy never sampled them."""
    trained, kept = fresh(), fresh()
    for trajectory in trained:
        trajectory.token_versions[:] = 1  # of a trainer at version 3 with a bound of 2
    for trajectory, without in zip(trained[:3], kept[:3], strict=True):
        trajectory.token_versions[0] = 0
        without.response_mask[0] = False
    cut_off = make(30, 4, [True] * 6, finish_reason="length")
    warm_up = [step(RAGGED, np.zeros(len(RAGGED)), number) for number in range(3)]
    calls = [*warm_up, step([*trained, cut_off], [*ADVANTAGES, 5.0], 3), *export(4)]
    options = {"contract": StalenessContract(2, 1), "mask_overlong": True}
    results = ranks.run(base, 2, calls, loss=GRPOLoss(), **options)
    pairs = zip(kept, ADVANTAGES, strict=True)
    tried, advantages = zip(*((t, a) for t, a in pairs if t.response_mask.any()), strict=True)
    plain = ranks.step(base, 2, tried, advantages, loss=GRPOLoss())
    assert_weights_close(exported(results, 5), exported(plain, 2))
    assert results[0][3]["token_versions"] == {1: int(sum(t.response_mask.sum() for t in kept))}


def test_fresh_tokens_are_those_of_responses_that_the_trainers_version_sampled(ranks, base):
    """After a swap within a response, its tokens may rest on the KV of the older weights."""
    batch = fresh()
    long = [trajectory for trajectory in batch if len(trajectory.response_ids) > 1]
    long[0].token_versions[:] = long[1].token_versions[:] = 1
    long[2].token_versions[1:] = 1
    zeros = np.zeros(len(RAGGED))
    calls = [step(RAGGED, zeros), step(batch, ADVANTAGES, 1), step(RAGGED, zeros, 2)]
    results = ranks.run(base, 2, calls, logged_responses=99, contract=StalenessContract(9, 1))
    metrics, after = results[0][1:]
    told = [row for rows in metrics["token_logprobs"].values() for row in rows]
    gaps = [
        np.array(row["trainer_logprobs"]) - trajectory.generator_logprobs
        for row, trajectory in zip(told, batch, strict=True)
        if len(trajectory.response_ids) and (trajectory.token_versions == 1).all()
    ]
    assert len(gaps) == 2
    gap = np.concatenate(gaps)
    assert metrics["mismatch/fresh_tokens"] == len(gap)
    kl = np.mean(np.expm1(gap) - gap)
    assert metrics["mismatch/fresh_kl"] == pytest.approx(kl, rel=1e-4, abs=1e-6)
    assert metrics["mismatch/generator_kl"] != pytest.approx(kl, rel=1e-2)
    assert math.isnan(after["mismatch/fresh_kl"])  # at version 2 nothing of RAGGED is fresh


def test_logged_responses_tell_the_logprobs_that_the_update_has_used(ranks, base):
    """Of the first so many, on whichever rank they were; none where nothing was sampled."""
    changes = {"tokens_per_micro_batch": SMALL, "logged_responses": 99}
    metrics = ranks.step(base, 2, RAGGED, ADVANTAGES, **changes)[0][0]
    told = [row for rows in metrics["token_logprobs"].values() for row in rows]
    ratios = []
    for row, trajectory in zip(told, RAGGED, strict=True):
        for name in ("generator_logprobs", "reference_logprobs"):
            known = np.where(trajectory.response_mask, getattr(trajectory, name), np.nan)
            assert np.array(row[name], float) == pytest.approx(known, abs=1e-6, nan_ok=True)
        trainer = np.array(row["trainer_logprobs"], float)
        assert (np.isnan(trainer) == ~trajectory.response_mask).all()
        ratios += np.exp(trainer - trajectory.generator_logprobs)[trajectory.response_mask].tolist()
    assert np.mean(ratios) == pytest.approx(metrics["ratio/mean"], rel=1e-5)
    assert max(ratios) == pytest.approx(metrics["ratio/max"], rel=1e-5)
    few = ranks.step(base, 2, RAGGED, ADVANTAGES, logged_responses=3)[0][0]["token_logprobs"]
    assert {group_id: len(rows) for group_id, rows in few.items()} == {0: 2, 1: 1}


def test_a_batch_without_a_token_to_train_is_a_skipped_step_with_every_key(ranks, base):
    cut_off = [make(i, 4, [True] * 6, finish_reason="length") for i in range(4)]
    calls = [step(cut_off, np.ones(4)), step(RAGGED, ADVANTAGES, 1), step(cut_off, np.ones(4), 2)]
    skipped, trained, again = ranks.run(base, 2, calls, mask_overlong=True)[0]
    assert [m["skipped_steps"] for m in (skipped, trained, again)] == [1, 1, 2]
    assert "4 were cut off" in skipped["skipped_because"]
    assert skipped.keys() == trained.keys()
    assert (skipped["policy_version"], skipped["token_versions"]) == (0, {})
    assert math.isnan(skipped["off_policy/correction_mass"])
    assert trained["policy_version"] == 1
