"""Each reward is built and called once before the start; what fails shows its own line."""

from contextlib import closing

import pytest

from grpo_components.errors import ConfigError
from grpo_components.rewards.pool import RewardSpec
from grpo_components.rewards.reward_trial import RewardTrial

REWARDS = """
class Reward:
    def __init__(self, kind="right"):
        self.kind = kind
        if kind == "unbuilt":
            raise RuntimeError("no licence")  # unbuilt

    def __call__(self, *, prompt_text, response_text, answer, finish_reason):
        if self.kind == "raises":
            return float(self.deeper(answer))
        return eval(self.kind, {"text": response_text, "answer": answer})

    def deeper(self, answer):
        return {}[answer]  # raises

class ByLevel:
    def __call__(self, *, answer, level, **rest):
        return float(answer == level)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "tried_rewards.py"
    path.write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    return path


def attempt(component, module="tried_rewards", answers="1", is_success=False, row=(), **kwargs):
    sample = {"prompt_text": "?", "finish_reason": "stop", **dict(row)}
    samples = [{**sample, "response_text": answer, "answer": answer} for answer in answers]
    spec = RewardSpec(f"{module}.{component}", kwargs, 1.0, is_success)
    with closing(RewardTrial({"own": spec}, samples, 30.0)) as trial:
        return trial.finish()


@pytest.mark.parametrize(
    ("kind", "scores", "doubt"),
    [
        ("text == answer", "1, 1, 1", ""),
        ("text == answer + '.'", "0, 0, 0", ""),  # it may want another format
        ("0.5 if text == '2' else len(text) <= 5", "1, 0.5, 1", ""),
        ("len(text) <= 5000", "1, 1, 1", ""),
        ("0.25", "0.25, 0.25, 0.25", "gives 0.25 to the known answers of 3 rows, to an empty "),
        (
            "int(text) == 1",
            "1, 0, 0",
            "an empty response fails its sample: the reward raised Value",
        ),
        ("[None, 1][text != '']", "1, 1, 1", "fails its sample: the reward raised TypeError"),
        ("1 / (text != '2')", "1, fails, 1", "the reward raised ZeroDivisionError"),
    ],
)
def test_a_reward_shows_what_it_gives_to_known_answers_and_to_none(file, kind, scores, doubt):
    kind = kind.replace("text != '2'", "text not in ('', '2')")
    (line,), doubts = attempt("Reward", answers="123", kind=kind)
    assert line.startswith(f"rewards.own: {scores} for the known answers of 3 rows; ")
    last = line.removesuffix(" for an empty response").rpartition("; ")[2]
    assert (last == "fails") == ("fails its sample" in "".join(doubts)), line
    assert [doubt in each for each in doubts] == [True] * bool(doubt), doubts
    assert all(each.startswith("warning: rewards.own: ") for each in doubts)


@pytest.mark.parametrize("is_success", [True, False])
def test_a_success_above_the_largest_reward_is_doubted(file, is_success):
    _, doubts = attempt("Reward", answers="12", is_success=is_success, kind="10.0 * (text == '2')")
    assert ["gives 10, above its `max_reward`" in doubt for doubt in doubts] == [True] * is_success


@pytest.mark.parametrize("given", ["None", "(1.0, 'note')", "'0.5'"])
def test_a_reward_that_returns_no_number_is_told_what_it_returned(file, given):
    with pytest.raises(ConfigError, match=r"it returned .*, not a number"):
        attempt("Reward", kind=given)


def test_a_reward_that_can_write_a_best_response_shows_what_it_gives_to_that():
    maths = "MathCorrectness", "grpo_components.rewards.maths"
    (line,), _ = attempt(*maths, answers="12", answer_format="gsm8k")
    assert line.endswith(": 1, 1 for its own best responses to 2 rows; 0 for an empty response")


@pytest.mark.parametrize(("kind", "what"), [("raises", "KeyError"), ("unbuilt", "RuntimeError")])
def test_a_reward_that_fails_is_refused_with_its_line_and_traceback(file, kind, what):
    with pytest.raises(ConfigError) as refused:
        attempt("Reward", kind=kind)
    message, trace = str(refused.value), refused.value.user_traceback
    line = next(n for n, text in enumerate(REWARDS.splitlines(), 1) if f"# {kind}" in text)
    assert message.startswith("rewards.own: tried_rewards.Reward ") and len(message) <= 300
    assert what in message and f"({file}:{line})" in message
    frames = [text for text in trace.splitlines() if text.startswith("  File ")]
    assert all(f'"{file}"' in frame for frame in frames), trace
    assert f"line {line}, in " in frames[-1]


@pytest.mark.parametrize(("row", "has"), [({}, "none"), ({"lvl": 1}, "lvl")])
def test_a_reward_that_wants_a_column_is_told_which_the_rows_have(file, row, has):
    with pytest.raises(ConfigError, match=f"'level'; allowed: .*, or a column .* have: {has}$"):
        attempt("ByLevel", row=row)
    assert attempt("ByLevel", row={"level": "1"})[0]


def test_a_judge_that_is_down_is_not_called_a_wrong_class():
    rubric = {"base_url": "http://127.0.0.1:9/v1/", "model": "tiny", "rubric": "{{ response }}"}
    said = (
        r"tiny at http://127\.0\.0\.1:9/v1 gave no grade: ConnectError: \[Errno 111\] "
        r".*; allowed: one that can score a row of the data set$"
    )
    with pytest.raises(ConfigError, match=said):
        attempt("LLMJudge", "grpo_components.rewards.judge", **rubric, retries=0)
