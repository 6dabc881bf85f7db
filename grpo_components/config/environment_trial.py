"""Tries a config's environment before a run: on a prompt, or for agents without running them."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from grpo_components.agents.chat import Chat
from grpo_components.agents.environment import AgentEnvironment, parser_names
from grpo_components.agents.requests import RequestError
from grpo_components.config.components import (
    RAISES,
    build_environment,
    environment_kind,
    imported_component,
    nested_components,
)
from grpo_components.errors import ConfigError, fail
from grpo_components.objective.component_errors import named_failure
from grpo_components.rewards.pool import Score
from grpo_components.rollout.multi_turn import Conversation
from grpo_components.rollout.observation_text import encode_text
from grpo_components.rollout.samples import Completion, Sample
from grpo_components.settings import Settings
from grpo_components.slow_calls import told_if_slow

_ALLOWED = "a torchrl EnvBase with `ask`, see docs/environments.md"


def try_environment(cfg: Settings, tokenizer: Any, prompts: Sequence[dict[str, Any]]) -> None:
    """Build the environment, and send it the known answer to a prompt as the response."""
    kind = environment_kind(cfg.environment)
    if kind == "agents":
        return _try_agents(cfg)
    key, name = "environment", cfg.environment._component_
    if "world" in nested_components(cfg.environment):
        key, name = "environment.world", cfg.environment.world._component_
    encode, most = partial(encode_text, tokenizer), cfg.generator.max_response_tokens
    build = partial(
        build_environment,
        cfg.environment,
        num_slots=min(cfg.group_size, 2),
        decode=tokenizer.decode,
        encode=encode,
        score=lambda samples: [Score(0.0, {}, False, None) for _ in samples],
        max_response_tokens=most,
    )
    with told_if_slow(f"the trial of {name}"):
        with named_failure(key, name, RAISES, _ALLOWED):
            env = build()
        problems: list[ConfigError] = []
        for row, prompt in enumerate(prompts):
            asked = {**prompt, "seed": row}
            answer = tokenizer.encode(str(prompt["answer"]), add_bos=False, add_eos=False)[:most]
            try:
                with named_failure(key, name, RAISES, _ALLOWED):
                    if kind == "multi_turn":
                        conversation = Conversation(env, asked, encode)
                        room = most - len(answer) - 1
                        conversation.take_turn(tokenizer.decode(answer), "stop", room)
                    else:
                        _roll_out(name, env, asked, min(cfg.group_size, 2), answer, cfg)
                break
            except ConfigError as error:  # failing for some prompts is allowed
                problems.append(error)
                env = build()
        else:
            raise problems[0]
    getattr(env, "close", lambda: None)()


class _Answers:
    """Stand-in for an engine: completes every request with the same answer."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = np.array(token_ids, np.int64)

    def submit(self, prompt_ids: list[int], *, max_tokens: int, **_: Any) -> Future[Completion]:
        ids, future = self._token_ids[:max_tokens], Future[Completion]()
        size = len(ids)
        future.set_result(
            Completion(ids, np.full(size, -1, np.float32), np.zeros(size, np.int32), "stop")
        )
        return future


def _roll_out(
    name: str, env: Any, prompt: dict[str, Any], num_slots: int, answer: list[int], cfg: Settings
) -> None:
    """Roll out a group in a torchrl environment, and refuse the environment if that fails."""
    from torchrl.envs import EnvBase  # takes seconds; only needed for a user's environment

    from grpo_components.rollout.collector import GroupCollector

    if not (isinstance(env, EnvBase) and hasattr(env, "ask")):
        fail("environment", f"{name} makes a {type(env).__name__}", _ALLOWED)
    if tuple(env.batch_size) != (num_slots,):
        problem = f"{name} has batch size {list(env.batch_size)} for {num_slots} slots"
        fail("environment", problem, "[num_slots]")
    engine: Any = _Answers(answer or [0])

    async def here(call: Callable[..., Any], *given: Any) -> Any:
        return call(*given)

    collector = GroupCollector(env, engine, cfg.generator)
    scored = asyncio.run(collector.rollout([Sample(prompt, "", 0)] * num_slots, here))
    for (record,), *_ in scored:
        if not np.array_equal(record.prompt_ids, prompt["prompt_ids"]):
            problem = f"{name} does not start with the prompt's tokens as `tokens`"
            fail("environment", problem, _ALLOWED)


# ---- agents -------------------------------------------------------------------------------------


def _try_agents(cfg: Settings) -> None:
    """Build an environment of agents; test its chat template, and whether the agent exists."""
    if cfg.reward_model.path is not None:  # it reads one text per response
        fail("reward_model.path", "given, and the environment runs agents", "null")
    if cfg.rollout_only:
        fail("rollout_only", "given, and the environment runs agents", "false")
    environment: AgentEnvironment = build_environment(cfg.environment)
    name, names = environment.tool_parser, parser_names()
    if name is not None and find_spec("vllm") is None:
        problem = f"{name!r} given, and vLLM, which has the parsers, is not installed"
        fail("environment.tool_parser", problem, "null")
    if name is not None and names and name not in names:
        close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.4)
        allowed = f"null, or one of vLLM's, such as {', '.join(close or names[:5])}"
        fail("environment.tool_parser", f"{name!r} given", allowed)
    from transformers import AutoTokenizer  # takes a second

    tokenizer: Any = AutoTokenizer.from_pretrained(cfg.base_model_path)
    chat = Chat(tokenizer, environment.chat_template, ())
    try:
        chat.render([{"role": "user", "content": "1+1?"}], [], {})
    except RequestError as error:
        fail("environment.chat_template", str(error), "a template that writes a user's message")
    key, agent = "environment.agent", environment.agent
    if not isinstance(agent, str):
        if shutil.which(agent[0]) is None:
            allowed = "a program on the PATH, or the path of one"
            fail(key, f"command: no program {agent[0]!r:.60}", allowed)
        return
    function = imported_component(key, agent)
    allowed = "the dotted path of a function of one argument, the task"
    if inspect.isclass(function):
        fail(key, f"{agent} is a class", allowed)
    try:
        inspect.signature(function).bind({})
    except TypeError as error:
        fail(key, f"{agent} cannot be called with a task: {error}", allowed)
