"""Schedules of numeric settings: constant, linear or cosine, each with an optional warm-up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from grpo_components.errors import ConfigError

Shape = Literal["constant", "linear", "cosine"]

_CHANGING_KEYS = ("schedule", "start", "end", "num_steps", "warmup_steps")
KEYS: dict[Shape, tuple[str, ...]] = {
    "constant": ("schedule", "start", "warmup_steps"),
    "linear": _CHANGING_KEYS,
    "cosine": _CHANGING_KEYS,
}


@dataclass(frozen=True)
class Schedule:
    """Gives the value of a setting at each training step; made by `as_schedule`, which checks it.

    With w = warmup_steps, n = num_steps and p = min((step - w) / n, 1):

        step < w:  start (step + 1) / w
        constant:  start
        linear:    start + (end - start) p
        cosine:    end + (start - end) (1 + cos(pi p)) / 2

    (cosine: SGDR, arXiv 1608.03983, eq. 5, one cycle).

    Args:
        schedule: the shape.
        start: value at the end of the warm-up.
        end: value from step warmup_steps + num_steps on; equal to start if the shape is constant.
        num_steps: training steps from start to end.
        warmup_steps: training steps that lead up to start; 0 disables the warm-up.
    """

    schedule: Shape
    start: float
    end: float
    num_steps: int = 1
    warmup_steps: int = 0

    @property
    def lowest(self) -> float:
        """The smallest value after the warm-up; the warm-up itself starts near 0."""
        return min(self.start, self.end)

    @property
    def highest(self) -> float:
        """The largest value after the warm-up."""
        return max(self.start, self.end)

    def __call__(self, step: int) -> float:
        """Return the value for the training step that follows `step` finished steps."""
        if step < self.warmup_steps:
            return self.start * ((step + 1) / self.warmup_steps)
        done = step - self.warmup_steps
        if self.schedule == "constant" or done == 0:
            return self.start
        if done >= self.num_steps:
            return self.end
        progress = done / self.num_steps
        if self.schedule == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        value = self.start + (self.end - self.start) * progress
        # Rounding must not carry the value past a bound that the setting was checked against.
        return min(max(value, self.lowest), self.highest)


Scheduled = float | Mapping[str, Any] | Schedule
"""What `as_schedule` accepts: a number, a mapping of a schedule's keys, or a schedule."""


def as_schedule(key: str, value: Scheduled) -> Schedule:
    """Make the schedule of one setting from its value in the config: a number, or a mapping.

    A mapping has the fields of `Schedule`; a schedule is returned as it is. Errors name the key.
    """
    if isinstance(value, Schedule):
        return value
    if not hasattr(value, "items"):
        start = _number(key, value, "a number, or a mapping with schedule, start, ...")
        return Schedule("constant", start, start)
    settings = dict(cast("Mapping[str, Any]", value).items())
    shape = settings.get("schedule")
    if not (isinstance(shape, str) and shape in KEYS):
        given = f"{shape!r} given" if "schedule" in settings else "missing"
        raise ConfigError(f"{key}.schedule", given, ", ".join(KEYS))
    for name in settings:
        if name not in KEYS[shape]:
            allowed = ", ".join(KEYS[shape])
            raise ConfigError(f"{key}.{name}", f"unknown with schedule {shape}", allowed)
    for name in KEYS[shape][:-1]:
        if name not in settings:
            allowed = "a whole number >= 1" if name == "num_steps" else "a finite number"
            raise ConfigError(f"{key}.{name}", "missing", allowed)
    start = _number(f"{key}.start", settings["start"])
    warmup_steps = _count(f"{key}.warmup_steps", settings.get("warmup_steps", 0), at_least=0)
    if shape == "constant":
        return Schedule(shape, start, start, warmup_steps=warmup_steps)
    end = _number(f"{key}.end", settings["end"])
    num_steps = _count(f"{key}.num_steps", settings["num_steps"], at_least=1)
    return Schedule(shape, start, end, num_steps, warmup_steps)


def _number(key: str, value: object, allowed: str = "a finite number") -> float:
    # To Python a bool is an int, but in a config it is not a number.
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(key, f"{value!r} given", allowed)
    return float(value)


def _count(key: str, value: object, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(key, f"{value!r} given", f"a whole number >= {at_least}")
    return value
