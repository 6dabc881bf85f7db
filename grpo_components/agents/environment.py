"""The environment in which an agent, a program of the user, calls the policy over HTTP."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_components.errors import ConfigError


class AgentEnvironment:
    """Runs an agent for each response; the policy is trained on its answers to the agent.

    The agent is a function of a task (a dictionary with the row's columns, `prompt_text`,
    `answer` and `seed`), or a command that reads the task as JSON from its standard input. It
    reaches the policy with any OpenAI client, at the address and with the key in the environment
    variables `OPENAI_BASE_URL` and `OPENAI_API_KEY`. The config's rewards score the response:
    `AgentReward` takes what the function returns, or what the agent posts to `reward` below the
    address; other rewards score the last answer.

    Args:
        agent: dotted path of a function, sync or async; or `command: [program, argument, ...]`.
        chat_template: None for the model's template; `plain` to write only the contents of the
            messages, one after the other; or the path of a file with a Jinja template.
        tool_parser: vLLM's parser for the model's tool calls, such as `hermes`; None refuses tools.
        max_calls: maximum number of requests that the agent may make for one response.

    Raises:
        ValueError: an argument is wrong; the message names its key.
    """

    environment_kind = "agents"

    def __init__(
        self,
        agent: str | Mapping[str, Sequence[str]],
        chat_template: str | None = None,
        tool_parser: str | None = None,
        max_calls: int = 100,
    ) -> None:
        self.agent = _checked_agent(agent)
        self.chat_template, self.tool_parser = chat_template, tool_parser
        if type(max_calls) is not int or max_calls < 1:
            allowed = "a whole number of at least 1"
            raise ConfigError("environment.max_calls", f"{max_calls!r} given", allowed)
        self.max_calls = max_calls


def _checked_agent(agent: Any) -> str | list[str]:
    """Check the key `agent`; return a function's dotted path, or a program and its arguments."""
    if isinstance(agent, str) and "." in agent.strip("."):
        return agent
    command = agent.get("command") if isinstance(agent, Mapping) and len(agent) == 1 else None
    if isinstance(command, Sequence) and not isinstance(command, str) and command:
        return [str(part) for part in command]
    allowed = "the dotted path of a function, or `command` with a list of texts"
    raise ConfigError("environment.agent", f"{agent!r:.100} given", allowed)


def parser_names() -> list[str]:
    """Return the names of vLLM's tool call parsers without importing vLLM, which takes seconds.

    Empty if vLLM's list is not found; the generator checks the name anyway.
    """
    spec = importlib.util.find_spec("vllm")
    for folder in (spec and spec.submodule_search_locations) or ():
        source = Path(folder, "tool_parsers", "__init__.py")
        if source.is_file():
            return sorted(re.findall(r'^    "(.+)": \(', source.read_text("utf-8"), re.MULTILINE))
    return []
