"""Gets the error that refuses a wrong config: tests look at its key, and one test at its text."""

from collections.abc import Callable
from typing import Any

import pytest

from grpo_components.errors import ConfigError


def refused_key(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    return refusal_of(function, *args, **kwargs).key


def refusal_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> ConfigError:
    """Return the `ConfigError` that a call raises; check that none of its fields is empty.

    Only a component's own error, which is then the cause, may leave out what is allowed.
    """
    with pytest.raises(ConfigError) as refused:
        function(*args, **kwargs)
    error = refused.value
    assert error.key and error.problem
    assert error.allowed or error.__cause__
    return error
