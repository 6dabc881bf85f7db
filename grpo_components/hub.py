"""Loads from the cache alone when the Hugging Face hub is out of reach, instead of trying long."""

from __future__ import annotations

import contextlib
import http.client
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

_ANSWER_S = 5.0
"""Seconds that the hub may take to answer before it counts as out of reach."""


@contextlib.contextmanager
def reachable_or_cached() -> Iterator[bool]:
    """Context manager: libraries load from the cache alone if the hub does not answer."""
    if not constants.HF_HUB_OFFLINE and _hub_answers():
        yield False
        return
    libraries: list[Any] = [constants, sys.modules.get("datasets.config")]
    before = [(each, each.HF_HUB_OFFLINE) for each in libraries if each is not None]
    for each, _ in before:
        each.HF_HUB_OFFLINE = True
    try:
        yield True
    finally:
        for each, value in before:
            each.HF_HUB_OFFLINE = value


def model_config(name: str) -> Path:
    """Return the file `config.json` of a model on the hub; load it unless it is in the cache."""
    with reachable_or_cached() as offline:
        try:
            return Path(hf_hub_download(name, "config.json"))
        except HfHubHTTPError as error:  # e.g. no such model, or one that needs an account
            status = error.response.status_code
            raise ValueError(f"{constants.ENDPOINT} answers {status} for {name}") from error
        except OSError as error:
            if not offline:
                raise ValueError(f"{name} cannot be loaded: {error}") from error
            problem = f"no copy of {name} in the cache, and {constants.ENDPOINT} cannot be reached"
            raise ValueError(problem) from error


def _hub_answers() -> bool:
    """Whether the hub can be reached; its own client would try for half a minute."""
    asked = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        with urllib.request.urlopen(asked, timeout=_ANSWER_S):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, http.client.HTTPException) as error:
        # The hub's client may know certificates that this request does not.
        return isinstance(getattr(error, "reason", None), ssl.SSLError)
