"""Off-policy correction: every preset against its formula in plain Python, and by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lib.loss_inputs import loss_inputs

from grpo_components.objective.off_policy import (
    GeometricMask,
    MaskedIS,
    NoCorrection,
    OffPolicySequenceMask,
    SequenceTIS,
    TokenTIS,
    correction_weights,
    mismatch_summary,
    mismatch_sums,
)

T = torch.float64
RESPONSES = st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=5), min_size=1, max_size=5)
WILD = st.lists(st.lists(st.floats(-500, 500), min_size=1, max_size=5), min_size=1, max_size=5)


def flat(responses):
    log_ratios = [d for response in responses for d in response]
    ids = [i for i, response in enumerate(responses) for _ in response]
    return torch.tensor(log_ratios, dtype=T), torch.tensor(ids)


def token_tis(response):
    return [min(math.exp(d), 2.0) for d in response]


def sequence_tis(response):
    return [min(math.prod(math.exp(d) for d in response), 3.0)] * len(response)


def token_mask(response):
    return [math.exp(d) if 0.5 <= math.exp(d) <= 5.0 else 0.0 for d in response]


def sequence_mask(response):
    product = math.prod(math.exp(d) for d in response)
    return [product if product <= 4.0 else 0.0] * len(response)


def geometric_mask(response):
    mean = math.prod(math.exp(d) for d in response) ** (1 / len(response))
    return [1.0 if 0.8 <= mean <= 1.2 else 0.0] * len(response)


PRESETS = [
    (NoCorrection(), lambda response: [1.0] * len(response), ()),
    (TokenTIS(cap=2.0), token_tis, (2.0,)),
    (SequenceTIS(cap=3.0), sequence_tis, (3.0,)),
    (MaskedIS(low=0.5, high=5.0), token_mask, (0.5, 5.0)),
    (MaskedIS(low=0, high=4.0, level="sequence"), sequence_mask, (4.0,)),
    (GeometricMask(low=0.8, high=1.2), geometric_mask, (0.8, 1.2)),
]
EVERY_PRESET = pytest.mark.parametrize(
    ("correction", "formula", "bounds"),
    PRESETS,
    ids=["none", "token_tis", "sequence_tis", "token_mask", "sequence_mask", "geometric_mask"],
)


@EVERY_PRESET
@given(responses=RESPONSES)
def test_a_preset_is_its_formula(correction, formula, bounds, responses):
    for response in responses:
        total = sum(response)
        for log_ratio in (*response, total, total / len(response)):
            # On a bound itself the last bit decides.
            if any(abs(math.exp(log_ratio) / bound - 1) < 1e-9 for bound in bounds):
                return
    weights = correction(*flat(responses))
    expected = [w for response in responses for w in formula(response)]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=T), rtol=1e-10, atol=0)


@EVERY_PRESET
@given(responses=WILD)
def test_weights_are_finite_and_not_negative_whatever_the_ratios(
    correction, formula, bounds, responses
):
    log_ratios, ids = flat(responses)
    for dtype in (torch.float32, T):
        weights = correction(log_ratios.to(dtype).requires_grad_(), ids)
        assert weights.dtype == dtype and weights.shape == log_ratios.shape
        assert torch.isfinite(weights).all() and (weights >= 0).all()
        assert not weights.requires_grad
        assert (weights <= max(bounds, default=1.0)).all()


@pytest.mark.parametrize("infinity", [math.inf, -math.inf])
def test_an_infinite_log_ratio_is_masked_with_weight_exactly_zero(infinity):
    log_ratios, ids = torch.tensor([0.0, infinity, 0.0]), torch.tensor([0, 0, 1])
    assert MaskedIS()(log_ratios, ids).tolist() == [1, 0, 1]
    assert MaskedIS(level="sequence")(log_ratios, ids).tolist() == [0, 0, 1]
    assert GeometricMask()(log_ratios, ids).tolist() == [0, 0, 1]
    assert torch.isfinite(TokenTIS()(log_ratios, ids)).all()
    assert torch.isfinite(SequenceTIS()(log_ratios, ids)).all()


# ---- the mask of bad responses ------------------------------------------------------------------


def trl_mask(advantages, trainer, sampling, mask, threshold):
    """TRL 1.16's `get_off_policy_mask`, over padded rows [S, T] and advantages [S]."""
    kl = ((sampling - trainer) * mask).sum(1) / mask.sum(1).clip(min=1)
    return (advantages >= 0) | (kl <= threshold)


@given(
    responses=RESPONSES,
    data=st.data(),
    threshold=st.floats(0.01, 2),
    dtype=st.sampled_from([torch.float32, T]),
)
def test_the_mask_of_bad_responses_is_trls(responses, data, threshold, dtype):
    size = len(responses)
    choice = st.sampled_from([-2.0, -0.1, 0.0, 0.5])
    advantages = np.array(data.draw(st.lists(choice, min_size=size, max_size=size)))
    width = max(map(len, responses))
    trainer, mask = np.zeros((size, width)), np.zeros((size, width), bool)
    for row, response in enumerate(responses):
        trainer[row, : len(response)], mask[row, : len(response)] = response, True
    if any(abs(-np.mean(response) - threshold) < 1e-5 for response in responses):
        return  # on the bound itself the last bit decides
    keeps = trl_mask(advantages, trainer, np.zeros_like(trainer), mask, threshold)
    log_ratios, ids = flat(responses)
    token_advantages = torch.tensor(advantages, dtype=dtype)[ids]
    weights = OffPolicySequenceMask(threshold)(log_ratios.to(dtype), ids, token_advantages)
    assert weights.dtype == dtype
    assert weights.tolist() == keeps[ids.numpy()].astype(float).tolist()


