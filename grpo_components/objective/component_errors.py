"""Reports errors of a config's components (loss, reward, ...), with the line of the user's code."""

from __future__ import annotations

import contextlib
import inspect
import sysconfig
import traceback
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any, cast

from grpo_components.errors import ConfigError
from grpo_components.plain_text import shortened

_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = (_PACKAGE, Path(sysconfig.get_path("stdlib")))
_INSTALLED = {"site-packages", "dist-packages"}
MAX_ERROR_CHARS = 120
"""Maximum characters shown of a component's error, whose text may contain a whole tensor."""
MAX_FAILURE_CHARS = 1000
"""Maximum characters of a failed sample's error, which may quote the whole response."""
MAX_TRACEBACK_CHARS = 6000
"""Maximum characters of a traceback, which ends with the text of the error."""
_MAX_FRAMES = 20


def name_of(component: Any) -> str:
    """Return a component's name for messages: the dotted path of its class or function."""
    named = cast(Any, component if hasattr(component, "__qualname__") else type(component))
    return f"{named.__module__}.{named.__qualname__}"


@contextlib.contextmanager
def named_failure(
    key: str,
    name: str,
    kinds: tuple[type[BaseException], ...] = (SystemExit,),
    allowed: str = "one that raises nothing",
) -> Generator[None]:
    """Context manager: turn a component's error into a `ConfigError` that says where it arose.

    The message has the component's key and name, the error with its file and line, and `allowed`,
    which says what the component should do. Errors that are not of `kinds` pass through.
    """
    try:
        yield
    except ConfigError:
        raise
    except kinds as error:
        problem = f"{name} raised {describe(error)}"
        raise ConfigError(key, problem, allowed, user_traceback(error)) from error


def describe(error: BaseException, max_chars: int = MAX_ERROR_CHARS, where: str = "") -> str:
    """Return in one line an error's type, place in the user's code (or `where`) and message."""
    text = " ".join(f"{error}".split())
    text = text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."
    place = place_in(traceback.extract_tb(error.__traceback__)) or where
    return f"{type(error).__name__}{place}: {text}"


def failure_text(what: str, error: BaseException, where: str = "") -> str:
    """Format an error of the component `what`: one line, then the traceback of the user's code."""
    trace = user_traceback(error, installed=True)
    return f"{what}: {describe(error, MAX_FAILURE_CHARS, where)}\n{trace}".strip()


def defined_at(component: Any) -> str:
    """Return " (file:line)" of a function, or of an object's `__call__`; "" if it is unknown.

    It is for errors about a wrong return value, which have no traceback that shows the place.
    """
    while isinstance(component, partial):
        component = cast(Any, component.func)
    called = component if inspect.isroutine(component) else type(component).__call__
    code = getattr(inspect.unwrap(called), "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


def place_in(stack: traceback.StackSummary) -> str:
    """Return the innermost line of the user's code in a stack as " (file:line)", else ""."""
    found = next(filter(_is_users, reversed(stack)), None)
    return "" if found is None else f" ({found.filename}:{found.lineno})"


def user_traceback(error: BaseException, *, installed: bool = False) -> str:
    """Return an error's traceback, starting at the first line of the user's code; "" without one.

    If `installed`, a traceback without such a line starts after the last line in this package.
    """
    report = traceback.TracebackException.from_exception(error)
    if not (users_part(report.stack) if installed else place_in(report.stack)):
        return ""
    parts, seen = [report], 0
    while seen < len(parts):
        part = parts[seen]
        part.stack = users_part(part.stack)
        others = [part.__cause__, part.__context__, *(part.exceptions or ())]
        parts += [other for other in others if other is not None]
        seen += 1
    return shortened("".join(report.format()), MAX_TRACEBACK_CHARS)


def users_part(stack: traceback.StackSummary) -> traceback.StackSummary:
    """Return the part of a stack that starts at its first line in the user's code.

    If no line is in the user's code (but in an installed package), the part starts after the last
    line in this package.
    """
    first = next((n for n, frame in enumerate(stack) if _is_users(frame)), None)
    if first is None:
        ours = [n for n, frame in enumerate(stack) if _PACKAGE in Path(frame.filename).parents]
        first = max(ours, default=-1) + 1
    return traceback.StackSummary.from_list(stack[first:][-_MAX_FRAMES:])


def _is_users(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename)
    ours = _INSTALLED.intersection(path.parts) or any(map(path.is_relative_to, _LIBRARIES))
    return path.is_absolute() and not ours
