"""REINFORCE++: the advantage of every token against plain loops, and by hand."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lib.trajectories import trajectory as record

from grpo_components.objective.token_advantages import TokenNormalizedAdvantages


def response(advantage, tokens):
    """Tokens (generator, reference, by): policy, stale (sampled, not trained), environment."""
    sampled = np.array([by != "environment" for *_, by in tokens], bool)
    trajectory = record(
        len(tokens),
        sampled,
        generator_logprobs=np.array([generator for generator, *_ in tokens], np.float32),
        reference_logprobs=np.array([reference for _, reference, _ in tokens], np.float32),
        advantage=advantage,
    )
    return trajectory, np.array([by == "policy" for *_, by in tokens], bool)


def formula(batch, kl_coeff, eps):
    """The paper's two equations, token by token."""
    raw = []
    for reward, tokens in batch:
        for t, (*_, by) in enumerate(tokens):
            if by == "policy":
                later = [g - r for g, r, who in tokens[t:] if who != "environment"]
                raw.append(reward - kl_coeff * sum(later))
    mean = sum(raw) / max(len(raw), 1)
    deviation = statistics.stdev(raw) if len(raw) > 1 else 0.0
    return [(value - mean) / (deviation + eps) for value in raw]


LOGPROB = st.floats(-4, 0, width=32)
TOKEN = st.tuples(LOGPROB, LOGPROB, st.sampled_from(["policy", "policy", "stale", "environment"]))
BATCH = st.lists(st.tuples(st.floats(-2, 2), st.lists(TOKEN, max_size=5)), max_size=5)


@given(BATCH, st.sampled_from([0.0, 0.1, 1.0]))
def test_every_token_has_the_papers_advantage(batch, kl_coeff):
    records, trained = zip(*(response(*one) for one in batch), strict=True) if batch else ((), ())
    made = TokenNormalizedAdvantages(kl_coeff, eps=1e-2).per_token(records, trained, step=0)
    assert [len(part) for part in made] == [int(mask.sum()) for mask in trained]
    assert all(part.dtype == np.float32 for part in made)
    found = [value for part in made for value in part.tolist()]
    assert found == pytest.approx(formula(batch, kl_coeff, 1e-2), rel=1e-4, abs=1e-4)


def test_what_no_token_is_trained_of_counts_nowhere():
    kept = [(1.0, [(-1.0, -2.0, "policy")] * 2), (0.0, [(-1.0, -1.0, "policy")])]
    failed, nothing = response(math.nan, [(math.nan, -1.0, "stale")])
    records, trained = zip(*(response(*one) for one in kept), strict=True)
    make = TokenNormalizedAdvantages(0.1).per_token
    without = make(records, trained, step=0)
    among = make((records[0], failed, records[1]), (trained[0], nothing, trained[1]), step=0)
    assert len(among[1]) == 0
    for alone, beside in zip(without, (among[0], among[2]), strict=True):
        np.testing.assert_array_equal(alone, beside)


def test_the_rewards_themselves_are_handed_to_the_trainer():
    advantages = TokenNormalizedAdvantages()(np.array([[1.0, math.nan], [0.25, 0.5]]))
    assert advantages.tolist() == [[1.0, 0.0], [0.25, 0.5]]
    assert advantages.dtype == np.float32


def test_the_coefficient_follows_its_schedule_and_asks_for_the_reference():
    ramp = {"schedule": "linear", "start": 0.0, "end": 1.0, "num_steps": 2}
    advantages = TokenNormalizedAdvantages(ramp)
    assert advantages.needs_reference and not TokenNormalizedAdvantages().needs_reference
    record, mask = response(0.0, [(-1.0, -2.0, "policy"), (-1.0, -3.0, "policy")])
    spreads = [np.ptp(advantages.per_token([record], [mask], step)[0]) for step in (0, 1, 2)]
    assert spreads[0] == 0 and 0 < spreads[1] <= spreads[2]
    record.reference_logprobs = None
    assert len(advantages.per_token([record], [mask], 0)[0]) == 2
    with pytest.raises(AssertionError, match="reference"):
        advantages.per_token([record], [mask], 1)


@pytest.mark.parametrize(
    ("key", "bad"), [("kl_coeff", -0.1), ("kl_coeff", "much"), ("eps", 0), ("eps", math.nan)]
)
def test_settings_out_of_range_name_their_key(key, bad):
    with pytest.raises(ValueError, match=rf"^advantages\.{key}: .* given; allowed: "):
        TokenNormalizedAdvantages(**{key: bad})
