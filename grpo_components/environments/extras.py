"""Imports optional packages of environments, which the extra `environments` installs."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def imported_extra(name: str) -> Any:
    """Import a package of the extra `environments`; if it is missing, raise a ValueError."""
    try:
        with warnings.catch_warnings():  # some of its own imports are written for an older Python
            warnings.simplefilter("ignore", SyntaxWarning)
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = f"the package {error.name} is not installed"
        raise ValueError(f'{missing}; allowed: `pip install ".[environments]"`') from error
