"""Tries the environment of a config with one made-up response, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from grpo_components.config.building import build_environment, has_slots_apart
from grpo_components.objective.component_errors import ComponentError, named_failure
from grpo_components.rewards.pool import Score
from grpo_components.rollout.environment_thread import EnvironmentThread
from grpo_components.rollout.observation_text import encode_text
from grpo_components.settings import Settings

_ALLOWED = "a torchrl EnvBase with `ask`, see docs/environments.md"


def try_environment(cfg: Settings, tokenizer: Any, prompts: Sequence[dict[str, Any]]) -> None:
    """Build the environment, give it one prompt, and send it one response.

    Args:
        cfg: settings checked by preflight.
        tokenizer: tokenizer of the config.
        prompts: rows of the data set; the environment must work with at least one of them.

    Raises:
        ComponentError: the environment fails, hangs or breaks its contract; says how.
    """
    name = cfg.environment._component_
    num_slots = 1 if has_slots_apart(cfg.environment) else min(cfg.group_size, 2)
    thread = EnvironmentThread(cfg.timeouts.rollout_s / 2)

    def call(function: Any, *args: Any) -> Any:
        """Call a function in the environment's thread, in which `sys.exit` must be caught."""
        return thread.call(_guarded, name, function, *args)

    build = partial(
        build_environment,
        cfg.environment,
        num_slots=num_slots,
        decode=tokenizer.decode,
        encode=partial(encode_text, tokenizer),
        score=lambda samples: [Score(0.0, {}, False, None) for _ in samples],
        max_response_tokens=cfg.generator.max_response_tokens,
    )
    try:
        env = call(build)
        _check_kind(name, env, num_slots)
        problems: list[ComponentError] = []
        for row, prompt in enumerate(prompts):
            asked = {**prompt, "seed": row}
            response = tokenizer.encode(str(prompt["answer"]), add_bos=False, add_eos=False)
            response = response[: cfg.generator.max_response_tokens]
            thread.begin()
            try:
                _roll_out(name, env, call, [asked] * num_slots, response)
                break
            except ComponentError as error:
                problems.append(error)
                env = call(build)
        else:
            raise problems[0]
    except TimeoutError as error:
        raise ComponentError(f"environment: {name}, {error}; allowed: {_ALLOWED}") from error
    thread.leave(getattr(env, "close", lambda: None))


def _guarded(name: str, function: Any, *args: Any) -> Any:
    with named_failure("environment", name, (Exception, SystemExit), _ALLOWED):
        return function(*args)


def _check_kind(name: str, env: Any, num_slots: int) -> None:
    missing = [method for method in ("ask", "reset", "step") if not hasattr(env, method)]
    if missing:
        made = f"{name} makes a {type(env).__name__} without {missing[0]}"
        raise ComponentError(f"environment: {made}; allowed: {_ALLOWED}")
    from torchrl.envs import EnvBase  # takes seconds; only needed for a user's environment

    if not isinstance(env, EnvBase):
        made = f"{name} makes a {type(env).__name__}"
        raise ComponentError(f"environment: {made}; allowed: {_ALLOWED}")
    if tuple(env.batch_size) != (num_slots,):
        problem = f"{name} has batch size {list(env.batch_size)} for {num_slots} slots"
        raise ComponentError(f"environment: {problem}; allowed: [num_slots]")


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
            raise ComponentError(f"environment: {problem}; allowed: {_ALLOWED}")
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
        raise ComponentError(f"environment: {name} {problem}; allowed: {_ALLOWED}")
