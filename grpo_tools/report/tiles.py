"""Writes the key figures at the top of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from grpo_components.files import first_and_last
from grpo_tools.report.run_files import Receipts, Record
from grpo_tools.report.safe_text import escaped

_MAX_VALUE_CHARS = 80
_ARROW = " \N{RIGHTWARDS ARROW} "


def tiles(metrics: Sequence[Record], receipts: Receipts) -> str:
    """Return HTML of the key figures; the arguments are those of `key_figures`."""
    return "".join(
        f'<div class="tile"><b>{escaped(value, _MAX_VALUE_CHARS)}</b><span>{name}</span></div>'
        for name, value in key_figures(metrics, receipts).items()
    )


def key_figures(
    metrics: Sequence[Record], receipts: Receipts, ends: str | None = None
) -> dict[str, str]:
    """Return the key figures by name, without those that the run did not measure."""
    steps = [record for record in metrics if record["step"] > 0]
    first, last = first_and_last(steps)
    if ends is None:
        ends = f"first and last {len(first)} steps" if len(first) > 1 else "first and last step"
    of_kinds = {"reward": "rollout/reward_mean", "success": "rollout/success_rate"}
    found = [
        (f"{kind}, {ends}", _from_to(*(_mean(part, key, ".2f") for part in (first, last))))
        for kind, key in of_kinds.items()
    ]
    held_out = [f"{rate:.3f}" for rate in _values(metrics, "eval/success_rate")]
    found.append(("held-out success", _ARROW.join(held_out[:1] + held_out[1:][-1:]) or "-"))
    stalest = max(_values(steps, "staleness/max"), default=0)
    staleness = _mean(steps, "staleness/mean", ".2f")
    found.append(
        ("staleness, mean and largest", "-" if staleness == "-" else f"{staleness}, {stalest:.0f}")
    )
    for kind in ("generated", "trained"):
        speed = _per_second(steps, receipts, f"throughput/{kind}_tokens_per_second")
        found.append((f"{kind} tokens per second", speed))
    dropped = Counter(str(drop.get("reason")) for drop in receipts.drops)
    each = ", ".join(f"{n} {why}" for why, n in dropped.items())
    found.append(("groups dropped", each or ("none" if steps else "-")))
    if reused := _values(steps, "reuse/share"):
        uses = _mean(steps, "reuse/uses_mean", ".2f")
        found.append(("groups reused, uses of a group", f"{sum(reused) / len(reused):.0%}, {uses}"))
    if restarts := max(_values(metrics, "restarts"), default=0):
        found.append(("restarts", f"{restarts:.0f}"))
    # E.g. a run of `eval_only` has no steps.
    return {name: value for name, value in found if value != "-"}


def _per_second(steps: Sequence[Record], receipts: Receipts, key: str) -> str:
    """Return tokens per second over all steps; a mean of rates would overweight short steps."""
    tokens = seconds = 0.0
    for record in steps:
        trained = receipts.trained_tokens.get(record["step"], 0)
        speed = sum(_values([record], "throughput/trained_tokens_per_second"))
        took = trained / speed if trained and speed else sum(_values([record], "time/step"))
        for rate in _values([record], key):
            tokens, seconds = tokens + rate * took, seconds + took
    return f"{tokens / seconds:,.0f}" if seconds else "-"


def _from_to(before: str, after: str) -> str:
    return before if before == after == "-" else before + _ARROW + after


def _values(records: Sequence[Record], key: str) -> list[float]:
    return [r[key] for r in records if isinstance(r.get(key), (int, float))]


def _mean(records: Sequence[Record], key: str, spec: str) -> str:
    values = _values(records, key)
    return format(sum(values) / len(values), spec) if values else "-"
