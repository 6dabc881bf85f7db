"""The cells of the staleness atlas, and the results of their runs: one line of a CSV file each."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from grpo_components.whole_files import write_whole

STEPS, GROUPS = 32, 8
JOB = (
    *(f"num_steps={STEPS}", f"groups_per_step={GROUPS}", "group_size=8"),
    *("eval_every_n_steps=1000", "save_every_n_steps=1000", "rollouts_logged_per_step=0"),
)
"""What all runs have in common, beside the tiny config."""
OBJECTIVES: dict[str, tuple[str, ...]] = {
    "GRPO": (),
    "GSPO": (
        "loss._component_=grpo_components.objective.losses.GSPOLoss",
        *("loss.clip_low=0.05", "loss.clip_high=0.05"),
        "aggregation=grpo_components.objective.aggregation.SequenceMean",
    ),
    "truncated IS": (
        *("off_policy=grpo_components.objective.off_policy.TokenTIS", "off_policy.cap=2.0"),
    ),
    "decoupled PPO": (
        "loss._component_=grpo_components.objective.losses.DecoupledPPOLoss",
        *("loss.max_weight=5.0", "updates_per_batch=2"),
    ),
    "REINFORCE": (
        "loss._component_=grpo_components.objective.losses.REINFORCELoss",
        *("~loss.clip_low", "~loss.clip_high"),
    ),
}
"""Overrides of each objective."""
STALENESS = 0, 1, 2, 4, 8
RATES = "2e-4", "4e-4", "8e-4"
SEEDS = 1, 2, 3


@dataclass(frozen=True)
class Cell:
    """One run of the atlas."""

    objective: str
    max_staleness: int
    rate: str
    """Learning rate, as the config has it."""
    seed: int

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides of the tiny config, without the folder.

        Enough groups are in flight for the generator to be as far ahead as it may be.
        """
        ahead = GROUPS * (self.max_staleness + 1)
        synchronous = () if self.max_staleness else ("pull_every_m_rollouts=1",)
        return (
            *(*JOB, f"max_staleness={self.max_staleness}", f"rollouts_in_flight={ahead}"),
            *(*synchronous, f"optimizer.lr={self.rate}", f"seed={self.seed}"),
            *OBJECTIVES[self.objective],
        )

    @property
    def job(self) -> str:
        """Digest of the overrides: a result of another job has another one."""
        return sha256("\n".join(self.overrides).encode()).hexdigest()[:8]

    @property
    def folder(self) -> str:
        """Name of the run's folder."""
        name = self.objective.replace(" ", "_")
        return f"{name}_staleness_{self.max_staleness}_lr_{self.rate}_seed_{self.seed}"


ORDER = tuple(
    Cell(objective, staleness, rate, seed)
    for seed in SEEDS
    for staleness in (0, 8, 2, 4, 1)
    for rate in ("4e-4", "8e-4", "2e-4")
    for objective in OBJECTIVES
)
"""All runs, from coarse to fine: whole maps of one seed, the ends of each axis first."""


@dataclass(frozen=True)
class Line:
    """The result of one run."""

    objective: str
    max_staleness: int
    rate: str
    seed: int
    job: str
    """Digest of the run's overrides."""
    steps: int
    """Training steps that were finished."""
    before: float | None
    """Held-out success of the base model."""
    after: float | None
    """Held-out success after the last step; None if the run ended before."""
    reward: float | None
    """Mean reward of the last five steps, whose groups stale policies sampled."""
    staleness: float | None
    """Mean over the steps of the mean staleness of the trained tokens, in policy versions."""
    oldest: int | None
    """Largest staleness of a trained token."""
    clipped: float | None
    """Mean part of the tokens without a gradient, because the clip binds."""
    sample_size: float | None
    """Mean effective sample size of the ratio trainer to generator; 1 is on-policy."""
    skipped: int | None
    """Training steps that made no update, because loss or gradient was not finite."""
    dropped: int | None
    """Groups dropped as stale."""
    restarts: int | None
    """Roles that were started again; steps that were made again count once."""
    cpu_s: float
    """CPU seconds of the run, with all its processes."""
    ended: str
    """Why the run ended before its last step; empty if it did not."""
    audit: str
    """What the audit says of the broken rule; empty if every rule holds."""

    @property
    def cell(self) -> Cell:
        """The cell of the run."""
        return Cell(self.objective, self.max_staleness, self.rate, self.seed)


_NAMES = [field.name for field in fields(Line)]
_READ: dict[str, Any] = {"str": str, "int": int, "float": float}


def text_of(lines: Iterable[Line], *, header: bool = True) -> str:
    """Return lines as text of a CSV file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _NAMES, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(asdict(line) for line in lines)
    return text.getvalue()


def read(path: Path) -> dict[Cell, Line]:
    """Read the results in a file; a last line that a killed process did not finish is left out."""
    if not path.exists():
        return {}
    text = path.read_text()
    found: dict[Cell, Line] = {}
    for number, row in enumerate(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])), 2):
        try:
            line = Line(
                **{each.name: _value(row[each.name], str(each.type)) for each in fields(Line)}
            )
            known = line.cell in _ALL and line.job == line.cell.job
        except (KeyError, TypeError, ValueError):
            known = False
        if not known:
            raise ValueError(
                f"{path.name} line {number} is no result of this atlas: its job or columns "
                "changed; move the file away to begin anew"
            )
        found.setdefault(line.cell, line)
    return found


def _value(text: str, kind: str) -> Any:
    return None if not text and "None" in kind else _READ[kind.split(" ")[0]](text)


_ALL = frozenset(ORDER)


def append(path: Path, line: Line) -> None:
    """Add a line to a file, as a whole: killed at any moment, a file has whole lines."""
    write_whole(path, text_of([*read(path).values(), line]), durable=True)