def test_a_correction_gets_the_policy_and_the_advantages_that_it_asks_for():
    """The mask of bad responses follows the updates of a step; the others stay at its start."""
    inputs = loss_inputs([-3.0, -1.0], [-1.0, -1.0], [-1.0, -1.0])
    start = torch.tensor([-1.0, -3.0], dtype=T)
    assert correction_weights(OffPolicySequenceMask(0.5), inputs, start).tolist() == [0, 1]
    assert correction_weights(GeometricMask(0.5, 2.0), inputs, start).tolist() == [1, 0]
    weights = correction_weights(TokenTIS(), inputs, start)
    assert weights.tolist() == pytest.approx([1, math.exp(-2)])
    assert not weights.requires_grad


@pytest.mark.parametrize(
    ("key", "make"),
    [
        ("cap", lambda: TokenTIS(cap=0.5)),
        ("cap", lambda: SequenceTIS(cap=0)),
        ("low", lambda: MaskedIS(low=1)),
        ("high", lambda: MaskedIS(high=1)),
        ("level", lambda: MaskedIS(level="group")),
        ("low", lambda: GeometricMask(low=1.001)),
        ("threshold", lambda: OffPolicySequenceMask(0)),
        ("threshold", lambda: OffPolicySequenceMask(math.inf)),
    ],
)
def test_settings_out_of_range_name_their_key(key, make):
    with pytest.raises(ValueError, match=rf"^off_policy\.{key}: .* given; allowed: "):
        make()


def summary_of(log_ratios, weights=None):
    d = torch.tensor(log_ratios, dtype=T)
    weights = torch.ones_like(d) if weights is None else torch.tensor(weights, dtype=T)
    return mismatch_summary(*mismatch_sums(d, weights, d == 0), tokens=len(d))


QUANTILES = [f"mismatch/ratio_{name}" for name in ("p01", "p50", "p99", "max")]
LOG_RATIOS = st.lists(st.floats(-5, 5), min_size=1, max_size=30)
BIN = 0.012
"""Half a bin of the histogram, as a share of the log ratio."""


def assert_quantiles(summary, log_ratios):
    """Between those of all log ratios lower and higher by half a bin, and in order."""
    d, found = np.array(log_ratios), [summary[key] for key in QUANTILES]
    half = BIN * abs(d) + 2e-10
    low, high = (np.quantile(np.exp(each), [0.01, 0.5, 0.99]) for each in (d - half, d + half))
    assert (low <= found[:3]).all() and (found[:3] <= high).all()
    assert sorted(found) == found


@given(LOG_RATIOS, st.floats(0, 3))
def test_the_summary_is_of_the_raw_ratios_and_counts_exactly_zero_as_masked(log_ratios, high):
    ratios = [math.exp(d) for d in log_ratios]
    weights = [r if r <= high else 0.0 for r in ratios]
    summary = summary_of(log_ratios, weights)
    k3 = sum(r - 1 - d for r, d in zip(ratios, log_ratios, strict=True)) / len(ratios)
    size = sum(ratios) ** 2 / sum(r * r for r in ratios) / len(ratios)
    assert summary["mismatch/generator_kl"] == pytest.approx(k3, abs=1e-9)
    assert summary["mismatch/effective_sample_size"] == pytest.approx(size)
    assert summary["mismatch/ratio_max"] == pytest.approx(max(ratios))
    assert_quantiles(summary, log_ratios)
    assert summary["off_policy/correction_mass"] == pytest.approx(sum(weights) / len(ratios))
    assert summary["off_policy/masked_fraction"] == weights.count(0) / len(ratios)
    assert all(type(value) is float for value in summary.values())


@pytest.mark.parametrize("scale", [1e-7, 1e-5, 1e-3, 0.1, 1, 10])
@pytest.mark.parametrize("size", [1, 2, 99, 10_000])
def test_a_quantile_is_exact_to_a_share_of_its_own_log_ratio_at_every_scale(scale, size):
    log_ratios = np.random.default_rng(size).normal(0, scale, size).clip(-20, 20)
    assert_quantiles(summary_of(log_ratios), log_ratios)


@pytest.mark.parametrize("value", [0.0, -3e-12, 1e-6, -0.3, 20.0, -math.inf])
def test_quantiles_of_equal_ratios_are_that_ratio(value):
    log_ratio = max(value, -20.0)
    for size in (1, 3, 1000):
        summary = summary_of([value] * size)
        *quantiles, largest = (math.log(summary[key]) for key in QUANTILES)
        assert largest == pytest.approx(log_ratio, rel=1e-9)
        assert quantiles == pytest.approx([log_ratio] * 3, rel=BIN, abs=1e-10)
        assert max(quantiles) <= largest


def test_a_log_ratio_that_is_no_number_makes_the_summary_no_number_and_raises_nothing():
    for log_ratios in ([math.nan], [0.1, math.nan, 0.2]):
        summary = summary_of(log_ratios)
        assert all(math.isnan(summary[key]) for key in (*QUANTILES, "mismatch/generator_kl"))
        assert summary["off_policy/correction_mass"] == 1
