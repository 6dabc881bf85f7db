"""Tries the environment of a config, its world or agents once, before anything starts."""

from __future__ import annotations

import difflib
import inspect
import shutil
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from grpo_components.agents.chat import Chat
from grpo_components.agents.environment import AgentEnvironment, parser_names
from grpo_components.agents.requests import RequestError
from grpo_components.config.components import (
    build_environment,
    environment_kind,
    imported_component,
    nested_components,
)
from grpo_components.errors import ConfigError, fail
from grpo_components.objective.component_errors import (
    named_failure,
    place_in,
    stack_text,
    users_part,
)
from grpo_components.rewards.pool import Score
from grpo_components.rollout.environment_thread import (
    EnvironmentThread,
    HungCallError,
    TimeLimit,
)
from grpo_components.rollout.multi_turn import Conversation
from grpo_components.rollout.observation_text import encode_text
from grpo_components.settings import Settings
from grpo_components.slow_calls import told_if_slow

_ALLOWED = "a torchrl EnvBase with `ask`, see docs/environments.md"
_IN_TIME = "one that answers in time"
_TRIAL_S = 30.0
"""Seconds for the trial of an environment; a twentieth of `timeouts.rollout_s` if that is more."""


def try_environment(cfg: Settings, tokenizer: Any, prompts: Sequence[dict[str, Any]]) -> None:
    """Build the environment, and send one response to one prompt."""
    kind = environment_kind(cfg.environment)
    if kind == "agents":
        return _try_agents(cfg)
    limit_s = cfg.timeouts.rollout_s
    trial_s = min(limit_s / 2, max(_TRIAL_S, limit_s / 20))
    key, name = "environment", cfg.environment._component_
    if "world" in nested_components(cfg.environment):
        key, name = "environment.world", cfg.environment.world._component_
    num_slots = min(cfg.group_size, 2)
    thread, encode = EnvironmentThread(), partial(encode_text, tokenizer)

    def call(function: Any, *args: Any) -> Any:
        """Call a function in the environment's thread, in which `sys.exit` must be caught."""
        with told_if_slow(f"the trial of {name}", trial_s):
            return thread.call(limit, _guarded, key, name, function, *args)

    build = partial(
        build_environment,
        cfg.environment,
        num_slots=num_slots,
        decode=tokenizer.decode,
        encode=encode,
        score=lambda samples: [Score(0.0, {}, False, None) for _ in samples],
        max_response_tokens=cfg.generator.max_response_tokens,
    )
    limit = TimeLimit(trial_s)
    try:
        env = call(build)
        if kind != "multi_turn":
            _check_kind(name, env, num_slots)
        problems: list[ConfigError] = []
        for row, prompt in enumerate(prompts):
            asked = {**prompt, "seed": row}
            response = tokenizer.encode(str(prompt["answer"]), add_bos=False, add_eos=False)
            response = response[: cfg.generator.max_response_tokens]
            room = cfg.generator.max_response_tokens - len(response) - 1
            limit = TimeLimit(trial_s)
            try:
                if kind == "multi_turn":
                    conversation = call(Conversation, env, asked, encode)
                    call(conversation.take_turn, tokenizer.decode(response), "stop", room)
                else:
                    _roll_out(name, env, call, [asked] * num_slots, response)
                break
            except ConfigError as error:
                problems.append(error)
                env = call(build)
        else:
            raise problems[0]
    except HungCallError as error:
        stack = users_part(error.stack)
        problem = f"{name} hangs{place_in(stack)}: {error}"
        raise ConfigError(key, problem, _IN_TIME, stack_text(stack)) from error
    thread.leave(getattr(env, "close", lambda: None))


def _guarded(key: str, name: str, function: Any, *args: Any) -> Any:
    with named_failure(key, name, (Exception, SystemExit), _ALLOWED):
        return function(*args)


def _check_kind(name: str, env: Any, num_slots: int) -> None:
    from torchrl.envs import EnvBase  # takes seconds; only needed for a user's environment

    if not (isinstance(env, EnvBase) and hasattr(env, "ask")):
        fail("environment", f"{name} makes a {type(env).__name__}", _ALLOWED)
    if tuple(env.batch_size) != (num_slots,):
        problem = f"{name} has batch size {list(env.batch_size)} for {num_slots} slots"
        fail("environment", problem, "[num_slots]")


def _roll_out(
    name: str, env: Any, call: Any, prompts: list[dict[str, Any]], response: list[int]
) -> None:
    """Play one turn as `rollout/collector.py` does, and check what the environment returns."""
    import torch
    from tensordict import NonTensorData, TensorDict, lazy_stack

    call(env.ask, prompts)
    slots = call(env.reset).unbind(0)
    tokens_so_far = []
    for slot, prompt in zip(slots, prompts, strict=True):
        if not np.array_equal(slot.get("tokens", torch.empty(0)), prompt["prompt_ids"]):
            problem = f"{name} does not start with the prompt's tokens as `tokens`"
            fail("environment", problem, _ALLOWED)
        tokens_so_far.append(slot["tokens"].tolist() + response)
        size = len(response)
        slot.update(
            TensorDict(
                response_tokens=torch.tensor(0),
                response=torch.tensor(response, dtype=torch.int64),
                logprobs=torch.full((size,), -1.0),
                versions=torch.zeros(size, dtype=torch.int32),
                finish_reason=NonTensorData("stop"),
            )
        )
    after = call(env.step, lazy_stack(list(slots), 0))
    for slot, known in zip(after.unbind(0), tokens_so_far, strict=True):
        _check_turn(name, slot["next"], known)


def _check_turn(name: str, after: Any, known: list[int]) -> None:
    problem, given = "", set(after.keys())
    if missing := [key for key in ("tokens", "done", "reward") if key not in given]:
        problem = f"does not set {missing[0]} in its step"
    elif not np.array_equal(after["tokens"].numpy()[: len(known)], known):
        problem = "changes earlier tokens"
    elif bool(after["done"]) and not ("score" in given and isinstance(after["score"], Score)):
        problem = "ends a slot without a Score as its score"
    if problem:
        fail("environment", f"{name} {problem}", _ALLOWED)


# ---- agents -------------------------------------------------------------------------------------


def _try_agents(cfg: Settings) -> None:
    """Build the environment, write a message by its chat template, and import the agent."""
    if cfg.reward_model.path is not None:  # it reads one text per response
        fail("reward_model.path", "given, and the environment runs agents", "null")
    if cfg.rollout_only:
        fail("rollout_only", "given, and the environment runs agents", "false")
    environment: AgentEnvironment = build_environment(cfg.environment)
    name, names = environment.tool_parser, parser_names()
    if name is not None and names and name not in names:
        close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.4)
        allowed = f"null, or one of vLLM's, such as {', '.join(close or names[:5])}"
        fail("environment.tool_parser", f"{name!r} given", allowed)
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
