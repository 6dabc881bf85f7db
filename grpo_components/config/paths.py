"""Expands `~` in the paths of a config, and refuses paths that cannot be looked up."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from grpo_components.errors import ConfigError, fail, shown

PATH_KEYS = ("path", "dir", "file", "folder", "source", "eval_only", "train_from", "replay_events")
"""Words that end the keys of paths (`path`, `merges_file`), also among a component's arguments."""
_SIZES = ("vocab_size", "max_position_embeddings", "num_attention_heads")
_SIZES += ("num_key_value_heads", "hidden_size", "intermediate_size", "num_hidden_layers")
_ROOM_IN_OUTPUT_DIR = 512
"""Bytes that output_dir's path leaves free for file names, and for the number of a moved folder."""


def expand_paths(values: dict[str, Any]) -> dict[str, Any]:
    """Return the same values with `~` expanded in every path."""
    expanded = {key: _expanded(key, value) for key, value in values.items()}
    output_dir = os.path.abspath(expanded["output_dir"])
    longest = os.pathconf("/", "PC_PATH_MAX") - _ROOM_IN_OUTPUT_DIR
    name = os.pathconf("/", "PC_NAME_MAX") - len("-999999")
    if len(os.fsencode(output_dir)) > longest or len(os.fsencode(Path(output_dir).name)) > name:
        problem = f"{shown(expanded['output_dir'])} given, too long for the run's files in it"
        allowed = f"at most {longest} bytes, and {name} in the last name"
        fail("output_dir", problem, allowed)
    return expanded


def read_hf_config(key: str, folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a model's folder."""
    path, allowed = folder / "config.json", "a folder with the config.json of its model"
    try:
        hf_config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        fail(key, f"{path} cannot be read: {error.strerror}", allowed)
    except (ValueError, RecursionError) as error:
        fail(key, f"{path} is damaged, {type(error).__name__}: {error}", allowed)
    if not isinstance(hf_config, dict):
        fail(key, f"{path} holds no JSON object", allowed)
    for name in _SIZES:
        size = hf_config.get(name)
        if size is not None and (type(size) is not int or not 0 < size < 2**31):
            fail(key, f"{path} has {name}: {shown(size)}", allowed)
    return hf_config


def is_path(key: str) -> bool:
    """Whether a key holds a path, judged by the last name in the key."""
    name = key.rpartition(".")[2]
    return name.endswith(tuple(f"_{word}" for word in PATH_KEYS)) or name in (
        *PATH_KEYS,
        "resume_from_checkpoint",
    )


def _expanded(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _expanded(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, list):
        if value and all(isinstance(item, dict) for item in value):
            return [_expanded(f"{key}.{n}", item) for n, item in enumerate(value)]
        return value
    return _checked(key, value) if isinstance(value, str) and is_path(key) else value


def _checked(key: str, text: str) -> str:
    try:
        path = os.path.expanduser(text)
        os.fsencode(path)
        if path.startswith("~") and not Path(path).exists():
            user = path.partition("/")[0]
            fail(key, f"{shown(text)} given, and there is no user {user[1:]}", "a path")
        Path(path).resolve()
        Path(path).exists()
    except ConfigError:
        raise
    except OSError as error:
        fail(key, f"{shown(text)} given: {error.strerror}", "a path that can be looked up")
    except RuntimeError:  # pathlib's error at a circle of links
        fail(key, f"{shown(text)} given, a circle of links", "a path that can be looked up")
    except UnicodeError:
        fail(key, f"{shown(text)} given, which cannot be a file name", "a path")
    except ValueError as error:
        fail(key, f"{shown(text)} given: {error}", "a path that can be looked up")
    return path
