"""The page of the staleness atlas: prediction, answer and map, all from the lines of results."""

from __future__ import annotations

import statistics
import textwrap
from collections import Counter
from collections.abc import Sequence

from measuring import markdown_table
from staleness_lines import OBJECTIVES, ORDER, RATES, SEEDS, STALENESS, Cell, Line
from staleness_map import KEPT, LEARNS, Atlas, Spot
from staleness_prediction import verdicts


def _mark(spot: Spot | None) -> str:
    if spot is None:
        return "·"
    if spot.broken == len(spot.lines):
        return "○"
    return "◐" if spot.broken or not spot.learns else "●"


def _overview(atlas: Atlas) -> str:
    rows = [
        [
            name,
            *(
                " ".join(_mark(atlas.spot(name, bound, rate)) for rate in RATES)
                for bound in STALENESS
            ),
        ]
        for name in OBJECTIVES
    ]
    return markdown_table(["", *(f"bound {bound}" for bound in STALENESS)], rows)


def _cell(spot: Spot | None) -> str:
    if spot is None:
        return "not run"
    count = len(spot.lines)
    staleness = [line.staleness for line in spot.lines if line.staleness is not None]
    parts = [f"{_mark(spot)} {_figure(spot)}"]
    parts.append(f"s {statistics.fmean(staleness):.1f}" if staleness else "no step")
    parts.append(f"n {count}")
    if any(line.ended for line in spot.lines):
        parts.append("**ended early**")
    if any(line.audit for line in spot.lines):
        parts.append("**audit failed**")
    return "<br>".join(parts)


def _map(atlas: Atlas, rate: str) -> str:
    rows = [
        [name, *(_cell(atlas.spot(name, bound, rate)) for bound in STALENESS)]
        for name in OBJECTIVES
    ]
    return markdown_table(
        [f"learning rate {rate}", *(f"bound {bound}" for bound in STALENESS)], rows
    )


def _tolerance(atlas: Atlas, objective: str, rate: str) -> str:
    """What an objective does at a learning rate, in words."""
    synchronous = atlas.spot(objective, 0, rate)
    others = [(bound, atlas.spot(objective, bound, rate)) for bound in STALENESS[1:]]
    run = [(bound, spot) for bound, spot in others if spot]
    if synchronous is None or not run:
        return "not known yet"
    if not synchronous.learns:
        return "breaks without staleness"
    tolerated = 0
    for bound, spot in run:
        if not spot.keeps(synchronous):
            break
        tolerated = bound
    return f"tolerates {tolerated}" if tolerated else f"does not tolerate {run[0][0]}"


def _answers(atlas: Atlas) -> str:
    """Words for each learning rate, from objectives that tolerate most to those that break."""
    said = []
    for rate in RATES:
        by_word: dict[str, list[str]] = {}
        for name in OBJECTIVES:
            by_word.setdefault(_tolerance(atlas, name, rate), []).append(name)
        words = "; ".join(f"{word}: {', '.join(by_word[word])}" for word in sorted(by_word))
        ends = [(atlas.spot(name, STALENESS[-1], rate), name) for name in OBJECTIVES]
        ranked = sorted(((spot.mean, name, spot) for spot, name in ends if spot), reverse=True)
        order = ", ".join(f"{name} {_figure(spot)}" for _, name, spot in ranked)
        at_most = f" At a bound of {STALENESS[-1]}, from best to worst: {order}." if order else ""
        said.append(f"- **At {rate}** ({_runs(atlas, rate)}) {words}.{at_most}")
    return "\n".join(said)


def _runs(atlas: Atlas, rate: str) -> str:
    runs = Counter(
        (each.objective, each.max_staleness) for each in atlas.lines if each.rate == rate
    )
    if not runs:
        return "no run"
    fewest, most = min(runs.values()), max(runs.values())
    return f"seeds per place: {fewest}" + (f" to {most}" if most > fewest else "")


def _figure(spot: Spot) -> str:
    between = spot.interval
    return f"{spot.mean:.2f}" + (f" ({between[0]:.2f}..{between[1]:.2f})" if between else "")


