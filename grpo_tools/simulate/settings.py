"""The settings that a simulation can change, read from a run's config and the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass

from grpo_components.errors import fail, shown
from grpo_components.exchange.staleness import StalenessContract

Count = Annotated[int, Field(ge=1, le=10**6)]
CountOrNone = Annotated[int, Field(ge=0, le=10**6)]


@dataclass(frozen=True)
class Setup:
    """Keys of a config that decide how a run's roles work together, and two of responses."""

    num_generators: Count
    num_trainers: Count
    num_references: CountOrNone
    rollouts_in_flight: Count
    push_every_n_steps: Count
    pull_every_m_rollouts: Count
    max_staleness: CountOrNone
    stale_groups: Literal["drop", "wait"]
    groups_per_step: Count
    group_size: Count
    num_steps: Count
    max_response_tokens: Count
    max_num_seqs: Count = 256
    length_scale: Annotated[float, Field(ge=1e-3, le=1e6)] = 1.0
    """Factor of the length of every response."""
    length_tail: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Factor of what a response exceeds the median by."""


_OF_GENERATOR = ("max_response_tokens", "max_num_seqs")
_NOT_SIMULATED = ("colocate", "teacher", "replay_generation")


def key_of(name: str) -> str:
    """Return the key of the config, or of the simulation, for a field of `Setup`."""
    return f"generator.{name}" if name in _OF_GENERATOR else name


def setup_of(config: Mapping[str, Any], has_references: bool) -> Setup:
    """Read the settings of a run; refuse what is not simulated."""
    for key in _NOT_SIMULATED:
        if config.get(key):
            fail(key, "used by the recorded run, and not simulated", "a run without it")
    given = {**config["generator"], **config}
    values: dict[str, Any] = {
        field.name: given[field.name] for field in fields(Setup) if field.name in given
    }
    if not has_references:
        values["num_references"] = 0
    return Setup(**values)


def changed(setup: Setup, overrides: Sequence[str]) -> Setup:
    """Return the settings with some keys changed."""
    names = {key_of(field.name): field.name for field in fields(Setup)}
    new: dict[str, Any] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        if key not in names:
            fail(key, "no key of a simulation", ", ".join(names))
        new[names[key]] = text
    try:
        result = replace(setup, **new)
    except ValidationError as error:
        first = error.errors()[0]
        allowed = first["msg"].removeprefix("Input should be ")
        fail(key_of(str(first["loc"][0])), f"{shown(first['input'])} given", allowed)
    most = StalenessContract(result.max_staleness, result.groups_per_step).max_push_interval
    if result.push_every_n_steps > most:
        given = f"{result.push_every_n_steps} given with max_staleness {result.max_staleness}"
        fail("push_every_n_steps", given, f"1 to {most}")
    return result
