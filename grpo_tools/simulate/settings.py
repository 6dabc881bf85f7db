"""The settings that a simulation can change, read from a run's config and the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from grpo_components.errors import fail, shown
from grpo_components.exchange.staleness import StalenessContract


@dataclass(frozen=True)
class Setup:
    """Keys of a config that decide how a run's roles work together, and two of responses."""

    num_generators: int
    num_trainers: int
    num_references: int
    rollouts_in_flight: int
    push_every_n_steps: int
    pull_every_m_rollouts: int
    max_staleness: int
    stale_groups: Literal["drop", "wait"]
    groups_per_step: int
    group_size: int
    num_steps: int
    max_response_tokens: int
    max_num_seqs: int
    length_scale: float = 1.0
    """Factor of the length of every response."""
    length_tail: float = 1.0
    """Factor of what a response exceeds the median by."""

    def check(self) -> None:
        """Refuse settings that no run may have."""
        for field in fields(self):
            value, least = getattr(self, field.name), _LEAST.get(field.name, 1)
            if isinstance(value, str):
                continue
            if not least <= value <= _MOST:
                fail(field.name, f"{shown(value)} given", f"{least} to {_MOST}")
        contract = StalenessContract(self.max_staleness, self.groups_per_step)
        if self.push_every_n_steps > contract.max_push_interval:
            given = f"{self.push_every_n_steps} given with max_staleness {self.max_staleness}"
            fail("push_every_n_steps", given, f"1 to {contract.max_push_interval}")


_LEAST = {
    **{"max_staleness": 0, "num_references": 0},
    **{"length_scale": 1e-3, "length_tail": 0.0},
}
_MOST = 10**6
_NESTED = {"max_response_tokens": "generator", "max_num_seqs": "generator"}
_CHOICES = {"stale_groups": ("drop", "wait")}
_NOT_SIMULATED = ("colocate", "teacher", "replay_generation")


def key_of(name: str) -> str:
    """Return the key of the config, or of the simulation, for a field of `Setup`."""
    return f"{_NESTED[name]}.{name}" if name in _NESTED else name


def setup_of(config: Mapping[str, Any], has_references: bool) -> Setup:
    """Read the settings of a run; refuse what is not simulated."""
    for key in _NOT_SIMULATED:
        if config.get(key):
            fail(key, "used by the recorded run, and not simulated", "a run without it")
    sections = {name: config.get(section) or {} for name, section in _NESTED.items()}
    values = {
        field.name: sections.get(field.name, config)[field.name]
        for field in fields(Setup)
        if field.name in sections.get(field.name, config)
    }
    values.setdefault("max_num_seqs", 256)
    if not has_references:
        values["num_references"] = 0
    return Setup(**values)


def changed(setup: Setup, overrides: Sequence[str]) -> Setup:
    """Return the settings with some keys changed."""
    names = {key_of(field.name): field.name for field in fields(Setup)}
    present, new = asdict(setup), {}
    for override in overrides:
        key, _, text = override.partition("=")
        if key not in names:
            fail(key, "no key of a simulation", ", ".join(names))
        name = names[key]
        if name in _CHOICES:
            if text not in _CHOICES[name]:
                fail(key, f"{shown(text)} given", " or ".join(_CHOICES[name]))
            new[name] = text
            continue
        kind = type(present[name])
        try:
            new[name] = kind(text)
        except ValueError:
            fail(key, f"{shown(text)} given", "a number" if kind is float else "a whole number")
    result = replace(setup, **new)
    result.check()
    return result