def _measured_staleness(lines: Sequence[Line]) -> str:
    rows = []
    for bound in STALENESS:
        own = [line for line in lines if line.max_staleness == bound]
        means = [line.staleness for line in own if line.staleness is not None]
        oldest = [line.oldest for line in own if line.oldest is not None]
        dropped = sum(line.dropped or 0 for line in own)
        spread = (
            f"{statistics.fmean(means):.2f} ({min(means):.2f}..{max(means):.2f})" if means else ""
        )
        rows.append([bound, len(own), spread, max(oldest, default=""), dropped if own else ""])
    return markdown_table(
        ["bound", "runs", "mean staleness (range)", "oldest token", "groups dropped"], rows
    )


def _why(atlas: Atlas) -> str:
    """Effective sample size and clipped tokens at the largest bound."""

    def shown(spot: Spot | None) -> str:
        if spot is None:
            return "not run"
        sizes = [line.sample_size for line in spot.lines if line.sample_size is not None]
        clipped = [line.clipped for line in spot.lines if line.clipped is not None]
        if not sizes or not clipped:
            return "no step"
        return f"{statistics.fmean(sizes):.2f}, {statistics.fmean(clipped):.1%}"

    rows = [
        [name, *(shown(atlas.spot(name, STALENESS[-1], rate)) for rate in RATES)]
        for name in OBJECTIVES
    ]
    return markdown_table(
        [f"bound {STALENESS[-1]}", *(f"learning rate {rate}" for rate in RATES)], rows
    )


def _troubles(lines: Sequence[Line]) -> str:
    found = [
        f"- {line.cell.folder}, step {line.steps}: {what}"
        for line in lines
        for what in (
            line.ended and f"ended early: `{line.ended}`",
            line.audit and f"the audit failed: `{line.audit}`",
            line.restarts and f"{line.restarts} roles were started again",
            line.skipped
            and f"{line.skipped} steps skipped, because loss or gradient was not finite",
        )
        if what
    ]
    return "\n".join(found) or "None."


def _same(lines: Sequence[Line]) -> str:
    """Whether runs of the same algorithm ended the same."""
    ends: dict[tuple[str, int], list[tuple[float | None, float | None]]] = {}
    for line in lines:
        if not line.max_staleness and line.objective in ("GRPO", "truncated IS", "REINFORCE"):
            ends.setdefault((line.rate, line.seed), []).append((line.after, line.reward))
    compared = [each for each in ends.values() if len(each) > 1]
    same = sum(len(set(each)) == 1 for each in compared)
    return (
        f"Their held-out success and last rewards are equal in {same} of {len(compared)} pairs of "
        "learning rate and seed that more than one of them has run."
    )


def _costs(lines: Sequence[Line]) -> str:
    if not lines:
        return "No run is done yet."
    spent = sorted(line.cpu_s for line in lines)
    return (
        f"A run takes {statistics.median(spent):.0f} CPU seconds (median; {spent[0]:.0f} to "
        f"{spent[-1]:.0f}), summed over its processes every half second; all runs so far together "
        f"{sum(spent) / 3600:.1f} CPU hours."
    )


def _overrides() -> str:
    rows = [
        [name, " ".join(given) and f"`{' '.join(given)}`"] for name, given in OBJECTIVES.items()
    ]
    rows[0][1] = "none: the tiny config's loss, `clip_low` and `clip_high` 0.2"
    return "\n".join(
        [
            "| objective | overrides |",
            "|---|---|",
            *(f"| {name} | {given} |" for name, given in rows),
        ]
    )


def _example() -> str:
    return textwrap.fill(
        " ".join(Cell("truncated IS", 8, "8e-4", 1).overrides),
        width=96,
        break_long_words=False,
        break_on_hyphens=False,
    ).replace("\n", " \\\n  ")


