"""reasoning-gym: its rows become prompts, and its own score is the reward, for every task."""

import ast
import sys

import pytest
from lib.rows import Characters

from grpo_components.environments.reasoning_gym import reasoning_gym_dataset
from grpo_components.environments.reasoning_gym_score import ReasoningGymScore

tasks = pytest.importorskip("reasoning_gym.factory", reason="pycosat needs a C compiler")
DATASETS, create_dataset = tasks.DATASETS, tasks.create_dataset


def load(task, **kwargs):
    return reasoning_gym_dataset(Characters(), task=task, **kwargs)


def score(prompt, answer, answer_format="tag"):
    known = prompt["reasoning_gym"]
    return ReasoningGymScore(answer_format)(response_text=answer, reasoning_gym=known)


TASKS = (
    *("ab", "basic_arithmetic", "boxnet", "chain_sum", "dice", "graph_color", "jugs", "maze"),
    *("mini_sudoku", "rubiks_cube", "rush_hour", "shortest_path", "tower_of_hanoi", "word_sorting"),
)
"""Of each kind some: rows with an answer and without, with tuples, and with scores in parts."""


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_scored_as_by_itself(task):
    own = create_dataset(task, size=1, seed=3)
    (prompt,) = load(task, num_rows=1, seed=3)
    entry = own[0]
    assert prompt["prompt_text"] == f"{entry['question']}\n"
    assert ast.literal_eval(prompt["reasoning_gym"]["entry"]) == entry
    answer = str(entry["answer"]).strip()
    assert score(prompt, f"So <answer>{answer}</answer>.") == own.score_answer(answer, entry)
    assert score(prompt, f"So {answer}.") == 0.0
    perfect = ReasoningGymScore().perfect_response(reasoning_gym=prompt["reasoning_gym"])
    assert score(prompt, perfect) == 1.0 if entry["answer"] is not None else perfect is None


@pytest.mark.parametrize(
    ("answer_format", "right"),
    [
        ("tag", "<answer>1</answer> <answer>\n7 </answer>"),
        ("gsm8k", "4+3\n#### 7\n"),
        ("boxed", r"\boxed{1} \boxed{7}"),
        ("plain", " 7\n"),
    ],
)
def test_only_the_last_marked_answer_counts(answer_format, right):
    (prompt,) = load("chain_sum", num_rows=1, seed=42)
    assert prompt["answer"] == "7"
    assert score(prompt, right, answer_format) == 1.0
    assert score(prompt, right + r"<answer>8</answer> \boxed{8} #### 8", answer_format) < 1.0
    assert score(prompt, "seven", answer_format) == 0.0


@pytest.mark.parametrize(("task", "answer"), [("prime_factorization", "2 x 3"), ("boxnet", "1")])
def test_an_answer_at_which_the_tasks_scorer_raises_gets_0(task, answer):
    (prompt,) = load(task, num_rows=1, seed=3)
    own = create_dataset(task, size=1, seed=3)
    with pytest.raises(Exception):  # noqa: B017 -- of any kind
        own.score_answer(answer, own[0])
    assert score(prompt, f"<answer>{answer}</answer>") == 0.0


def test_options_reach_the_task_and_its_score():
    prompts = load("basic_arithmetic", num_rows=4, options={"min_terms": 5, "max_terms": 5})
    for prompt in prompts:
        assert prompt["reasoning_gym"]["options"] == {"min_terms": 5, "max_terms": 5}
        assert score(prompt, f"<answer>{prompt['answer']}</answer>") == 1.0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"task": "chain_sums"}, "task: reasoning-gym has no task 'chain_sums'; .*chain_sum?"),
        ({"task": "word_ladder"}, "task: word_ladder given, whose rows differ from process"),
        ({"task": "composite"}, "task: composite given, which is several tasks, as mixed_dataset"),
        ({"task": "codeio"}, "task: codeio given, whose rows hold objects"),
        ({"num_rows": 0}, "num_rows: 0 given; allowed: a whole number above 0"),
        ({"options": {"terms": 1}}, "options.terms: not a setting of chain_sum; allowed: min_t"),
        ({"options": {"min_terms": 0}}, "options: chain_sum: min_terms must be positive"),
    ],
)
def test_a_wrong_setting_is_refused(settings, problem):
    with pytest.raises(ValueError, match=rf"^dataset\.{problem}"):
        load(**{"task": "chain_sum", **settings})


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    for build in (ReasoningGymScore, lambda: load("chain_sum")):
        with pytest.raises(ValueError, match=r"reasoning_gym is not installed; .*pip install"):
            build()
