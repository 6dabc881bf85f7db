"""Writes counts and filters of rollouts and evaluation samples; `page.js` draws the samples."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_tools.report.rollouts import MAX_BYTES, RolloutSample

_PAIRS = (
    *(("trainer", "generator"), ("trainer", "reference"), ("generator", "reference")),
    ("trainer", "teacher"),
)
"""Pairs of logprobs whose difference can color the tokens."""
_ADD_LOGPROBS = "add <code>log_token_logprobs=true</code> to the command of the run"


def rollouts_section(sample: RolloutSample) -> str:
    """Return HTML of the rollouts section."""
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
    orders = _ORDERS + (("largest logprob difference",) if differences else ())
    filters = _filters("rollouts", orders, _select("rollouts-color", "tokens coloured by", colors))
    legend = (
        '<div class="legend" id="rollouts-legend"><span></span><span class="scale"></span>'
        "<span></span></div>"
    )
    return f'<p class="about">{about}. {logprobs}</p>' + _list("rollouts", filters, legend)


def answers_section(sample: RolloutSample) -> str:
    """Return HTML of the section with the answers to held-out prompts."""
    if not sample.groups and sample.logged:
        return f'<p class="about">none of the {sample.logged:,} logged prompts is shown</p>'
    if not sample.groups:
        return (
            '<p class="about">no evaluation samples are logged: an evaluation logs the answers to '
            "<code>eval.prompts_logged</code> prompts</p>"
        )
    about = f"{len(sample.groups):,} of the {sample.logged:,} prompts in "
    about += "logs/evaluation_answers.jsonl, a prompt counted once for each evaluation"
    if sample.superseded:
        about += f"; {sample.superseded:,} more belong to steps that a later attempt repeated"
    filters = _filters("answers", (*_ORDERS, "by prompt"))
    return f'<p class="about">{about}.</p>' + _list("answers", filters)


_ORDERS = ("newest first", "oldest first", "lowest reward", "highest reward", "longest")
_KINDS = {
    **{"all": "all", "mixed": "some right, some wrong", "right": "all right"},
    **{"wrong": "none right", "failed": "with a failed sample"},
}


def _filters(name: str, orders: Sequence[str], more: str = "") -> str:
    """Return HTML of the filters of a list of samples; `name` is the list's."""
    fields = (
        _input(f"{name}-words", "contains", "search"),
        _select(f"{name}-kind", "responses", list(_KINDS.items())),
        _select(f"{name}-finish", "finish reason", [("", "any")]),
        _input(f"{name}-from", "from step", "number"),
        _input(f"{name}-to", "to step", "number"),
        _select(f"{name}-order", "order", [(order, order) for order in orders]),
    )
    return f'<div class="filters">{"".join(fields)}{more}</div>'


def _list(name: str, filters: str, legend: str = "") -> str:
    """Return HTML of a list of samples, which the page's script fills."""
    return (
        f'<div class="box">{filters}{legend}'
        f'<div class="about" id="{name}-count" role="status"></div></div>'
        f'<div id="{name}-list"></div><button id="{name}-more" hidden>show more</button>'
    )


def _input(name: str, label: str, kind: str) -> str:
    return f'<label>{label}<input type="{kind}" id="{name}"></label>'


def _select(name: str, label: str, options: Sequence[tuple[str, str]]) -> str:
    chosen = "".join(f'<option value="{value}">{caption}</option>' for value, caption in options)
    return f'<label>{label}<select id="{name}">{chosen}</select></label>'
