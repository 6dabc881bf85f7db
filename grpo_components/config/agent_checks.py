"""Checks an environment that runs agents, before anything starts."""

from __future__ import annotations

import difflib
import inspect
import shutil
from typing import Any

from transformers import AutoTokenizer

from grpo_components.agents.chat import Chat
from grpo_components.agents.environment import AgentEnvironment
from grpo_components.agents.host import imported
from grpo_components.agents.parser_names import parser_names
from grpo_components.agents.requests import RequestError
from grpo_components.config.building import build_environment
from grpo_components.config.signature_checks import imported_component
from grpo_components.errors import fail
from grpo_components.objective.component_errors import named_failure
from grpo_components.rollout.environment_thread import EnvironmentThread, HungCallError
from grpo_components.settings import Settings


def try_agents(cfg: Settings, limit_s: float) -> None:
    """Build the environment, read its chat template, and import the agent."""
    _check_settings(cfg)
    environment: AgentEnvironment = build_environment(cfg.environment)
    tokenizer: Any = AutoTokenizer.from_pretrained(cfg.base_model_path)
    chat = Chat(tokenizer, environment.chat_template, ())
    _check_template(chat, environment)
    agent = environment.agent
    if not isinstance(agent, str) and shutil.which(agent[0]) is None:
        problem = f"command: no program {agent[0]!r:.60}"
        fail("environment.agent", problem, "a program on the PATH, or the path of one")
    if isinstance(agent, str):
        thread = EnvironmentThread(limit_s)
        try:
            thread.call(_import, agent)
        except HungCallError as error:
            fail("environment.agent", f"{agent}: its import hangs: {error}", "one that ends")
        thread.leave(lambda: None)


def _check_settings(cfg: Settings) -> None:
    if cfg.reward_model.path is not None:  # it reads one text per response
        fail("reward_model.path", "given, and the environment runs agents", "null")
    if cfg.rollout_only:
        fail("rollout_only", "given, and the environment runs agents", "false")


def _check_template(chat: Chat, environment: AgentEnvironment) -> None:
    """Check the name of the parser, and that the template can write a message."""
    name, names = environment.tool_parser, parser_names()
    if name is not None and names and name not in names:
        close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.4)
        allowed = f"null, or one of vLLM's, such as {', '.join(close or names[:5])}"
        fail("environment.tool_parser", f"{name!r} given", allowed)
    try:
        chat.render([{"role": "user", "content": "1+1?"}], [], {})
    except RequestError as error:
        fail("environment.chat_template", str(error), "a template that writes a user's message")


def _import(path: str) -> None:
    key, allowed = "environment.agent", "the dotted path of a function of one argument, the task"
    imported_component(key, path)
    with named_failure(key, path, (Exception, SystemExit), allowed):
        function = imported(path)  # as the process does that starts agents
    if inspect.isclass(function):
        fail(key, f"{path} is a class", allowed)
    try:
        inspect.signature(function).bind({})
    except TypeError as error:
        fail(key, f"{path} cannot be called with a task: {error}", allowed)
