"""Writes counts and filters of rollouts and evaluation samples; `page.js` draws the samples."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_tools.report.rollouts import MAX_BYTES, RolloutSample

_PAIRS = (
    *(("trainer", "generator"), ("trainer", "reference"), ("generator", "reference")),
    ("trainer", "teacher"),
)
"""Pairs of logprobs whose difference can color the tokens."""
_ORDERS = ("newest first", "oldest first", "lowest reward", "highest reward", "longest")
_KINDS = {
    **{"all": "all", "mixed": "some right, some wrong", "right": "all right"},
    **{"wrong": "none right", "failed": "with a failed sample"},
}
_SPREAD = (
    ", spread evenly over the run (<code>--rollouts N</code> sets their number, "
    f"up to {MAX_BYTES // 2**20} MiB)"
)
_NO_ROLLOUTS = (
    "no rollouts are logged: a run logs <code>rollouts_logged_per_step</code> groups of each step, "
    "and none with <code>train_from</code>"
)
_NO_ANSWERS = (
    "no evaluation samples are logged: an evaluation logs the answers to "
    "<code>eval.prompts_logged</code> prompts"
)
_NO_LOGPROBS = (
    "No logprobs of tokens are logged: add <code>log_token_logprobs=true</code> to the command of "
    "the run."
)
_TOKENS = (
    "Point at a token for its logprobs, click on it, or use the arrow keys in its box. "
    "A dot is a token without text."
)
_LEGEND = (
    '<div class="legend" id="rollouts-legend"><span></span><span class="scale"></span>'
    "<span></span></div>"
)


def rollouts_section(sample: RolloutSample) -> str:
    """Return HTML of the rollouts section."""
    if not sample.groups:
        return _none(sample, "groups", _NO_ROLLOUTS)
    spread = _SPREAD if len(sample.groups) < sample.logged else ""
    about = _about(sample, f"groups in logs/rollouts.jsonl{spread}")
    differences = [" - ".join(pair) for pair in _PAIRS if sample.logprobs.issuperset(pair)]
    colors = [*((name, name) for name in differences), ("", "nothing")]
    orders = _ORDERS + (("largest logprob difference",) if differences else ())
    color = _select("rollouts-color", "tokens coloured by", colors)
    about += f". {_TOKENS if sample.logprobs else _NO_LOGPROBS}"
    return _list("rollouts", about, orders, color, _LEGEND)


def answers_section(sample: RolloutSample) -> str:
    """Return HTML of the section with the answers to held-out prompts."""
    if not sample.groups:
        return _none(sample, "prompts", _NO_ANSWERS)
    what = "prompts in logs/evaluation_answers.jsonl, a prompt counted once for each evaluation"
    return _list("answers", _about(sample, what) + ".", (*_ORDERS, "by prompt"))


def _none(sample: RolloutSample, what: str, why: str) -> str:
    none = f"none of the {sample.logged:,} logged {what} is shown" if sample.logged else why
    return f'<p class="about">{none}</p>'


def _about(sample: RolloutSample, what: str) -> str:
    about = f"{len(sample.groups):,} of the {sample.logged:,} {what}"
    if sample.superseded:
        about += f"; {sample.superseded:,} more belong to steps that a later attempt repeated"
    return about


def _list(name: str, about: str, orders: Sequence[str], color: str = "", legend: str = "") -> str:
    """Return HTML of a list of samples and its filters, which the page's script fills."""
    filters = (
        _input(f"{name}-words", "contains", "search"),
        _select(f"{name}-kind", "responses", list(_KINDS.items())),
        _select(f"{name}-finish", "finish reason", [("", "any")]),
        _input(f"{name}-from", "from step", "number"),
        _input(f"{name}-to", "to step", "number"),
        _select(f"{name}-order", "order", [(order, order) for order in orders]),
    )
    return (
        f'<p class="about">{about}</p><div class="box">'
        f'<div class="filters">{"".join(filters)}{color}</div>{legend}'
        f'<div class="about" id="{name}-count" role="status"></div></div>'
        f'<div id="{name}-list"></div><button id="{name}-more" hidden>show more</button>'
    )


def _input(name: str, label: str, kind: str) -> str:
    return f'<label>{label}<input type="{kind}" id="{name}"></label>'


def _select(name: str, label: str, options: Sequence[tuple[str, str]]) -> str:
    chosen = "".join(f'<option value="{value}">{caption}</option>' for value, caption in options)
    return f'<label>{label}<select id="{name}">{chosen}</select></label>'