_PAGE = """# Staleness atlas

Generated by `make atlas` (`python benchmarks/staleness_atlas.py`); do not edit.

Which objective tolerates which staleness, and at which learning rate does it break? Real runs of
the tiny job on a CPU: {objectives} objectives, {bounds} bounds of the staleness (`max_staleness`),
{rates} learning rates, {seeds} seeds. **{done} of {all} runs are done; {whole} of {places} places
of the map have all their seeds.** {left}
**Audits that failed: {failed} of {done}.** Not run on a GPU.

## Prediction

Written before the first run of the map, after eleven trial runs that chose steps and learning
rates. The verdicts are computed from the runs.

| prediction | verdict |
|---|---|
{predictions}

## Answer

Figures are the held-out success at the end, in means over the seeds, with their intervals as in the
map; one run is a hint, no answer. An objective *tolerates* a bound if there, and at each
lower bound that was run, it keeps {kept:.0%} of what it gains over the base model without staleness
at the same learning rate. It *breaks without staleness* where that gain is below {learns}.

{answers}

## Map

A run *breaks* if it ends early, or no better than the base model. ● no run broke, ◐ some did (or
the mean gain is below {learns}), ○ all did, · not run yet; in each place for the learning rates
{all_rates}:

{overview}

Each place below has the mean held-out success with its 95 % interval (Student's t over the seeds,
cut at 0 and 1; with one run none, with two it is wide); *s*, the mean staleness that was measured,
in policy versions; *n*, the number of runs. A run that ended early counts as 0.

{maps}

At a bound of 0 GRPO, truncated IS and REINFORCE are the same algorithm: all ratios are 1.
{same}

## Staleness that was reached

A bound is no measurement. So many groups are in flight that the generator is as far ahead as the
bound lets it: staleness grows by one with each step, up to the bound. The mean is over all steps.

{staleness}

What the losses saw: effective sample size of the ratio trainer to generator (1 is on-policy), and
tokens without a gradient, because the clip binds.

{why}

## Runs with trouble

{troubles}

## How it is measured

This is one of the runs; the others have another bound, with 8 more groups in flight for each
version (a bound of 0 adds `pull_every_m_rollouts=1`), learning rate, seed, or objective.

```
tune run async_grpo_full_finetune_distributed --config tiny_async_grpo \\
  {example}
```

{overrides}

Held-out success is that of the tiny job's 204 problems, one response each at temperature 1, after
the last step: its standard error within one run is about 0.03. CISPO is left out: with one update
per step its gradient is that of truncated IS with a cap of 5, between those of truncated IS (2) and
REINFORCE (none). Decoupled PPO makes two updates per step, as its preset does; with one it would be
truncated IS with a cap of 5. So it moves further than the others at the same learning rate. Every
run is audited before its other files are removed.
{costs}

All results are in [staleness.csv](staleness.csv), a line per run, also with the mean reward of the
last five steps. A run that has a line is not made again: to make it anew, delete its line, also in
`runs.csv` in the folder of the runs (`--folder`), which keeps receipts, metrics and config of each
run. The command may be killed at any moment; the run that it cut short is then made again.
"""


def page(lines: Sequence[Line]) -> str:
    """Return the text of the page `docs/staleness.md`."""
    atlas = Atlas(lines)
    runs = Counter((line.objective, line.max_staleness, line.rate) for line in lines)
    return _PAGE.format(
        **{"objectives": len(OBJECTIVES), "bounds": len(STALENESS), "rates": len(RATES)},
        **{"seeds": len(SEEDS), "done": len(lines), "all": len(ORDER)},
        whole=sum(count == len(SEEDS) for count in runs.values()),
        places=len(ORDER) // len(SEEDS),
        failed=sum(bool(line.audit) for line in lines),
        left="What is not run yet says so; `make atlas` goes on."
        if len(lines) < len(ORDER)
        else "`make atlas` made them.",
        predictions="\n".join(f"| {text} | {verdict} |" for text, verdict in verdicts(atlas)),
        answers=_answers(atlas),
        same=_same(lines),
        all_rates=", ".join(RATES),
        overview=_overview(atlas),
        maps="\n\n".join(_map(atlas, rate) for rate in RATES),
        staleness=_measured_staleness(lines),
        why=_why(atlas),
        troubles=_troubles(lines),
        example=_example(),
        overrides=_overrides(),
        costs=_costs(lines),
        **{"kept": KEPT, "learns": LEARNS},
    )
