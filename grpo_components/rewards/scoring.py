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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, cast

from grpo_components.data.columns import CALL, SEED
from grpo_components.objective.component_errors import defined_at, describe, failure_text
from grpo_components.rewards.pool import RewardInput, RewardSpec, Score

_MAX_CPU_S = 120.0
_PR_SET_PDEATHSIG = 1


def score_sample(
    rewards: Mapping[str, tuple[RewardSpec, Callable[..., float]]],
    sample: RewardInput,
    announce: Callable[[str], None],
    too_costly: Sequence[str] = (),
    max_cpu_s: float = _MAX_CPU_S,
) -> Score:
    """Apply all rewards to one sample."""
    terms, used = dict[str, float](), dict[str, float]()
    success, failed = False, partial(Score, math.nan, {}, False, used=used)
    for name, (spec, reward) in rewards.items():
        announce(name)
        if name in too_costly:
            terms[name] = 0.0
            continue
        outcome = _outcome(name, reward, sample, max_cpu_s)
        if hasattr(reward, "take_use"):
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
    name: str, reward: Callable[..., float], sample: RewardInput, max_cpu_s: float
) -> float | str:
    where = defined_at(reward)
    try:
        with _cpu_limit(getattr(reward, "response_cpu_s", None), max_cpu_s):
            value = value_of(reward, sample)
    except (Exception, SystemExit) as error:  # user code may raise anything
        return failure_text(f"reward {name}", error, where)
    return value if math.isfinite(value) else f"reward {name}: gave {value}{where}"


def value_of(reward: Callable[..., Any], sample: RewardInput) -> float:
    """Return what a reward gives a sample; raise if that is no number."""
    value = float(reward(**arguments_for(reward, sample)))
    _ = value >= getattr(reward, "max_reward", 1.0)
    return value


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


@contextlib.contextmanager
def _cpu_limit(cpu_s: float | None, max_cpu_s: float) -> Iterator[None]:
    """Context manager: the kernel kills this process if the block takes more CPU time than allowed.

    The limit is the lesser of both arguments, in seconds; if `cpu_s` is None, there is no limit.
    """
    # No signal handler: during a huge power, for example, Python would run it only afterwards.
    if cpu_s is not None:
        signal.setitimer(signal.ITIMER_PROF, min(cpu_s, max_cpu_s))
    try:
        yield
    finally:
        if cpu_s is not None:
            signal.setitimer(signal.ITIMER_PROF, 0)


def build(spec: RewardSpec) -> Callable[..., float]:
    """Make a reward of the config."""
    module, _, attribute = spec.component.rpartition(".")
    return getattr(importlib.import_module(module), attribute)(**spec.kwargs)


def _serve(connection: Connection) -> None:
    """Run a reward process: build the rewards, then score samples until the owner exits."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
    try:
        specs, max_cpu_s = connection.recv()
        rewards = {name: (spec, build(spec)) for name, spec in specs.items()}
    except Exception as error:  # sent to the owner, which raises it
        logging.getLogger(__name__).exception("rewards cannot be built")  # into the owner's log
        connection.send(f"rewards cannot be built: {describe(error)}")
        return
    connection.send(None)
    # Nobody needs to hear the name of the only reward; a message costs more than most rewards.
    announce = connection.send if len(rewards) > 1 else lambda _: None
    while True:
        try:
            sample, too_costly = connection.recv()
        except EOFError:
            return
        score = score_sample(rewards, sample, announce, too_costly, max_cpu_s)
        connection.send(score)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
