"""A world and its tools are called once before the start; what fails shows its own line."""

import sys

import pytest

from grpo_components.config.environment_trial import try_environment
from grpo_components.objective.component_errors import ComponentError

WORLDS = """
import threading
from typing import Literal

from grpo_components.rollout.multi_turn import Reply
from grpo_components.rollout.tools import ToolUse


def right(prompt, seed):
    return lambda text: Reply("again", done=text == prompt["level"])


def make_right():
    return right


def asks_for_a_column(prompt, seed):
    return lambda text: Reply(prompt["colour"])  # raises


def make_asking():
    return asks_for_a_column


def hangs(prompt, seed):
    threading.Event().wait(60)  # hangs


def make_hanging():
    return hangs


def fine(text: str, number: int, kind: Literal["a", "b"], names: list[str], more: dict | None):
    assert (text, number, kind, names, more) == ("1", 1, "a", ["1"], {})
    return "fine"


def picky(day):
    raise ValueError("no such day")


def broken(word: str) -> str:
    return {}[word]  # raises in a tool


def silent(word: str = "x"):
    return None


def leaving():
    raise SystemExit(0)


def tools(names):
    return ToolUse({name: globals()[name] for name in names})
"""


class Tokenizer:
    stop_tokens = (0,)

    def encode(self, text, **_):
        return [ord(character) for character in text]

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))


@pytest.fixture
def attempt(settings_with, tmp_path, monkeypatch):
    """Try the environment of several turns with a world; returns the file of the worlds."""
    file = tmp_path / "my_worlds.py"
    file.write_text(WORLDS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_worlds", raising=False)
    prompt = {"prompt_index": 0, "prompt_ids": [5, 6], "prompt_text": "?", "answer": "3"}

    def run(maker, timeout_s=600.0, **arguments):
        environment = {
            "_component_": "grpo_components.rollout.multi_turn.MultiTurnEnvironment",
            "max_turns": 2,
            "world": {"_component_": f"my_worlds.{maker}", **arguments},
        }
        cfg = settings_with(environment=environment, timeouts={"rollout_s": timeout_s})
        try_environment(cfg, Tokenizer(), [prompt | {"level": "3"}])

    yield run, file
    sys.modules.pop("my_worlds", None)


def refusal(attempt, maker, mark, **arguments):
    """The message of a world that is refused; its place and traceback are those of the mark."""
    run, file = attempt
    with pytest.raises(ComponentError) as refused:
        run(maker, **arguments)
    message, trace = str(refused.value), refused.value.user_traceback
    assert message.startswith(f"environment.world: my_worlds.{maker}") and len(message) <= 300
    if mark:
        line = next(n for n, text in enumerate(WORLDS.splitlines(), 1) if mark in text)
        assert f"({file}:{line})" in message
        frames = [text for text in trace.splitlines() if text.startswith("  File ")]
        assert frames[0].startswith(f'  File "{file}", line {line}, in ')
    return message


def test_a_world_that_answers_with_the_rows_columns_passes(attempt):
    attempt[0]("make_right")


def test_a_world_that_raises_is_refused_with_its_line_and_traceback(attempt):
    assert "KeyError" in refusal(attempt, "make_asking", "# raises")


def test_a_world_that_hangs_is_refused_with_its_line(attempt):
    assert "hangs" in refusal(attempt, "make_hanging", "# hangs", timeout_s=1.0)


def test_tools_that_return_a_text_or_refuse_their_arguments_pass(attempt):
    attempt[0]("tools", names=["fine", "picky"])


@pytest.mark.parametrize(
    ("tool", "mark", "what"),
    [
        ("broken", "# raises in a tool", "KeyError"),
        ("silent", "", "tools.silent: returned None ("),
        ("leaving", "raise SystemExit(0)", "SystemExit"),
    ],
)
def test_a_tool_that_would_fail_samples_is_refused_by_its_name(attempt, tool, mark, what):
    message = refusal(attempt, "tools", mark, names=["fine", tool])
    assert f"tool {tool}" in message and what in message
