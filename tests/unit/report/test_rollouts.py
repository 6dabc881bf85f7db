"""The shown rollouts: limited in size, spread over the run, complete lines of valid attempts."""

from itertools import pairwise

import pytest
from lib.rows import write_rows

from grpo_tools.report import rollouts
from grpo_tools.report.rollouts import read_groups
from grpo_tools.report.run_files import Attempts


def response(text="4", **more):
    return {
        **{"response": text, "finish_reason": "stop", "response_tokens": 1, "versions": [0, 0]},
        **{"reward": 1.0, "reward_terms": {"right": 1.0}, "success": True, "error": None},
        **more,
    }


def group(step, attempt=0, responses=None):
    responses = responses or [response(), response("5")]
    return {
        **{"step": step, "attempt": attempt, "group_id": 10 * step, "prompt_index": 3, "epoch": 0},
        **{"prompt": "2+2?", "answer": "4", "responses": responses, "advantages": [0.5, -0.5]},
    }


@pytest.fixture
def write(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    return lambda groups, torn="": write_rows(path, *groups, torn=torn)


def test_they_are_spread_evenly_and_include_the_first_and_last(write):
    path = write([group(step) for step in range(1, 1001)])
    shown = read_groups(path, Attempts(), 11)
    steps = [g["step"] for g in shown.groups]
    assert (steps[0], steps[-1], len(steps), shown.logged) == (1, 1000, 11, 1000)
    gaps = {later - earlier for earlier, later in pairwise(steps)}
    assert gaps <= {99, 100, 101}
    assert not read_groups(path, Attempts(), 0).groups


def test_long_groups_reduce_their_number(write, monkeypatch):
    monkeypatch.setattr(rollouts, "MAX_BYTES", 50_000)
    path = write([group(step, responses=[response("x" * 5000)] * 2) for step in range(1, 101)])
    shown = read_groups(path, Attempts())
    assert 2 <= len(shown.groups) <= 5 and shown.logged == 100


def test_incomplete_lines_and_repeated_steps_are_skipped(write):
    groups = [group(1), group(2), group(3), group(2, attempt=1)]
    path = write(groups, torn='{"step": 3, "attempt": 0, "gro\n')
    shown = read_groups(path, Attempts({0: 0, 1: 1}))
    assert [(g["step"], g["attempt"]) for g in shown.groups] == [(1, 0), (2, 1)]
    assert (shown.logged, shown.superseded) == (2, 2)
    assert shown.groups[0]["advantages"] == [0.5, -0.5]
    path = write([*answers([0, 2], [1]), *groups[3:]])
    shown = read_groups(path, Attempts({0: 0, 1: 1}), of_evaluations=True)
    assert [(g["step"], g["attempt"]) for g in shown.groups] == [(0, 0), (2, 1)]


def test_logprobs_stay_beside_their_tokens(write, monkeypatch):
    monkeypatch.setattr(rollouts, "_MAX_TOKENS", 2)
    logprobs = {f"{who}_logprobs": [-1.0, None, -3.0] for who in ("generator", "trainer")}
    logged = response(tokens=["4", "\x07", "!"], **logprobs, reference_logprobs=None)
    shown = read_groups(write([group(1, responses=[logged])]), Attempts())
    assert shown.logprobs == {"generator", "trainer"}
    [found] = shown.groups[0]["responses"]
    assert (found["tokens"], found["more_tokens"]) == (["4", r"\x07"], 1)
    assert found["trainer_logprobs"] == [-1.0, None] and found["reference_logprobs"] is None
    assert not read_groups(write([group(1)]), Attempts()).logprobs


def answers(steps, prompts):
    """An evaluation of each step with the same prompts."""
    for step in steps:
        for prompt in prompts:
            line = group(step) | {"prompt_index": prompt, "policy_version": step - 1}
            without = ("advantages", "group_id", "epoch")
            yield {key: line[key] for key in line if key not in without}


def test_of_many_evaluations_whole_ones_are_shown_with_the_first_and_the_last(write):
    path = write(list(answers(range(0, 50), (3, 5, 8))))
    shown = read_groups(path, Attempts(), 20, of_evaluations=True)
    steps = [each["step"] for each in shown.groups]
    assert (steps[0], steps[-1], shown.logged) == (0, 49, 150) and 12 <= len(steps) <= 20
    assert [each["prompt_index"] for each in shown.groups] == [3, 5, 8] * (len(steps) // 3)
    assert shown.groups[-1]["policy_version"] == 48
    assert "advantages" not in shown.groups[-1]
    assert not read_groups(path, Attempts(), 0, of_evaluations=True).groups
