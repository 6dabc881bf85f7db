"""Errors of the config's components, reported with key, name and line of the user's code."""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

_LIBRARIES = (Path(__file__).parents[1], Path(sysconfig.get_path("stdlib")))
_INSTALLED = {"site-packages", "dist-packages"}
MAX_ERROR_CHARS = 120
"""Longest text shown of an error that a component raised: the text may hold a whole tensor."""


class ComponentError(ValueError):
    """Raised when a component of the config breaks the contract of its kind.

    Restarting its role would not help. The message is one line, "key: what is wrong; allowed: ...".
    """


def name_of(component: Any) -> str:
    """Return the dotted path of a component's class, or of a function.

    Args:
        component: object made from a config's `_component_`, or a function of the recipe.
    """
    named = cast(Any, component if hasattr(component, "__qualname__") else type(component))
    return f"{named.__module__}.{named.__qualname__}"


@contextlib.contextmanager
def named_failure(
    key: str,
    name: str,
    kinds: tuple[type[BaseException], ...] = (SystemExit,),
    allowed: str = "one that raises nothing",
) -> Generator[None]:
    """Context manager: turn a component's error into a `ComponentError` that says where it was.

    The message has the component's key and name, and the file and line of the error.

    Args:
        key: key of the component in the config.
        name: name of the component.
        kinds: exceptions to convert; by default only `SystemExit`, which would end the process
            silently.
        allowed: what a component of this kind must be, for the message.
    """
    try:
        yield
    except ComponentError:
        raise
    except kinds as error:
        what = describe(error)
        raise ComponentError(f"{key}: {name} raised {what}; allowed: {allowed}") from error


def describe(error: BaseException) -> str:
    """Return type, place and message of an error, in one line.

    Args:
        error: error with its traceback.
    """
    text = " ".join(f"{error}".split())
    text = text if len(text) <= MAX_ERROR_CHARS else f"{text[: MAX_ERROR_CHARS - 3]}..."
    return f"{type(error).__name__}{place_of(error)}: {text}"


def place_of(error: BaseException) -> str:
    """Return the innermost line of the user's own code in a traceback, as " (file:line)".

    Args:
        error: error with its traceback.

    Returns:
        The place; an empty string if no line is in the user's code.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        ours = _INSTALLED.intersection(path.parts) or any(map(path.is_relative_to, _LIBRARIES))
        if path.is_absolute() and not ours:
            return f" ({path}:{frame.lineno})"
    return ""
