"""The curriculum: weights, draws that repeat, and states that continue them."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.prompts import Mix, Prompts, next_index
from lib.properties import many

from grpo_components.data.curriculum import PromptCurriculum, weights_of
from grpo_components.data.prompt_mix import PromptMix
from grpo_components.settings import CurriculumSettings
from grpo_components.state_files import read_state, write_state

RULE = CurriculumSettings(low=0.2, high=0.8, floor=0.1, decay=0.9)
SHARES = st.floats(0, 1)


def over(*parts, rule=RULE, seed=5):
    """A curriculum over parts, each (values of prompt_index, weight)."""
    return PromptCurriculum(Mix(parts), rule, seed)


@st.composite
def rules(draw):
    low, high = sorted((draw(SHARES), draw(SHARES)))
    floor, decay = draw(st.floats(1e-3, 1)), draw(st.floats(0.01, 1))
    return CurriculumSettings(low=low, high=high, floor=floor, decay=decay)


@given(rules(), st.lists(SHARES, min_size=1, max_size=9))
def test_weights_are_1_in_the_band_fall_from_it_and_keep_to_the_floor(rule, rates):
    rates = np.array(sorted(rates))
    weights = weights_of(rule, rates)
    assert (weights >= rule.floor * (1 - 1e-12)).all() and (weights <= 1).all()
    below, above = rates < rule.low, rates > rule.high
    assert (weights[~below & ~above] == 1).all()
    assert (np.diff(weights[below]) >= -1e-12).all() and (np.diff(weights[above]) <= 1e-12).all()


def counted(curriculum, results, number, steps=1):
    """How often each prompt is drawn, one draw a step, once the results count."""
    for index, result in results.items():
        curriculum.add_result(index, *result)
    for _ in range(steps):
        curriculum.end_step()
    drawn = Counter()
    for _ in range(number):
        drawn[next_index(curriculum)[0]] += 1
        curriculum.end_step()
    return drawn


def test_each_prompt_is_drawn_in_proportion_to_its_weight():
    rule = CurriculumSettings(low=0.2, high=0.8, floor=0.1, decay=1.0)
    results = {3: (0, 8), 5: (4, 8), 8: (8, 8)}
    drawn = counted(over(((3, 5, 8), 1.0), rule=rule, seed=7), results, 1500)
    rates = np.array([(k + 0.125) / 8.25 for k in (0, 4, 8)])
    weights = weights_of(rule, rates)
    assert weights[1] == 1 and weights[0] == pytest.approx(weights[2])
    for index, share in zip((3, 5, 8), weights / weights.sum(), strict=True):
        assert drawn[index] / 1500 == pytest.approx(share, abs=5 * (0.25 / 1500) ** 0.5)


def test_old_results_fade_until_a_prompt_is_as_good_as_new():
    def draws_of_the_hopeless(steps):
        return counted(over((range(4), 1.0), seed=1), {2: (0, 8)}, 300, steps)[2]

    # As many steps are drawn from, so the mean weight rises while the count goes on.
    assert draws_of_the_hopeless(1) < draws_of_the_hopeless(200) == pytest.approx(75, abs=35)


OPERATIONS = st.lists(
    st.one_of(st.just("draw"), st.just("step"), st.tuples(st.integers(0, 8), st.integers(0, 8))),
    max_size=40,
)


def played(curriculum, operations, indices):
    drawn = []
    for operation in operations:
        if operation == "draw":
            drawn.append(next_index(curriculum))
        elif operation == "step":
            curriculum.end_step()
        else:
            which, successes = operation
            curriculum.add_result(indices[which % len(indices)], successes, 8)
    return drawn


@st.composite
def parts(draw):
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    rows = iter(range(10, 99, 2))
    return [(list(islice(rows, size)), draw(st.floats(0.1, 9))) for size in sizes]


@settings(max_examples=many(60))
@given(rules(), parts(), OPERATIONS, OPERATIONS, st.integers(0, 2**31 - 1))
def test_draws_follow_from_seed_and_results_alone_through_states(rule, parts, before, after, seed):
    indices = [index for rows, _ in parts for index in rows]
    whole = over(*parts, rule=rule, seed=seed)
    first = played(whole, [*before, "step"], indices)
    state = json.loads(json.dumps(whole.state_dict()))
    rest = played(whole, after, indices)
    again = over(*parts, rule=rule, seed=seed)
    assert played(again, [*before, "step"], indices) == first
    new = over(*parts, rule=rule, seed=seed)
    for used in (again, new):  # `again` is at another place
        used.load_state_dict(state)
        assert played(used, after, indices) == rest
    assert len({*first, *rest}) == len(first) + len(rest)  # a pair of row and epoch comes once
    assert {index for index, _ in first + rest} <= set(indices)


@given(rules(), st.integers(1, 6), st.integers(0, 2**31 - 1), st.integers(0, 20))
def test_between_two_steps_no_prompt_comes_again_before_all_came(rule, size, seed, number):
    curriculum = over((range(size), 1.0), rule=rule, seed=seed)
    played(curriculum, [(0, 0), "draw", "step"], range(size))
    drawn = [next_index(curriculum)[0] for _ in range(number)]
    for start in range(0, number - size + 1, size):
        assert sorted(drawn[start : start + size]) == list(range(size))


def test_the_parts_of_a_mix_keep_their_shares():
    curriculum = over((range(9), 3.0), (range(9, 18), 1.0))
    for index in range(9):
        curriculum.add_result(index, 0, 8)  # the first part is hopeless, and keeps its share
    curriculum.end_step()
    drawn = [next_index(curriculum)[0] for _ in range(400)]
    assert abs(sum(index < 9 for index in drawn) - 300) <= 3


def test_the_metrics_say_how_many_prompts_are_in_the_band():
    curriculum = over((range(8), 1.0))
    drawn = [next_index(curriculum)[0] for _ in range(4)]
    for index, successes in zip(drawn, (0, 2, 4, 8), strict=True):
        curriculum.add_result(index, successes, 8)
    curriculum.end_step()
    names = ("tried", "in_band", "generated_success")
    assert [curriculum.metrics[f"curriculum/{name}"] for name in names] == [0.5, 0.5, 14 / 32]
    curriculum.end_step()
    assert np.isnan(curriculum.metrics["curriculum/generated_success"])


def test_the_stream_gives_the_rows_that_are_drawn_and_continues_from_a_file(tmp_path):
    def new():
        odd = Prompts({"prompt_index": i, "prompt_ids": [i]} for i in (4, 1, 7))
        even = Prompts({"prompt_index": i, "prompt_ids": [i]} for i in (0, 2))
        mix = PromptMix({"odd": (odd, 1.0), "even": (even, 2.0)})
        return PromptCurriculum(mix, RULE, 3)

    stream = new()
    for number, (prompt, _) in enumerate(islice(stream, 5)):
        assert prompt["prompt_ids"] == [prompt["prompt_index"] % 8]
        result = {"prompt": prompt["prompt_index"], "successes": number % 5, "scored": 4}
        stream.follow({"event": "finish", "group": 0, **result})
    stream.follow({"event": "step"})
    write_state(tmp_path, "driver", stream.state_dict())
    restored = new()
    restored.load_state_dict(read_state(tmp_path, "driver"))
    assert list(islice(restored, 9)) == list(islice(stream, 9))
    other = PromptCurriculum(Prompts([{"prompt_index": 0, "prompt_ids": [1]}]), RULE, 3)
    with pytest.raises(ValueError, match=r"^dataset: it has 1 rows; allowed: the 3 \+ 2 rows"):
        other.load_state_dict(read_state(tmp_path, "driver"))
