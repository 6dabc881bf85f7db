"""Which responses have the right form: tags, box, length."""

import pytest
from lib.rewards import judged

from grpo_components.rewards.formats import BoxedFormat, ResponseLength, ThinkAnswerFormat

THOUGHT, FIVE = "<think>Hm.</think>", "<answer>5</answer>"
WHOLE, OPENED = f"{THOUGHT} {FIVE}", f"Hm.</think> {FIVE}"
MENTIONS = "Use <think> and </think>."
"""A prompt that only mentions the tags has not opened one."""
COMPLETE = [
    *(("What?", WHOLE), ("What?", "<think>Hm.\nSo.</think>\n<answer>\n6\n</answer>\n")),
    *(("What? <think>", OPENED), ("What? <think>\n", OPENED), (MENTIONS, WHOLE)),
]
PARTS = ["", "5", THOUGHT, OPENED, f"{THOUGHT} <answer>5", f"<think>Hm. {FIVE}"]
PARTS += [f"{FIVE} {THOUGHT}"]
PARTS += [f"{WHOLE} <answer>6</answer>", f"{THOUGHT} {WHOLE}", f"{THOUGHT} so {FIVE}"]
PARTS += [f"Well, {WHOLE}", f"{WHOLE} and more", f"<think></think> {FIVE}"]
PARTS += [f"{THOUGHT} <answer> \n</answer>"]
INCOMPLETE = [
    *(("What?", response) for response in PARTS),
    *((MENTIONS, OPENED), ("What? <think>", WHOLE), ("What? <think>", f"\n</think> {FIVE}")),
]


@pytest.mark.parametrize(
    ("prompt", "response", "worth"),
    [*((*each, 1.0) for each in COMPLETE), *((*each, 0.0) for each in INCOMPLETE)],
)
def test_only_a_complete_format_is_worth_one(prompt, response, worth):
    assert judged(ThinkAnswerFormat(), response, prompt=prompt) == worth


OTHER_BOXES = [r"\boxed{5} or \boxed{6}", r"\boxed{\boxed{5}}", r"\boxed{ }", r"\boxed{5"]
OTHER_BOXES += [r"\boxed 5", "boxed{5}", ""]


def test_exactly_one_box_is_worth_one():
    for response in (r"So it is $\boxed{5}$.", r"\boxed {\frac{1}{2}}"):
        assert judged(BoxedFormat(), response) == 1.0
    for response in OTHER_BOXES:
        assert judged(BoxedFormat(), response) == 0.0, response


@pytest.mark.parametrize(
    ("words", "worth"), [(0, 0.0), (1, 0.5), (2, 1.0), (10, 1.0), (15, 0.5), (20, 0.0), (99, 0.0)]
)
def test_a_length_outside_its_bounds_scores_linearly_less(words, worth):
    assert judged(ResponseLength(max_words=10, min_words=2), "word\n " * words) == worth


def test_without_min_words_an_empty_response_is_worth_one():
    assert judged(ResponseLength(max_words=10), "") == 1.0
