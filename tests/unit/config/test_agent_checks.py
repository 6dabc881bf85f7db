"""Wrong settings of an agent are refused before anything starts, by key, in one line."""

import sys

import pytest

from grpo_components.config.environment_trial import try_environment
from grpo_components.config.reading import read_settings
from grpo_components.objective.component_errors import ComponentError

AGENT = {
    "_component_": "grpo_components.agents.environment.AgentEnvironment",
    "agent": "fine_agent.run",
    "chat_template": "plain",
}


FINE = """
NUMBER = 3
def run(task): return 1.0
def two(task, other): return 1.0
def none(): return 1.0
class Agent:
    def __init__(self, task): pass
"""


@pytest.fixture
def trial(settings_with, tiny_policy, tmp_path, monkeypatch):
    """Tries an environment with agents; returns the error's text, or None."""
    (tmp_path / "fine_agent.py").write_text(FINE)
    (tmp_path / "broken_agent.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}{{ m.content }}")
    (tmp_path / "raising.jinja").write_text("{{ raise_exception('no users') }}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run(**changes):
        environment = {**AGENT, **changes}
        cfg = settings_with(environment=environment)
        try:
            try_environment(cfg, None, [])
        except (ValueError, ComponentError) as error:
            return str(error).partition("\n")[0]
        return None

    return run


def test_a_right_agent_is_taken(trial):
    assert trial() is None
    assert trial(agent={"command": [sys.executable, "x.py"]}, tool_parser="hermes") is None


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        ({"agent": "fine_agent.nobody"}, "environment.agent", "allowed: fine_agent.run"),
        ({"agent": "fine_agent.runs"}, "environment.agent", "did you mean fine_agent.run?"),
        ({"agent": "fin_agent.run"}, "environment.agent", "did you mean fine_agent.run?"),
        ({"agent": "fine_agent.two"}, "environment.agent", "missing a required argument: 'other'"),
        ({"agent": "fine_agent.none"}, "environment.agent", "a function of one argument"),
        ({"agent": "fine_agent.Agent"}, "environment.agent", "is a class"),
        ({"agent": "fine_agent.NUMBER"}, "environment.agent", "fine_agent.NUMBER"),
        ({"agent": "broken_agent.run"}, "environment.agent", "nothing_of_this_name"),
        ({"agent": "no_such_module.run"}, "environment.agent", "no_such_module"),
        ({"agent": "nothing"}, "environment.agent", "the dotted path of a function"),
        ({"agent": {"command": []}}, "environment.agent", "`command` with a list"),
        ({"agent": {"command": "python x.py"}}, "environment.agent", "`command` with a list"),
        ({"agent": {"program": ["x"]}}, "environment.agent", "`command` with a list"),
        ({"agent": {"command": ["no-such-program"]}}, "environment.agent", "no program"),
        ({"agent": {"command": ["./fine_agent.py"]}}, "environment.agent", "no program"),
        ({"tool_parser": "hermez"}, "environment.tool_parser", "such as hermes"),
        ({"tool_parser": "zzzz"}, "environment.tool_parser", "null, or one of vLLM's"),
        ({"chat_template": None}, "environment.chat_template", "allowed: plain, or"),
        ({"chat_template": "no.jinja"}, "environment.chat_template", "No such file"),
        ({"chat_template": "broken.jinja"}, "environment.chat_template", "TemplateSyntaxError"),
        ({"chat_template": "raising.jinja"}, "environment.chat_template", "no users"),
        ({"max_calls": 0}, "environment.max_calls", "at least 1"),
        ({"max_calls": "many"}, "environment.max_calls", "at least 1"),
    ],
)
def test_a_wrong_setting_is_named(trial, changes, key, text):
    error = trial(**changes)
    assert error is not None
    assert error.startswith(f"{key}: ")
    assert text in error
    assert len(error) <= 300


def test_a_deadline_is_a_positive_number(values_with):
    for value in (0, -1, "soon"):
        with pytest.raises(ValueError, match=r"^timeouts\.rollout_s: "):
            read_settings(values_with(timeouts={"rollout_s": value}))
