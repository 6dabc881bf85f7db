"""The failure of a component of the config, told with its key, its name and the user's own line."""

from __future__ import annotations

import contextlib
import sysconfig
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

_LIBRARIES = (Path(__file__).parents[1], Path(sysconfig.get_path("stdlib")))
_INSTALLED = {"site-packages", "dist-packages"}
_SHOWN = 120
"""Characters of a message that are kept: it may hold a whole tensor."""


class ComponentError(ValueError):
    """A component of the config does not do what one of its kind has to; no restart changes that.

    The message is one line, "key: what is wrong; allowed: ...".
    """


def name_of(component: Any) -> str:
    """The dotted path of a component's class, or of a function.

    Args:
        component: an object that a config's `_component_` has made.
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
    """Turn what a component raises into a `ComponentError` with its key, name, file and line.

    Args:
        key: of the component in the config.
        name: of the component.
        kinds: what is turned; by itself, only what would end the process without a word.
        allowed: what a component of this kind is.
    """
    try:
        yield
    except ComponentError:
        raise
    except kinds as error:
        what = told(error)
        raise ComponentError(f"{key}: {name} raised {what}; allowed: {allowed}") from error


def told(error: BaseException) -> str:
    """Kind, place and message of an error, in one line.

    Args:
        error: with its traceback.
    """
    text = " ".join(f"{error}".split())
    text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    return f"{type(error).__name__}{place_of(error)}: {text}"


def place_of(error: BaseException) -> str:
    """Where an error was raised, as " (file:line)": the innermost line of the user's own.

    Args:
        error: with its traceback; empty where no line of it is the user's.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        ours = _INSTALLED.intersection(path.parts) or any(map(path.is_relative_to, _LIBRARIES))
        if path.is_absolute() and not ours:
            return f" ({path}:{frame.lineno})"
    return ""
