"""The settings of a run that the twin can change, read from its config and the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from grpo_components.errors import fail, shown
from grpo_components.exchange.staleness import StalenessContract


@dataclass(frozen=True)
class Setup:
    """Keys of a config that decide how a run's roles work together, and three of the twin."""

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
    device: Literal["cpu", "cuda"]
    length_scale: float = 1.0
    """Factor of the length of every response."""
    length_tail: float = 1.0
    """Factor of what a response exceeds the median by."""
    cores: float = 1.0
    """Cores that the roles of a run on the CPU share."""

    @property
    def roles(self) -> int:
        """Number of roles that get a GPU."""
        return self.num_generators + self.num_trainers + self.num_references

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
    **{"length_scale": 1e-3, "length_tail": 0.0, "cores": 0.1},
}
_MOST = 10**6
_NESTED = {"max_response_tokens": "generator", "max_num_seqs": "generator"}
_CHOICES = {"stale_groups": ("drop", "wait"), "device": ("cpu", "cuda")}


def key_of(name: str) -> str:
    """Return the key of the config, or of the twin, for a field of `Setup`."""
    return f"{_NESTED[name]}.{name}" if name in _NESTED else name


def setup_of(config: Mapping[str, Any], cores: float, has_references: bool) -> Setup:
    """Read the settings of a run."""
    if config.get("colocate"):
        problem = "true in the recorded run, and turns on shared GPUs are not simulated"
        fail("colocate", problem, "a run with colocate: false")
    if config.get("teacher"):
        problem = "given in the recorded run, and teachers are not simulated"
        fail("teacher", problem, "a run with teacher: null")
    if config.get("replay_generation"):
        problem = "given in the recorded run, and the reuse of groups is not simulated"
        fail("replay_generation", problem, "a run with replay_generation: null")
    sections = {name: config.get(section) or {} for name, section in _NESTED.items()}
    values = {
        field.name: sections.get(field.name, config)[field.name]
        for field in fields(Setup)
        if field.name in sections.get(field.name, config)
    }
    values.setdefault("max_num_seqs", 256)
    if not has_references:
        values["num_references"] = 0
    return Setup(**{**values, "cores": cores})


def changed(setup: Setup, overrides: Sequence[str]) -> Setup:
    """Return the settings with some keys changed."""
    names = {key_of(field.name): field.name for field in fields(Setup)}
    present, new = asdict(setup), {}
    for override in overrides:
        key, _, text = override.partition("=")
        if key not in names:
            fail(key, "no key of the twin", ", ".join(names))
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
