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
        return 1.0

    def deeper(self, answer):
        return {}[answer]  # raises
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "tried_rewards.py"
    path.write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    return path


def attempt(component, module="tried_rewards", **kwargs):
    sample = {"prompt_text": "?", "response_text": "1", "answer": "1", "finish_reason": "stop"}
    spec = RewardSpec(f"{module}.{component}", kwargs, 1.0, False)
    with closing(RewardTrial({"own": spec}, [sample], 30.0)) as trial:
        trial.finish()


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


def test_a_judge_that_is_down_is_not_called_a_wrong_class():
    rubric = {"base_url": "http://127.0.0.1:9/v1/", "model": "tiny", "rubric": "{{ response }}"}
    said = (
        r"tiny at http://127\.0\.0\.1:9/v1 gave no grade: ConnectError: \[Errno 111\] "
        r".*; allowed: one that can score a row of the data set$"
    )
    with pytest.raises(ConfigError, match=said):
        attempt("LLMJudge", "grpo_components.rewards.judge", **rubric, retries=0)
