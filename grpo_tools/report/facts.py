"""Computes the figures of a report: where and when a run ran, key figures, last evaluation."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from grpo_components.files import Record, records_of
from grpo_tools.report.curves import measured_after, values_of
from grpo_tools.report.panels import BOOKKEEPING
from grpo_tools.report.run_files import DAMAGED, History
from grpo_tools.report.safe_text import part

_MAX_HOSTS = 4
_STEPS_PER_END = 10
_ARROW = " \N{RIGHTWARDS ARROW} "
_ENDS = ("_low", "_high")


def read_facts(history: History) -> dict[str, str]:
    """Return name -> text: when, how long, where and with which library versions a run ran."""
    found, starts = dict[str, str](), history.starts
    with contextlib.suppress(*DAMAGED):
        if starts:
            began = datetime.fromtimestamp(starts[0]["time"], UTC)
            found["began"] = f"{began:%Y-%m-%d %H:%M} UTC"
        if took := values_of(history.metrics, "time/wall_clock"):
            found["duration"] = duration(took[-1])
        roles = [*records_of(history.folder / "logs/roles.jsonl")]
        last = max((role["attempt"] for role in roles), default=0)
        if hosts := [*dict.fromkeys(role["node"] for role in roles if role["attempt"] == last)]:
            more = f" and {len(hosts) - _MAX_HOSTS} more" if len(hosts) > _MAX_HOSTS else ""
            found["host"] = ", ".join(hosts[:_MAX_HOSTS]) + more
        if starts:
            found["host"] = f"{found.get('host', '')} ({starts[-1]['cpus']} CPUs)".strip()
            versions = starts[-1]["libraries"].items()
            found["versions"] = ", ".join(f"{name} {version}" for name, version in versions)
    return found


def duration(seconds: float) -> str:
    """Return a duration in words, e.g. 3 min 20 s."""
    number, parts = round(seconds), list[str]()
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if parts or number >= size or size == 1:
            parts.append(f"{number // size:,} {unit}")
        number %= size
    return " ".join(parts[:2])


def first_and_last(steps: Sequence[Record]) -> tuple[Sequence[Record], Sequence[Record]]:
    """Return the first few and the last few steps of a run, to compare them."""
    number = max(1, min(_STEPS_PER_END, len(steps) // 2))
    return steps[:number], steps[-number:]


def key_figures(history: History, ends: str = "") -> dict[str, str]:
    """Return label -> text of a run's key figures; `ends`: words for the first and last steps."""
    metrics = history.metrics
    steps = [record for record in metrics if record["step"] > 0]
    first, last = first_and_last(steps)
    several = f"first and last {len(first)} steps" if len(first) > 1 else "first and last step"
    ends = ends or several
    found = {}
    for kind, key in {"reward": "rollout/reward_mean", "success": "rollout/success_rate"}.items():
        before, after = _mean(first, key), _mean(last, key)
        found[f"{kind}, {ends}"] = before + _ARROW + after if after != "-" else "-"
    held_out = [f"{rate:.3f}" for rate in values_of(metrics, "eval/success_rate")]
    found["held-out success"] = _ARROW.join(held_out[:1] + held_out[1:][-1:]) or "-"
    if stalest := values_of(steps, "staleness/max"):
        mean = _mean(steps, "staleness/mean")
        found["staleness, mean and largest"] = f"{mean}, {max(stalest):.0f}"
    for kind in ("generated", "trained"):
        speed = _per_second(steps, f"throughput/{kind}_tokens_per_second")
        found[f"{kind} tokens per second"] = speed
    dropped = Counter(drop["reason"] for drop in history.drops)
    each = ", ".join(f"{n} {why}" for why, n in dropped.items())
    found["groups dropped"] = each or ("none" if steps else "-")
    if reused := values_of(steps, "reuse/share"):
        share, uses = sum(reused) / len(reused), _mean(steps, "reuse/uses_mean")
        found["groups reused, uses of a group"] = f"{share:.0%}, {uses}"
    if restarts := max(values_of(metrics, "restarts"), default=0):
        found["restarts"] = f"{restarts:.0f}"
    return {name: value for name, value in found.items() if value != "-"}


def held_out_table(metrics: Sequence[Record]) -> str:
    """Return HTML with the metrics of the last evaluation; empty if there is none."""
    evaluated = [record for record in metrics if any(key.startswith("eval/") for key in record)]
    if not evaluated:
        return ""
    last = evaluated[-1]
    rows = []
    for key in last:
        if key.startswith("eval/") and not key.endswith(_ENDS) and key not in BOOKKEEPING:
            known = [f"{v:.4g}" for end in ("", *_ENDS) for v in values_of([last], key + end)]
            interval = " to ".join(known[1:]) if len(known) == 3 else None
            rows.append((key.removeprefix("eval/"), known[0] if known else None, interval))
    version, prompts = (last.get(f"eval/{key}", "-") for key in ("policy_version", "prompts"))
    about = f"after step {measured_after(last, 'eval/step')}: policy version {version}, "
    columns = ("metric", "mean over prompts", "95 % interval")
    return part("box", columns, rows, "", f"{about}{prompts} prompts")


def _per_second(steps: Sequence[Record], key: str) -> str:
    """Return tokens per second over all steps; a mean of rates would overweight short steps."""
    tokens = seconds = 0.0
    for record in steps:
        trained = sum(values_of([record], "rollout/trained_tokens"))
        speed = sum(values_of([record], "throughput/trained_tokens_per_second"))
        took = trained / speed if trained and speed else sum(values_of([record], "time/step"))
        for rate in values_of([record], key):
            tokens, seconds = tokens + rate * took, seconds + took
    return f"{tokens / seconds:,.0f}" if seconds else "-"


def _mean(records: Sequence[Record], key: str) -> str:
    values = values_of(records, key)
    return f"{sum(values) / len(values):.2f}" if values else "-"
