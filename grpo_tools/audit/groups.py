"""Checks the events that issue, generate, restart, train or drop groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from grpo_tools.audit.choices import check_draw, check_result, follow_reused, follow_trained
from grpo_tools.audit.findings import Findings
from grpo_tools.audit.history import Group, History, Prompt, Record

_STATES = ("in_flight", "buffered", "in_training")


@dataclass(frozen=True)
class Batch:
    """The groups that a step took."""

    groups: Sequence[int] = ()
    worths: Sequence[Record] | None = None
    """Where steps reuse groups: spread and oldest version of each new group."""
    reused: Sequence[Record] = field(default_factory=list)


def train(
    batch: Batch, step: Record, start: Record, h: History, findings: Findings
) -> tuple[dict[int, Group], dict[int, Group]]:
    """Check that a step may train its groups; return the new ones and the reused ones."""
    trained: dict[int, Group] = {}
    reused: dict[int, Group] = {}
    worths = batch.worths or [{}] * len(batch.groups)
    same = len(worths) == len(batch.groups)
    findings.check("reused", same, f"{len(worths)} worths of {len(batch.groups)} groups")
    for number, worth in zip(batch.groups, worths, strict=False):
        group = _end_group(number, None, h, findings)
        if group is None:
            continue
        h.trained += 1
        again = group.prompt in h.trained_prompts
        findings.check("prompts", not again, f"prompt {_name(group.prompt)} is trained again")
        h.trained_prompts.add(group.prompt)
        trained[number] = group
        follow_trained({"trained": number, **worth}, group, h, findings)
    for event in batch.reused:
        follow_reused(event, step, start, reused, h, findings)
    return trained, reused


def check_end(event: Record, h: History, findings: Findings) -> None:
    """Check that an attempt's end lists the groups and prompts that its events leave over."""
    check = findings.check
    living = {g["group"]: (g["prompt"], g["epoch"]) for g in event["living"]}
    once = len(living) == len(event["living"])
    check("accounted", once, "`living` lists a group twice")
    known = {number: group.prompt for number, group in h.living.items()}
    differing = sorted(living.items() ^ known.items())
    name = differing and differing[0][0]
    check("accounted", not differing, f"`living` and the events disagree on group {name}")
    for group in event["living"] if not differing else ():
        generated = h.living[group["group"]].tokens is not None
        consistent = group["state"] in _STATES and (generated or group["state"] == "in_flight")
        problem = f"group {group['group']} is {group['state']}"
        problem += f", but {'generated' if generated else 'not generated'}"
        check("accounted", consistent, problem)
    waiting = Counter((p["prompt"], p["epoch"]) for p in event["waiting"])
    differing = sorted((waiting - h.waiting) + (h.waiting - waiting))
    problem = (
        f"`waiting` and the events disagree on prompt {_name(differing[0])}" if differing else ""
    )
    check("accounted", not differing, problem)
    check(
        "accounted",
        h.issued == h.trained + h.dropped + len(living),
        f"{h.issued} issued, {h.trained} trained + {h.dropped} dropped + {len(living)} living",
    )


def _issue(event: Record, start: Record, h: History, findings: Findings) -> None:
    number, prompt = event["group"], (event["prompt"], event["epoch"])
    again = h.living.get(number)
    if again is not None:  # its generator was lost
        lost = not again.in_flight and again.prompt == prompt
        findings.check("issued", lost, f"group {number} is issued again, or with another prompt")
        again.in_flight = True
        return
    in_order = findings.check(
        "issued", number == h.issued, f"group {number} is issued, expected {h.issued}"
    )
    if not in_order and number < h.issued:
        return
    handed_back = h.waiting[prompt] > 0
    known = prompt in h.issued_prompts
    findings.check(
        "prompts",
        handed_back or not known,
        f"group {number} issues prompt {_name(prompt)} again",
    )
    first = next(iter(+h.waiting), None)
    if not handed_back:
        check_draw(prompt, number, h, findings)
    findings.check(
        "reissued",
        handed_back or known or first is None,
        f"group {number} has a new prompt, but prompt {_name(first or prompt)} was handed back",
    )
    h.waiting -= Counter([prompt])  # also removes counts of 0
    h.issued_prompts.add(prompt)
    h.issued = number + 1
    h.living[number] = Group(prompt)


def _finish(event: Record, start: Record, h: History, findings: Findings) -> None:
    number = event["group"]
    group = h.living.get(number)
    if findings.check("generated", group is not None, f"group {number} is not living"):
        assert group is not None
        again = group.tokens is not None
        findings.check("generated", not again, f"group {number} is generated twice")
        size, wanted = len(event["response_tokens"]), start["group_size"]
        findings.check("generated", size == wanted, f"group {number} has {size} responses")
        group.tokens = sum(event["response_tokens"])
        check_result(event, group.prompt, start, h, findings)


def _interrupt(event: Record, start: Record, h: History, findings: Findings) -> None:
    number = event["group"]
    group = h.living.get(number)
    if findings.check("generated", group is not None, f"group {number} is not living"):
        assert group is not None
        group.tokens, group.in_flight = None, False


def _drop(event: Record, start: Record, h: History, findings: Findings) -> None:
    reason, numbers, check = event["reason"], event["groups"], findings.check
    check("ended", bool(reason.strip()), f"groups {numbers[:8]} are dropped without a reason")
    counted = len(numbers) == len(event["tokens"])
    check("ended", counted, f"{len(numbers)} groups are dropped, {len(event['tokens'])} counted")
    if start["max_staleness"] == 0:
        stale = reason == "stale"
        check("synchronous", not stale, f"groups {numbers[:8]} are dropped as stale")
    for number in numbers:
        if group := _end_group(number, reason, h, findings):
            h.dropped += 1
            if event["reissue"]:
                h.waiting[group.prompt] += 1


FOLLOW: Mapping[str, Callable[[Record, Record, History, Findings], None]] = {
    "issue": _issue,
    "finish": _finish,
    "interrupt": _interrupt,
    "drop": _drop,
}
"""Name of an event of groups -> its check."""


def _end_group(number: int, reason: str | None, h: History, findings: Findings) -> Group | None:
    group, verb = h.living.pop(number, None), f"dropped as {reason}" if reason else "trained"
    known = group is not None
    if not findings.check("ended", known, f"group {number} is {verb}, but is not living"):
        return None
    assert group is not None
    ready = group.tokens is not None or reason == "failed"
    findings.check("ended", ready, f"group {number} is {verb} before it is generated")
    return group


def _name(prompt: Prompt) -> str:
    return f"{prompt[0]} of epoch {prompt[1]}"
