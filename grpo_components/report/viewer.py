"""The viewer of rollouts, as far as the page's script does not draw it: counts and filters."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_components.report.rollouts import MOST_BYTES, Shown

_PAIRS = (("trainer", "generator"), ("trainer", "reference"), ("generator", "reference"))
"""Whose logprobs are compared."""
_LOGPROBS_HOW = "add <code>log_token_logprobs=true</code> to the command of the run"


def rollouts_section(shown: Shown) -> str:
    """HTML of the viewer.

    Args:
        shown: groups that the page has.
    """
    if not shown.groups and shown.logged:
        return f'<p class="about">none of the {shown.logged:,} groups that are logged</p>'
    if not shown.groups:
        return (
            '<p class="about">no rollouts are logged: <code>rollouts_logged_per_step</code> '
            "groups of each step would be, but of what <code>train_from</code> reads, which has no "
            "text</p>"
        )
    about = f"{len(shown.groups):,} of the {shown.logged:,} groups in logs/rollouts.jsonl"
    if len(shown.groups) < shown.logged:
        about += ", spread evenly over the run (<code>--rollouts N</code> shows another number, "
        about += f"of at most {MOST_BYTES // 2**20} MiB)"
    if shown.superseded:
        about += f"; {shown.superseded:,} more are of steps that a later attempt has done again"
    differences = [" - ".join(pair) for pair in _PAIRS if shown.logprobs.issuperset(pair)]
    colors = [*((name, name) for name in differences), ("", "nothing")]
    if shown.logprobs:
        logprobs = (
            "Point at a token for its logprobs, click on it, or use the arrow keys in its box. "
            "A dot stands for a token without text of its own."
        )
    else:
        logprobs = f"Tokens have no logprobs here: {_LOGPROBS_HOW}."
    kinds = {
        **{"all": "all", "mixed": "some right, some wrong", "right": "all right"},
        **{"wrong": "none right", "failed": "with a failed sample"},
    }
    orders = ("newest first", "oldest first", "lowest reward", "highest reward", "longest")
    orders += ("largest logprob difference",) if differences else ()
    filters = [
        _input("words", "text in it", "search"),
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
    chosen = "".join(f'<option value="{value}">{said}</option>' for value, said in options)
    return f'<label>{label}<select id="filter-{name}">{chosen}</select></label>'
