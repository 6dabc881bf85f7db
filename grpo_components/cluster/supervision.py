"""Turns the end of a run into an exit code and one clear error line."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from grpo_components.errors import (
    MAX_MESSAGE,
    ConfigError,
    DisagreementError,
    DryRunEnd,
    FailedSamplesError,
    ReplayError,
    RoleFailedError,
    SkippedStepsError,
    StarvedError,
)
from grpo_components.plain_text import one_line, plain, shortened
from grpo_components.terminal import leave_terminal

_WITHOUT_TRACEBACK = (
    *(ReplayError, StarvedError, SkippedStepsError, FailedSamplesError, DisagreementError),
    *(ConfigError, TimeoutError, OSError),
)
"""Errors that are not bugs: each is shown in one line, like a role's failure."""
_ENDS = {signal.SIGTERM: ("terminated", 143), signal.SIGHUP: ("terminal closed", 129)}
"""Signal that ends a run as Ctrl-C does -> (reason that the run shows, exit code)."""
_CONFIG_ERRORS = (ValueError, YAMLError, OmegaConfBaseException)
"""Errors that mean a wrong config. Only the recipe's `setup` raises them directly: errors of the
running loops come in exception groups."""


def dump_task_stacks(logs: Path, why: str) -> None:
    """Append the stacks of all tasks of the running event loop to `driver_stacks.log`."""
    with (logs / "driver_stacks.log").open("a", encoding="utf-8") as file:
        file.write(f"== {time.strftime('%Y-%m-%d %H:%M:%S')} {why}\n")
        for task in asyncio.all_tasks():
            task.print_stack(file=file)


def quiet_task(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a task; asyncio does not log its error if nobody waits for the task."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def apart(work: Coroutine[Any, Any, None]) -> None:
    """Run work in its own task, so that its failure cannot hide a cancellation by Ctrl-C.

    Without this, a task group that is cancelled while one of its tasks fails raises the failure.
    """
    task = quiet_task(work)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        raise
    task.result()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Context manager: ignore Ctrl-C, SIGTERM and SIGHUP during a clean-up, so that it finishes."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *_ENDS)}
    for number, handler in before.items():
        leaves = number == signal.SIGHUP and handler is not signal.SIG_IGN
        signal.signal(number, (lambda *_: leave_terminal()) if leaves else signal.SIG_IGN)
    if isinstance(sys.exception(), KeyboardInterrupt):
        with contextlib.suppress(OSError):  # a closed terminal or pipe must not stop the clean-up
            os.write(2, b"interrupted: stopping all roles ...\n")
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(recipe_main: Callable[[], Any]) -> int:
    """Run a recipe's main; show how it failed, if it did, and return the process's exit code."""
    received = _end_on_signals()
    # A shell starts background jobs with SIGINT ignored: then neither signal would end the run.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        recipe_main()
    except DryRunEnd as end:
        sys.stdout.write(f"{plain(str(end))}\n")
        sys.stderr.writelines(f"does not fit: {problem}\n" for problem in end.problems)
        return 2 if end.problems else 0
    except SystemExit as end:
        if (place := _ended_by(recipe_main, end)) is None:
            raise  # raised by torchtune, at the normal end or with a usage message
        sys.stderr.write(f"error: {place} called sys.exit({end.code!r}) and ended the run\n")
        return 1
    except KeyboardInterrupt:
        return _interrupted(received)
    except Exception as error:  # show whatever ended the run
        if received:  # roles may fail because the signal reached them, too
            return _interrupted(received)
        if isinstance(error, _CONFIG_ERRORS) or not _reached(recipe_main, error):
            if (key := str(getattr(error, "full_key", ""))).startswith("user."):  # a fork reads it
                error = ConfigError(key, "missing", "a value under user: in the config")
            if trace := getattr(error, "user_traceback", ""):
                sys.stderr.write(f"{plain(trace).rstrip()}\n")
            text = shortened(one_line(str(error)) or type(error).__name__, MAX_MESSAGE)
            sys.stderr.write(f"config error: {text}\n")
            return 2
        cause = root_cause(error)
        if not isinstance(cause, (RoleFailedError, *_WITHOUT_TRACEBACK)):
            # A bug, maybe in a forked recipe: show where it is.
            sys.stderr.write(plain("".join(traceback.format_exception(cause))))
        sys.stderr.write(f"error: {plain(str(cause)) or type(cause).__name__}\n")
        return 1
    return 0


def _end_on_signals() -> list[int]:
    """Let the signals of `_ENDS` end the run as Ctrl-C does; return a list that collects them."""
    received: list[int] = []

    def end_as_after_ctrl_c(number: int, _: Any) -> None:  # asyncio shuts down on SIGINT only
        if number == signal.SIGHUP:
            leave_terminal()
        # A system that shuts down sends both signals, terminal and shell a SIGHUP each.
        hurried = number == signal.SIGTERM in received
        is_first = not received
        received.append(number)
        if is_first or hurried:
            signal.raise_signal(signal.SIGINT)

    for number in _ENDS:
        ignored = signal.getsignal(number) is signal.SIG_IGN  # by nohup
        if number != signal.SIGHUP or not ignored:
            signal.signal(number, end_as_after_ctrl_c)
    return received


def _interrupted(received: list[int]) -> int:
    how, code = _ENDS[signal.Signals(received[0])] if received else ("interrupted", 130)
    # A terminal that closes now would end Python while it shuts down, with another exit code.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.stderr.write(f"{how}: all roles stopped\n")
    return code


def _reached(recipe_main: Callable[[], Any], error: BaseException) -> bool:
    """Return whether an error comes from the recipe, not from torchtune reading the config."""
    recipe = inspect.unwrap(recipe_main)
    frames = traceback.walk_tb(error.__traceback__)
    return recipe is recipe_main or any(frame.f_code is recipe.__code__ for frame, _ in frames)


def _ended_by(recipe_main: Callable[[], Any], end: SystemExit) -> str | None:
    """Return file and line of a `sys.exit` in code that the recipe called.

    None if torchtune (at the end of every run) or the recipe's own file called it.
    """
    frames = traceback.extract_tb(end.__traceback__)
    # wandb replaces `sys.exit` by its own function when it is imported.
    last = next(frame for frame in reversed(frames) if "wandb" not in Path(frame.filename).parts)
    recipe = inspect.unwrap(recipe_main)
    if not _reached(recipe_main, end) or last.filename in (recipe.__code__.co_filename, __file__):
        return None
    return f"{last.filename}:{last.lineno}"


def root_cause(error: BaseException) -> BaseException:
    """Return the failure behind an exception group: a role's if there is one, else the first."""
    while isinstance(error, BaseExceptionGroup):
        failures = error.exceptions
        error = next((e for e in failures if isinstance(e, RoleFailedError)), failures[0])
    return error
