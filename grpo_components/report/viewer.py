"""Writes the counts and filters of the rollouts section; `page.js` draws the rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_components.report.rollouts import MAX_BYTES, RolloutSample

_PAIRS = (("trainer", "generator"), ("trainer", "reference"), ("generator", "reference"))
"""Pairs of logprobs whose difference can color the tokens."""
_ADD_LOGPROBS = "add <code>log_token_logprobs=true</code> to the command of the run"


def rollouts_section(sample: RolloutSample) -> str:
    """Return HTML of the rollouts section.

    Args:
        sample: the groups that the page shows.
    """
    if not sample.groups and sample.logged:
        return f'<p class="about">none of the {sample.logged:,} logged groups is shown</p>'
    if not sample.groups:
        return (
            '<p class="about">no rollouts are logged: a run logs '
            "<code>rollouts_logged_per_step</code> groups of each step, "
            "and none with <code>train_from</code></p>"
        )
    about = f"{len(sample.groups):,} of the {sample.logged:,} groups in logs/rollouts.jsonl"
    if len(sample.groups) < sample.logged:
        about += ", spread evenly over the run (<code>--rollouts N</code> sets their number, "
        about += f"up to {MAX_BYTES // 2**20} MiB)"
    if sample.superseded:
        about += f"; {sample.superseded:,} more belong to steps that a later attempt repeated"
    differences = [" - ".join(pair) for pair in _PAIRS if sample.logprobs.issuperset(pair)]
    colors = [*((name, name) for name in differences), ("", "nothing")]
    if sample.logprobs:
        logprobs = (
            "Point at a token for its logprobs, click on it, or use the arrow keys in its box. "
            "A dot is a token without text."
        )
    else:
        logprobs = f"No logprobs of tokens are logged: {_ADD_LOGPROBS}."
    kinds = {
        **{"all": "all", "mixed": "some right, some wrong", "right": "all right"},
        **{"wrong": "none right", "failed": "with a failed sample"},
    }
    orders = ("newest first", "oldest first", "lowest reward", "highest reward", "longest")
    orders += ("largest logprob difference",) if differences else ()
    filters = [
        _input("words", "contains", "search"),
        _select("kind", "responses", list(kinds.items())),
        _select("finish", "finish reason", [("", "any")]),
        _input("from", "from step", "number"),
        _input("to", "to step", "number"),
        _select("order", "order", [(order, order) for order in orders]),
        _select("color", "tokens coloured by", colors),
    ]
    return (
        f'<p class="about">{about}. {logprobs}</p>'
        f'<div class="box"><div class="filters">{"".join(filters)}</div>'
        '<div class="legend" id="rollout-legend"><span></span><span class="scale"></span>'
        '<span></span></div><div class="about" id="rollout-count" role="status"></div></div>'
        '<div id="rollout-list"></div><button id="rollout-more" hidden>show more</button>'
    )


def _input(name: str, label: str, kind: str) -> str:
    return f'<label>{label}<input type="{kind}" id="filter-{name}"></label>'


def _select(name: str, label: str, options: Sequence[tuple[str, str]]) -> str:
    chosen = "".join(f'<option value="{value}">{caption}</option>' for value, caption in options)
    return f'<label>{label}<select id="filter-{name}">{chosen}</select></label>'
