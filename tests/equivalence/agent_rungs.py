"""Rungs of the equivalence ladder that compare sessions of agents with plain rollouts."""

from __future__ import annotations

import math
from contextlib import closing

import numpy as np

from equivalence.ladder import SYNCHRONOUS, Bench, max_difference, rung
from equivalence.roles import GENERATOR, tiny_arguments, tiny_config
from equivalence.update_rungs import weights_after_step
from grpo_components.trajectory import Trajectory, concatenate, unpack

_GROUPS = 4
_TEMPERATURE = 0.05  # so low that the seeds, which differ, do not matter
_SAME = ("prompt_ids", "response_ids", "response_mask", "token_versions")


@rung(
    "agent's session of one call = plain rollout",
    "an agent with OpenAI's client, and the plain environment, on the same prompts: tokens, "
    "masks, versions, rewards, logprobs, and the weights after one SGD step",
    0.0,
    nightly=True,
)
def session_is_plain_rollout(bench: Bench) -> float:
    plain, sessions = _plain(bench), _rolled_out(bench, "one_call")
    gap = _difference(plain, sessions)
    advantages = np.resize(np.array([1, -1], np.float32), len(plain))
    trained = [weights_after_step(bench, rows, advantages) for rows in (plain, sessions)]
    return max(gap, max_difference(*trained))


@rung(
    "agent's session of two calls, the second of which continues the first = plain rollout",
    "tokens, masks, versions and rewards are the same; logprobs in nats, as the second call "
    "reads what the first sampled",
    1e-5,
    nightly=True,
)
def continued_session_is_plain_rollout(bench: Bench) -> float:
    return _difference(_plain(bench), _rolled_out(bench, "two_calls"))


def _plain(bench: Bench) -> list[Trajectory]:
    return bench.once("plain rollouts", lambda: _rolled_out(bench, None))


def _rolled_out(bench: Bench, agent: str | None) -> list[Trajectory]:
    """Return responses to the first prompts; of an agent's sessions if one is named."""
    own = [
        "environment._component_=grpo_components.agents.environment.AgentEnvironment",
        f"environment.agent=equivalence.agents.{agent}",
        "environment.chat_template=plain",
    ]
    cfg = tiny_config(bench.folder() / "run", *SYNCHRONOUS, *bench.policy, *(own if agent else ()))
    arguments, prompts = tiny_arguments(cfg)
    with closing(bench.process(GENERATOR, **arguments.generator)) as generator:
        groups = [
            generator.call("generate_group", *next(prompts), number, 0, _TEMPERATURE)[0]
            for number in range(_GROUPS)
        ]
    return unpack(concatenate(groups))


def _difference(left: list[Trajectory], right: list[Trajectory]) -> float:
    """Return the largest difference of logprobs in nats; infinite if anything else differs."""
    worst = 0.0
    if len(left) != len(right):
        return math.inf
    for a, b in zip(left, right, strict=True):
        same = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in _SAME)
        if not same or (a.reward, a.finish_reason) != (b.reward, b.finish_reason):
            return math.inf
        gap = np.abs(a.generator_logprobs - b.generator_logprobs)
        worst = max(worst, float(gap.max(initial=0.0)))
    return worst
