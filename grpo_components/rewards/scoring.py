"""Runs in a reward process: builds the rewards, and scores one sample after another."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, cast

from grpo_components.data.columns import CALL, SEED
from grpo_components.errors import shown
from grpo_components.objective.component_errors import (
    defined_at,
    describe,
    failure_text,
    user_traceback,
)
from grpo_components.rewards.pool import RewardInput, Score

_PR_SET_PDEATHSIG = 1


def score_response(
    name: str, reward: Any, sample: RewardInput, is_perfect: bool, max_cpu_s: float
) -> Score:
    """Let a reward score a sample; if `is_perfect`, score its `perfect_response` instead."""
    is_ours = type(reward).__module__.startswith("grpo_components.")
    where = "" if is_ours else defined_at(reward)  # a line of ours tells the user nothing
    best, begun = getattr(reward, "max_reward", 1.0), time.monotonic()
    value, is_best, problem = math.nan, False, None
    try:
        response: Any = sample["response_text"]
        if is_perfect:
            response = reward.perfect_response(**arguments_for(reward.perfect_response, sample, ()))
        # The kernel kills this process at the limit. No signal handler: during a huge power, for
        # example, Python would run it only afterwards. 0 is no limit.
        limit_s = getattr(reward, "response_cpu_s", None) or 0.0
        signal.setitimer(signal.ITIMER_PROF, min(limit_s, max_cpu_s))
        try:
            given = arguments_for(reward, {**sample, "response_text": response})
            value = best if response is None else _number(reward(**given))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        is_best = value >= best  # raises if it is no number
        if not math.isfinite(value):
            problem = f"reward {name}: gave {value}{where}"
    except (Exception, SystemExit) as error:  # user code may raise anything
        problem = failure_text(f"reward {name}", error, where)
    use = cast(Any, reward).take_use() if hasattr(type(reward), "take_use") else {}
    used = {f"{name}_{kind}": amount for kind, amount in use.items()}
    seconds = time.monotonic() - begun
    return Score(value, {name: value}, is_best, problem, used, value > best, seconds)


def _number(given: Any) -> float:
    if given is None or isinstance(given, str | tuple | list | dict):
        raise TypeError(f"it returned {shown(given)}, not a number")
    return float(given)


def arguments_for(
    reward: Callable[..., Any], sample: RewardInput, always: Sequence[str] = CALL
) -> RewardInput:
    """Select the arguments of a reward from a sample: those in `always`, and those it accepts."""
    sample = {name: value for name, value in sample.items() if name != SEED}
    parameters = inspect.signature(reward).parameters
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return sample
    return {name: value for name, value in sample.items() if name in parameters or name in always}


def _counts_failures() -> str:
    """Test that a sample fails if a reward raises an error; return what is wrong, or ""."""

    def raises(**sample: Any) -> float:
        raise RuntimeError("raised on purpose, to see that it counts as a failure")

    found = score_response("check", raises, dict.fromkeys(CALL, ""), False, 0.0)
    return "" if found.error else f"a reward that raises gives {found.reward} and no failed sample"


def _serve(connection: Connection) -> None:
    """Run a reward process: build the rewards, then score samples until the connection closes."""
    # Without prctl, as on macOS, it ends after the sample during which the connection closes.
    getattr(ctypes.CDLL(None), "prctl", lambda *_: None)(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
    specs, max_cpu_s = connection.recv()
    rewards: dict[str, Any] = {}
    for name, spec in specs.items():
        problem = _counts_failures()
        try:
            module, _, attribute = spec.component.rpartition(".")
            factory = getattr(importlib.import_module(module), attribute)
            rewards[name] = factory(**spec.kwargs)
        except (Exception, SystemExit) as error:  # sent to the owner, which raises it
            logging.getLogger(__name__).exception("rewards cannot be built")  # into its log
            problem = f"{describe(error)}\n{user_traceback(error)}"
        connection.send(problem or hasattr(rewards[name], "perfect_response"))
    with contextlib.suppress(EOFError):
        while True:
            name, sample, is_perfect = connection.recv()
            connection.send(score_response(name, rewards[name], sample, is_perfect, max_cpu_s))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
