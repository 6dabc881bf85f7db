"""What a reward process does: builds the rewards, and scores one sample after the other."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import logging
import math
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, cast

from grpo_components.data.columns import CALL, SEED
from grpo_components.objective.component_errors import (
    defined_at,
    describe,
    failure_text,
    user_traceback,
)
from grpo_components.rewards.pool import RewardInput, RewardSpec, Score

_PR_SET_PDEATHSIG = 1


def score_sample(
    rewards: Mapping[str, tuple[RewardSpec, Callable[..., float]]],
    announce: Callable[[str], None],
    max_cpu_s: float,
    sample: RewardInput,
    too_costly: Sequence[str],
    is_perfect: bool = False,
) -> Score:
    """Apply the rewards to one sample; `is_perfect`: to their own best responses to it."""
    terms, used = dict[str, float](), dict[str, float]()
    success, failed = False, partial(Score, math.nan, {}, False, used=used)
    for name, (spec, reward) in rewards.items():
        if name in too_costly:
            terms[name] = 0.0
            continue
        announce(name)
        outcome = _outcome(name, reward, sample, is_perfect, max_cpu_s)
        if hasattr(type(reward), "take_use"):
            now = cast(Any, reward).take_use()
            used |= {f"{name}_{kind}": value for kind, value in now.items()}
        if isinstance(outcome, str):
            return failed(outcome)
        terms[name] = outcome
        if spec.is_success:
            success = outcome >= getattr(reward, "max_reward", 1.0)
    total = sum(spec.weight * terms[name] for name, (spec, _) in rewards.items())
    if not math.isfinite(total):
        return failed(f"rewards: the weighted sum is {total}")
    return Score(total, terms, success, None, used)


def _outcome(
    name: str, reward: Any, sample: RewardInput, is_perfect: bool, max_cpu_s: float
) -> float | str:
    is_ours = type(reward).__module__.startswith("grpo_components.")
    where = "" if is_ours else defined_at(reward)  # a line of ours tells the user nothing
    try:
        if is_perfect:
            perfect = reward.perfect_response
            response = perfect(**arguments_for(perfect, sample, ()))
            if response is None:
                return getattr(reward, "max_reward", 1.0)
            sample = {**sample, "response_text": response}
        # The kernel kills this process at the limit. No signal handler: during a huge power, for
        # example, Python would run it only afterwards. 0 is no limit.
        limit_s = getattr(reward, "response_cpu_s", None) or 0.0
        signal.setitimer(signal.ITIMER_PROF, min(limit_s, max_cpu_s))
        try:
            value = float(reward(**arguments_for(reward, sample)))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        _ = value >= getattr(reward, "max_reward", 1.0)  # raises if it is no number
    except (Exception, SystemExit) as error:  # user code may raise anything
        return failure_text(f"reward {name}", error, where)
    return value if math.isfinite(value) else f"reward {name}: gave {value}{where}"


def arguments_for(
    reward: Callable[..., Any], sample: RewardInput, always: Sequence[str] = CALL
) -> RewardInput:
    """Return the arguments of one call of a reward: `always`, and columns that it takes."""
    sample = {name: value for name, value in sample.items() if name != SEED}
    try:
        parameters = inspect.signature(reward).parameters
    except (TypeError, ValueError):  # a builtin, or nothing that can be called
        parameters = {}
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return sample
    return {name: value for name, value in sample.items() if name in parameters or name in always}


def _counts_failures() -> str:
    """Score a sample by a reward that raises; return what is wrong unless the sample fails."""

    def raises(**sample: Any) -> float:
        raise RuntimeError("raised on purpose, to see that it counts as a failure")

    rewards = {"check": (RewardSpec("", {}, 1.0, False), raises)}
    score = score_sample(rewards, lambda _: None, 0.0, dict.fromkeys(CALL, ""), ())
    return "" if score.error else f"a reward that raises gives {score.reward} and no failed sample"


def _serve(connection: Connection) -> None:
    """Run a reward process: build the rewards, then score samples until the owner exits."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
    specs, max_cpu_s = connection.recv()
    rewards: dict[str, tuple[RewardSpec, Callable[..., float]]] = {}
    for name, spec in specs.items():
        connection.send((name, ""))
        try:
            module, _, attribute = spec.component.rpartition(".")
            factory = getattr(importlib.import_module(module), attribute)
            rewards[name] = spec, factory(**spec.kwargs)
        except (Exception, SystemExit) as error:  # sent to the owner, which raises it
            logging.getLogger(__name__).exception("rewards cannot be built")  # into its log
            connection.send((name, f"{describe(error)}\n{user_traceback(error)}"))
            return
    if problem := _counts_failures():
        connection.send((next(iter(specs)), problem))
        return
    connection.send([n for n, (_, each) in rewards.items() if hasattr(each, "perfect_response")])
    # Nobody needs to hear the name of the only reward; a message costs more than most rewards.
    announce = connection.send if len(rewards) > 1 else lambda _: None
    with contextlib.suppress(EOFError):
        while True:
            call = connection.recv()
            connection.send(score_sample(rewards, announce, max_cpu_s, *call))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
