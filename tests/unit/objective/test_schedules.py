"""Schedules: what holds of every shape at every step, and what a wrong config is told."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.schedules import as_schedule

VALUE = st.floats(-10, 10)
STEPS = st.integers(0, 60)


@st.composite
def settings(draw, shapes=("constant", "linear", "cosine")):
    made = {"schedule": draw(st.sampled_from(shapes)), "start": draw(VALUE)}
    if made["schedule"] != "constant":
        made |= {"end": draw(VALUE), "num_steps": draw(st.integers(1, 20))}
    if draw(st.booleans()):
        made["warmup_steps"] = draw(st.integers(0, 20))
    return made


CHANGING = settings(shapes=("linear", "cosine"))


@given(settings())
def test_the_warm_up_climbs_in_equal_steps_from_nothing_to_start(given_settings):
    schedule = as_schedule("key", given_settings)
    steps = given_settings.get("warmup_steps", 0)
    for step in range(steps):
        expected = given_settings["start"] * (step + 1) / steps
        assert schedule(step) == pytest.approx(expected, rel=1e-12)
    if steps:
        # No jump: the last step of the warm-up is at start already.
        assert schedule(steps - 1) == schedule(steps)


@given(CHANGING, st.integers(0, 25))
def test_linear_and_cosine_follow_their_formulas(given_settings, step):
    schedule = as_schedule("key", given_settings)
    start, end = given_settings["start"], given_settings["end"]
    progress = min(step / given_settings["num_steps"], 1)
    if given_settings["schedule"] == "linear":
        expected = (1 - progress) * start + progress * end
    else:
        expected = end + 0.5 * (start - end) * (1 + math.cos(math.pi * progress))
    found = schedule(schedule.warmup_steps + step)
    assert found == pytest.approx(expected, abs=1e-12)
    assert min(start, end) == schedule.lowest <= found <= schedule.highest == max(start, end)


@given(st.one_of(VALUE, st.integers(-5, 5)), STEPS)
def test_a_number_is_the_constant_schedule(value, step):
    schedule = as_schedule("key", value)
    assert schedule == as_schedule("key", {"schedule": "constant", "start": value})
    assert schedule(step) == schedule.lowest == schedule.highest == value


LINEAR = {"schedule": "linear", "start": 0.1, "end": 0.0, "num_steps": 10}

CONSTANT = {"schedule": "constant", "start": 0.1}


@pytest.mark.parametrize(
    ("given_settings", "said"),
    [
        *(
            ({k: v for k, v in LINEAR.items() if k != key}, rf"\.{key}: missing; allowed: ")
            for key in LINEAR
        ),
        (LINEAR | {"steps": 3}, r"\.steps: unknown .* allowed: schedule"),
        (CONSTANT | {"end": 0.2}, r"\.end: unknown .* allowed: schedule"),
        (CONSTANT | {"num_steps": 5}, r"\.num_steps: unknown .* allowed: schedule"),
        *(
            (LINEAR | {key: value}, rf"\.{key}: .* given; allowed: ")
            for key, value in (
                *(("schedule", "exponential"), ("start", "0.1"), ("start", math.nan)),
                *(("end", math.inf), ("num_steps", 0), ("num_steps", 2.5), ("warmup_steps", -1)),
            )
        ),
        *((bad, ": .* given; allowed: a number, or a mapping") for bad in ("0.1", True, math.nan)),
    ],
)
def test_what_is_wrong_is_named_by_its_key_with_what_is_allowed(given_settings, said):
    with pytest.raises(ValueError, match=rf"^loss\.kl_coeff{said}"):
        as_schedule("loss.kl_coeff", given_settings)
