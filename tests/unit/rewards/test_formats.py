"""Which responses have the right form: tags, box, length."""

import pytest

from grpo_components.rewards.formats import BoxedFormat, ResponseLength, ThinkAnswerFormat


def judged(reward, response: str, prompt: str = "") -> float:
    return reward(prompt_text=prompt, response_text=response, answer="5", finish_reason="stop")


COMPLETE = [
    ("What?", "<think>Hm.</think> <answer>5</answer>"),
    ("What?", "<think>Hm.\nSo.</think>\n<answer>\n6\n</answer>\n"),
    ("What? <think>", "Hm.</think> <answer>5</answer>"),
    ("What? <think>\n", "Hm.</think> <answer>5</answer>"),
    # A prompt that only mentions the tags has not opened one.
    ("Use <think> and </think>.", "<think>Hm.</think> <answer>5</answer>"),
]
INCOMPLETE = [
    ("What?", ""),
    ("What?", "5"),
    ("What?", "Hm.</think> <answer>5</answer>"),
    ("Use <think> and </think>.", "Hm.</think> <answer>5</answer>"),
    ("What? <think>", "<think>Hm.</think> <answer>5</answer>"),
    ("What?", "<think>Hm.</think>"),
    ("What?", "<think>Hm.</think> <answer>5"),
    ("What?", "<think>Hm. <answer>5</answer>"),
    ("What?", "<answer>5</answer> <think>Hm.</think>"),
    ("What?", "<think>Hm.</think> <answer>5</answer> <answer>6</answer>"),
    ("What?", "<think>Hm.</think> <think>Hm.</think> <answer>5</answer>"),
    ("What?", "<think>Hm.</think> so <answer>5</answer>"),
    ("What?", "Well, <think>Hm.</think> <answer>5</answer>"),
    ("What?", "<think>Hm.</think> <answer>5</answer> and more"),
    ("What?", "<think></think> <answer>5</answer>"),
    ("What?", "<think>Hm.</think> <answer> \n</answer>"),
    ("What? <think>", "\n</think> <answer>5</answer>"),
]


@pytest.mark.parametrize(
    ("prompt", "response", "worth"),
    [*((*each, 1.0) for each in COMPLETE), *((*each, 0.0) for each in INCOMPLETE)],
)
def test_only_a_complete_format_is_worth_one(prompt, response, worth):
    assert judged(ThinkAnswerFormat(), response, prompt) == worth


@pytest.mark.parametrize(
    ("response", "worth"),
    [
        (r"So it is $\boxed{5}$.", 1.0),
        (r"\boxed {\frac{1}{2}}", 1.0),
        (r"\boxed{5} or \boxed{6}", 0.0),
        (r"\boxed{\boxed{5}}", 0.0),
        (r"\boxed{ }", 0.0),
        (r"\boxed{5", 0.0),
        (r"\boxed 5", 0.0),
        ("boxed{5}", 0.0),
        ("", 0.0),
    ],
)
def test_exactly_one_box_is_worth_one(response, worth):
    assert judged(BoxedFormat(), response) == worth


@pytest.mark.parametrize(
    ("words", "worth"), [(0, 0.0), (1, 0.5), (2, 1.0), (10, 1.0), (15, 0.5), (20, 0.0), (99, 0.0)]
)
def test_a_length_outside_its_bounds_scores_linearly_less(words, worth):
    assert judged(ResponseLength(max_words=10, min_words=2), "word\n " * words) == worth


def test_without_min_words_an_empty_response_is_worth_one():
    assert judged(ResponseLength(max_words=10), "") == 1.0


@pytest.mark.parametrize("bounds", [(0, 0), (3, 4), (3, -1), (2.5, 1)])
def test_bounds_out_of_range_are_refused(bounds):
    with pytest.raises(ValueError, match=r"^max_words, min_words: "):
        ResponseLength(*bounds)  # pyright: ignore[reportArgumentType]
