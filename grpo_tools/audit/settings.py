"""Reads the settings of a saved config as text, without constructing objects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

Settings = dict[str, "str | dict[str, str]"]
"""Key -> scalar as written in the file, or the scalars of a section by their keys."""

_MAX_BYTES = 2**20
_OFF_POLICY = "grpo_components.objective.off_policy."


def read_settings(path: Path) -> Settings:
    """Read the scalars of a config."""
    if not path.is_file():
        raise ValueError("not a regular file")
    with path.open("rb") as file:
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ValueError("larger than 1 MiB")
    try:
        # Compose nodes only: no YAML tag can construct an object then.
        root = yaml.compose(text.decode(), Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {getattr(error, 'problem', None) or 'damaged'}") from None
    except RecursionError:
        raise ValueError("too many levels of brackets") from None
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("not a mapping")
    settings: Settings = {}
    for key, node in _pairs(root).items():
        if isinstance(node, yaml.ScalarNode):
            settings[key] = node.value
        elif isinstance(node, yaml.MappingNode):
            inner = _pairs(node).items()
            settings[key] = {k: n.value for k, n in inner if isinstance(n, yaml.ScalarNode)}
    return settings


def correction_bounds(off_policy: Any) -> tuple[float, float]:
    """Return the bounds of the mean weight that an off-policy correction can give to tokens."""
    section: Mapping[str, str] = off_policy if isinstance(off_policy, dict) else {}
    component = section.get("_component_", "").removeprefix(_OFF_POLICY)
    if component == "NoCorrection":
        return 1.0, 1.0
    if component == "GeometricMask":
        return 0.0, 1.0
    key = {"TokenTIS": "cap", "SequenceTIS": "cap", "MaskedIS": "high"}.get(component)
    try:
        return 0.0, float(section[key]) if key else float("inf")
    except (KeyError, ValueError):
        return 0.0, float("inf")


def _pairs(node: yaml.MappingNode) -> dict[str, yaml.Node]:
    found: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.value in found:
            raise ValueError(
                f"line {key.start_mark.line + 1}: not a scalar key, or a duplicate one"
            )
        found[key.value] = value
    return found
