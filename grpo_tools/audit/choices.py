"""Repeats what a curriculum draws, and which groups a reuse chooses, from the records."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_components.data.curriculum import curriculum_of
from grpo_components.exchange.group_reuse import Candidate, ReusePool, reused_per_step
from grpo_components.exchange.staleness import StalenessContract
from grpo_tools.audit.findings import Findings
from grpo_tools.audit.history import Group, History, Prompt, Record

_DRAWS = "seed", "curriculum", "prompts"
"""Fields of a start record that only a run with a curriculum has."""


def begin_draws(start: Record, before: Record, h: History, findings: Findings) -> None:
    """Check that an attempt draws from the same prompts as the one before it, by the same rule."""
    described, known = ([record.get(key) for key in _DRAWS] for record in (start, before))
    if before and (described != known):
        findings.check("curriculum", False, "draws otherwise than the attempt before")
    if "curriculum" in start and h.curriculum is None:
        try:
            h.curriculum = curriculum_of(start)
        except ValueError as error:
            findings.check("curriculum", False, str(error))


def check_draw(prompt: Prompt, number: int, h: History, findings: Findings) -> None:
    """Check that a new group has the prompt that the success rates and the seed give."""
    if h.curriculum is not None:
        row, epoch = h.curriculum.draw()
        problem = f"group {number} has prompt {prompt[0]} of epoch {prompt[1]}, "
        problem += f"but seed and success rates draw {row} of epoch {epoch}"
        findings.check("curriculum", prompt == (row, epoch), problem)


def check_result(
    event: Record, prompt: Prompt, start: Record, h: History, findings: Findings
) -> None:
    """Check that a generated group has a possible result exactly if there is a curriculum."""
    number, has = event["group"], "scored" in event
    if "curriculum" not in start and not has:
        return
    wanted = "curriculum" in start
    problem = f"group {number} has {'no' if wanted else 'a'} result"
    findings.check("curriculum", has == wanted, problem)
    if has:
        result = event["successes"], event["scored"]
        possible = result[0] <= result[1] <= start["group_size"]
        findings.check("curriculum", possible, f"group {number} has {result[0]} of {result[1]}")
        if h.curriculum is not None and h.curriculum.knows(prompt[0]):
            h.curriculum.add_result(prompt[0], *result)


def begin_reuse(start: Record, h: History, findings: Findings) -> None:
    """Go on with the groups that the attempt before left to reuse, by the attempt's own rule."""
    rule, before, h.pool = start.get("replay_generation"), h.pool, None
    if rule is None:
        h.once_trained = {}
        return
    share, max_uses = rule["share"], rule["max_uses"]
    most = reused_per_step(min(share, 1.0), start["groups_per_step"])
    possible = share < 1 and most > 0 and max_uses > 1 and start["max_staleness"] > 0
    if not findings.check("reused", possible, f"the rule {rule} can reuse nothing, or too much"):
        return
    contract = StalenessContract(start["max_staleness"], start["groups_per_step"])
    h.pool = ReusePool(contract, share, max_uses)
    if before is not None:
        h.pool.candidates = before.candidates
        h.pool.forget(start["policy_version"])


def follow_trained(event: Record, group: Group, h: History, findings: Findings) -> None:
    """Note what the choice depends on of a group that is trained for the first time."""
    number, has = event["trained"], "spread" in event
    if h.pool is None and not has:
        return
    problem = f"group {number} is trained with{'' if has else 'out'} its spread and oldest version"
    if findings.check("reused", has and h.pool is not None, problem):
        worth = Candidate(number, event["spread"], event["oldest_version"])
        h.once_trained[number] = group, worth


def follow_reused(
    event: Record,
    step: Record,
    start: Record,
    reused: dict[int, Group],
    h: History,
    findings: Findings,
) -> Group | None:
    """Check one reuse of a group."""
    check, number, use = findings.check, event["group"], event["use"]
    known = h.once_trained.get(number) if h.pool is not None else None
    if not check("reused", known is not None, f"group {number} is reused before it is trained"):
        return None
    assert known is not None and h.pool is not None
    group, worth = known
    check("reused", number not in reused, f"group {number} is reused twice in a step")
    check("reused", use == worth.uses + 1, f"use {use} of group {number} follows use {worth.uses}")
    most = h.pool.max_uses
    check("reused", use <= most, f"use {use} of group {number}, more than max_uses {most}")
    age = StalenessContract.staleness(worth.oldest_version, step["trained_from"])
    problem = f"group {number} is reused {age} versions old, more than {start['max_staleness']}"
    check("reused", age <= start["max_staleness"], problem)
    reused[number] = group
    return group


def check_choice(
    record: Record,
    trained: Mapping[int, Group],
    reused: Mapping[int, Group],
    h: History,
    findings: Findings,
) -> None:
    """Check that a step reused the groups that the rule chooses, and count its uses."""
    if h.pool is None:
        return
    chosen, before = h.pool.choose(h.policy_version), record["trained_from"]
    problem = f"reuses the groups {sorted(reused)[:8]}, but the priority chooses {chosen[:8]}"
    findings.check("reused", sorted(reused) == chosen, problem)
    worths = [
        h.once_trained[number][1] for number in (*trained, *reused) if number in h.once_trained
    ]
    if worths and record["token_versions"]:
        stated, oldest = (
            min(w.oldest_version for w in worths),
            min(map(int, record["token_versions"])),
        )
        problem = f"trains tokens of version {oldest}, older than all its groups ({stated})"
        findings.check("reused", stated <= oldest, problem)
    new = [h.once_trained[number][1] for number in trained if number in h.once_trained]
    again = [number for number in reused if number in h.pool.candidates]
    h.pool.end_step(new, again, before, record["policy_version"])
