"""Rows whose own answer a reward does not accept are counted and named before the start."""

import itertools
import json
from contextlib import closing

import pytest

from grpo_components.data.columns import reward_input
from grpo_components.errors import ConfigError
from grpo_components.rewards.code_tests import CodeTests
from grpo_components.rewards.maths import FORMATS, MathCorrectness
from grpo_components.rewards.pool import RewardSpec
from grpo_components.rewards.reward_trial import RewardTrial

REWARDS = """
import os
import threading


class Exact:
    max_reward = 2.0

    def __call__(self, *, prompt_text, response_text, answer, finish_reason, level):
        part = {"half": 1.0, "none": float("nan")}
        return part.get(answer, 2.0 * (response_text == f"={answer}"))

    def perfect_response(self, *, answer, level):
        if answer == "dies":
            os._exit(0)
        if answer == "hangs":
            threading.Event().wait()
        assert answer != "broken", level
        return {"unknown": None, "wrong": "?"}.get(answer, f"={answer}")


class Unchecked:
    def __call__(self, *, prompt_text, response_text, answer, finish_reason):
        return 1.0
"""
BAD = ("half", "none", "broken", "wrong")


@pytest.fixture
def checked(tmp_path, monkeypatch):
    (tmp_path / "exact_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)

    def prompt(row, answer):
        return {"prompt_index": row, "prompt_text": "?", "answer": answer, "level": row}

    def check(names=("Exact", "Unchecked"), **answers):
        data = {key: [*itertools.starmap(prompt, enumerate(each))] for key, each in answers.items()}
        specs = {name: RewardSpec(f"exact_rewards.{name}", {}, 1.0, False) for name in names}
        sample = {**reward_input(data["dataset"][0], "", "stop"), "level": 0}
        with closing(RewardTrial(specs, [sample], 60.0)) as trial:
            trial.finish()
            return trial.check_rows(data, lambda prompt: reward_input(prompt, "", "stop"))

    return check


def test_rows_that_a_perfect_response_cannot_solve_are_one_line_for_each_data_set(checked):
    rows = ["right"] * 1000 + ["unknown", *BAD]
    train, held_out = checked(dataset=rows, eval_dataset=["right", "broken"])
    assert train.startswith("warning: rewards.Exact: 4 of 1,005 rows of dataset: their own answer ")
    assert train.endswith("; the first is row 1002: 'half' (gave 1)")
    assert ": 1 of 2 rows of eval_dataset: " in held_out
    assert "; the first is row 2: 'broken' (raised AssertionError" in held_out, held_out


def test_there_is_no_line_if_all_rows_can_be_solved_or_no_reward_knows(checked):
    assert checked(dataset=["right", "unknown"], eval_dataset=[]) == []
    assert checked(["Unchecked"], dataset=BAD, eval_dataset=[]) == []


@pytest.mark.parametrize("answer", [*BAD, "dies"])
def test_a_data_set_of_which_no_row_can_be_solved_is_refused(checked, answer):
    with pytest.raises(ConfigError) as refused:
        checked(dataset=["right"], eval_dataset=[answer] * 3)
    assert refused.value.key == "rewards.Exact" and "eval_dataset" in refused.value.problem


def test_a_check_that_takes_too_long_ends_and_says_how_many_rows_it_saw(checked, monkeypatch):
    monkeypatch.setattr("grpo_components.rewards.reward_trial._CHECK_S", 1.5)
    (line,) = checked(dataset=["right"] + ["hangs"] * 7, eval_dataset=[])
    assert "(of 8, checked for 1.5 s)" in line and ": 0 of " in line


def solved(reward, **row):
    response = reward.perfect_response(**row)
    judged = {"prompt_text": "?", "finish_reason": "stop", **row}
    return None if response is None else reward(response_text=response, **judged)


@pytest.mark.parametrize("answer_format", FORMATS)
def test_a_known_answer_in_the_form_that_is_asked_for_is_right(answer_format):
    reward = MathCorrectness(answer_format)
    for known in ("42", r"\frac{1}{2}", "(1,2)", r"\text{(C)}\ 12", "x^2 + {y}", "5 million", "no"):
        assert solved(reward, answer=known) == 1.0, known


@pytest.mark.parametrize(
    ("answer_format", "known"), [("gsm8k", "1+1=2\n#### 2"), ("boxed", r"\frac{1}{2"), ("tag", " ")]
)
def test_an_answer_that_no_response_can_give_is_not(answer_format, known):
    assert solved(MathCorrectness(answer_format), answer=known) == 0.0


SQUARE = {"asserts": ["assert square(3) == 9"]}
PRINTED = {"stdin_stdout": [{"input": "3", "output": "9"}]}
PROGRAM = "def square(x):\n    '''```'''\n    return x * x"
SOLUTIONS = [(SQUARE, PROGRAM, 1.0), (SQUARE, f"So:\n~~~~python\n{PROGRAM}\n~~~~\n", 1.0)]
SOLUTIONS += [(SQUARE, "def square(x):\n    return x", 0.0), (SQUARE, "", None)]
SOLUTIONS += [(PRINTED, "print(int(input()) ** 2)", 1.0), (PRINTED, PROGRAM, 0.0)]


@pytest.mark.parametrize(("tests", "solution", "worth"), SOLUTIONS)
def test_a_row_of_code_is_tried_with_its_solution(tests, solution, worth):
    answer = json.dumps(tests | {"solution": solution})
    assert solved(CodeTests(wall_s=60.0), answer=answer) == worth


@pytest.mark.parametrize(
    "asserts", ["assert f(1 == 2", "assert pd.isna(f(1))", "import foo\nfoo.f()", "assert 1"]
)
def test_asserts_that_no_program_can_pass_need_no_solution(asserts):
    with pytest.raises(ValueError, match="answer: "):
        CodeTests().perfect_response(answer=json.dumps({"asserts": [asserts]}))
