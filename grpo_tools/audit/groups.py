"""Checks the events that issue, generate, restart, train or drop groups."""

from __future__ import annotations

import math
from collections import Counter

from grpo_tools.audit.choices import check_draw, check_result, follow_reused, follow_trained
from grpo_tools.audit.findings import Findings
from grpo_tools.audit.history import Group, History, Prompt, Record

_STATES = ("in_flight", "buffered", "in_training")


def follow_events(
    record: Record, start: Record, h: History, findings: Findings
) -> tuple[dict[int, Group], dict[int, Group]]:
    """Check the events of a record, and check that its sums agree with them."""
    totals, check = _Totals(), findings.check
    trained: dict[int, Group] = {}
    reused: dict[int, Group] = {}
    for event in record["events"]:
        if "issued" in event:
            _issue(event, h, findings)
            totals.issued += 1
        elif "generated" in event:
            number = event["generated"]
            group = h.living.get(number)
            if check("generated", group is not None, f"group {number} is not living"):
                assert group is not None
                again = group.response_tokens is not None
                check("generated", not again, f"group {number} is generated twice")
                group.response_tokens = event["response_tokens"]
                check_result(event, group.prompt, start, h, findings)
            totals.add("generated", event["response_tokens"])
        elif "restarted" in event:
            number = event["restarted"]
            group = h.living.get(number)
            if check("generated", group is not None, f"group {number} is not living"):
                assert group is not None
                group.response_tokens = None
        elif "reused" in event:
            group = follow_reused(event, record, start, reused, h, findings)
            totals.add("reused", group.response_tokens if group else None)
        else:
            group = _end_group(event, h, findings)
            tokens = group.response_tokens if group else None
            reason = event.get("reason")
            totals.add("trained" if reason is None else f"dropped.{reason}", tokens)
            if group and "trained" in event:
                trained[event["trained"]] = group
                follow_trained(event, group, h, findings)
    stale = [e["dropped"] for e in record["events"] if e.get("reason") == "stale"]
    if start["max_staleness"] == 0:
        check("synchronous", not stale, f"groups {stale[:8]} are dropped as stale")
    problem = totals.mismatch(record["groups"])
    check("totals", not problem, f"groups.{problem} differs from the events")
    return trained, reused


def check_ends(record: Record, h: History, findings: Findings) -> None:
    """Check that an end record lists the groups and prompts that its events leave over."""
    check = findings.check
    living = {g["group_id"]: (g["prompt_index"], g["epoch"]) for g in record["living"]}
    once = len(living) == len(record["living"])
    check("accounted", once, "`living` lists a group twice")
    known = {number: group.prompt for number, group in h.living.items()}
    differing = sorted(living.items() ^ known.items())
    name = differing and differing[0][0]
    check("accounted", not differing, f"`living` and the events disagree on group {name}")
    for group in record["living"] if not differing else ():
        generated = h.living[group["group_id"]].response_tokens is not None
        consistent = group["state"] in _STATES and (generated or group["state"] == "in_flight")
        problem = f"group {group['group_id']} is {group['state']}"
        problem += f", but {'generated' if generated else 'not generated'}"
        check("accounted", consistent, problem)
    waiting = Counter((p["prompt_index"], p["epoch"]) for p in record["waiting"])
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


def _issue(event: Record, h: History, findings: Findings) -> None:
    number, prompt = event["issued"], (event["prompt_index"], event["epoch"])
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


def _end_group(event: Record, h: History, findings: Findings) -> Group | None:
    dropped, check = "dropped" in event, findings.check
    reason, number = event.get("reason"), event["dropped" if dropped else "trained"]
    if dropped:
        named = bool(reason) and not str(reason).isspace()
        check("ended", named, f"group {number} is dropped without a reason")
    group = h.living.pop(number, None)
    verb = f"dropped as {reason}" if dropped else "trained"
    if not check("ended", group is not None, f"group {number} is {verb}, but is not living"):
        return None
    assert group is not None
    ready = group.response_tokens is not None or reason == "failed"
    check("ended", ready, f"group {number} is {verb} before it is generated")
    if dropped:
        h.dropped += 1
        if event["reissue"]:
            h.waiting[group.prompt] += 1
    else:
        h.trained += 1
        again = group.prompt in h.trained_prompts
        check("prompts", not again, f"prompt {_name(group.prompt)} is trained again")
        h.trained_prompts.add(group.prompt)
    return group


class _Totals:
    """Adds up the events of a record, to check the record's own sums."""

    def __init__(self) -> None:
        self.issued = 0
        self._tokens: dict[str, list[float | None]] = {}

    def add(self, what: str, response_tokens: float | None) -> None:
        self._tokens.setdefault(what, []).append(response_tokens)

    def mismatch(self, groups: Record) -> str:
        """Return the first field of a record's `groups` that differs, or an empty string."""
        if groups["issued"] != self.issued:
            return "issued"
        stated = {key: groups[key] for key in ("generated", "trained", "reused") if groups.get(key)}
        stated["dropped.filtered"] = groups["filtered"]
        stated |= {f"dropped.{key}": groups["dropped"][key] for key in groups["dropped"]}
        for what in stated | self._tokens:
            values = self._tokens.get(what, [])
            known = [tokens for tokens in values if tokens is not None]
            mean = sum(known) / len(known) if known else None
            amount = stated.get(what, {"count": 0, "response_tokens_mean": None})
            stated_mean = amount["response_tokens_mean"]
            same = stated_mean == mean or bool(
                stated_mean is not None and mean and math.isclose(stated_mean, mean)
            )
            if amount["count"] != len(values) or not same:
                return what.removeprefix("dropped.") if what == "dropped.filtered" else what
        return ""


def _name(prompt: Prompt) -> str:
    return f"{prompt[0]} of epoch {prompt[1]}"
