"""Checks which prompts a curriculum drew and which groups were reused, by computing both anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_components.files import Record
from grpo_tools.audit import curriculum, reuse
from grpo_tools.audit.findings import Findings

Prompt = tuple[int, int]
"""(row of the data set, epoch)."""


@dataclass
class Group:
    """State of a group of responses, computed from the receipts."""

    prompt: Prompt
    tokens: int | None = None
    """Number of tokens of its responses; None until the group is generated."""
    in_flight: bool = True
    """False after a group was lost (with its generator or by a resume), until issued again."""


Groups = Mapping[int, Group]


@dataclass
class Choices:
    """State of curriculum and reuse: what decides the next prompts and the groups to reuse."""

    start: Record = field(default_factory=dict)
    """The attempt's start record."""
    draws: curriculum.Draws | None = None
    """State of the curriculum; None if the run has none, or an invalid one."""
    pool: reuse.Pool | None = None
    """Groups that may be reused; None if reuse is off or its settings are invalid."""
    once_trained: dict[int, Group] = field(default_factory=dict)
    """All trained groups, by group number, if the run reuses groups."""

    def begin(self, start: Record, before: Record, findings: Findings) -> None:
        """Begin an attempt: check its reuse rule, and that its curriculum is valid and as `before`.

        `start`, `before`: start records of this attempt and of the one before; the first has none.
        """
        self.start, fields = start, curriculum.FIELDS
        described, known = ([record.get(key) for key in fields] for record in (start, before))
        if before and described != known:
            findings.check("curriculum", False, "draws otherwise than the attempt before")
        if "curriculum" in start and self.draws is None:
            try:
                self.draws = curriculum.first_draws(start)
            except ValueError as error:
                findings.check("curriculum", False, str(error))
        # Keep the groups that the attempt before left and that this attempt's rule may reuse.
        rule, earlier, self.pool = start.get("replay_generation"), self.pool or {}, None
        if rule is None:
            self.once_trained = {}
            return
        problem = f"the rule {rule} can reuse nothing, or too much"
        if findings.check("reused", reuse.most_reused(start) > 0, problem):
            self.pool = reuse.reusable(earlier, start, start["policy_version"])

    def check_draw(self, prompt: Prompt, number: int, findings: Findings) -> None:
        """Check that a new group has the prompt that the seed and the success rates draw."""
        if self.draws is not None:
            row, epoch = curriculum.draw(self.draws)
            problem = f"group {number} has prompt {prompt[0]} of epoch {prompt[1]}, "
            problem += f"but seed and success rates draw {row} of epoch {epoch}"
            findings.check("curriculum", prompt == (row, epoch), problem)

    def add_result(self, event: Record, prompt: Prompt, findings: Findings) -> None:
        """Check a group's success counts, which only curriculum runs have; add them to `draws`."""
        number, has, wanted = event["group"], "scored" in event, "curriculum" in self.start
        if not (wanted or has):
            return
        problem = f"group {number} has {'no' if wanted else 'a'} result"
        findings.check("curriculum", has == wanted, problem)
        if has:
            result = event["successes"], event["scored"]
            possible = result[0] <= result[1] <= self.start["group_size"]
            findings.check("curriculum", possible, f"group {number} has {result[0]} of {result[1]}")
            if self.draws is not None and possible:
                self.draws.results.append((prompt[0], *result))

    def end_step(
        self, sample: Record, step: Record, trained: Groups, findings: Findings
    ) -> dict[int, Group]:
        """Check which groups a step trained again, and return them; update draws and pool."""
        if self.draws is not None:
            curriculum.end_step(self.draws)
        check, pool, groups = findings.check, self.pool, sample["groups"]
        worths, again = sample.get("worths") or [], sample.get("reused") or []
        problem = f"{len(worths)} of {len(groups)} groups are trained with spread and oldest "
        check("reused", len(worths) == len(groups) * (pool is not None), f"{problem}version")
        if pool is None:
            check("reused", not again, f"reuses {again[:4]} without a rule")
            return {}
        before, after = step["trained_from"], step["policy_version"]
        chosen = reuse.chosen(pool, self.start, before)
        wanted = [{"group": number, "use": pool[number].uses + 1} for number in chosen]
        problem = f"reuses {again[:4]}, but the priority chooses {wanted[:4]}"
        check("reused", again == wanted, problem)
        used = {each["group"]: pool[each["group"]] for each in again if each["group"] in pool}
        pairs = zip(groups, worths, strict=False)
        new = {number: reuse.Trained(**worth) for number, worth in pairs if number in trained}
        every = (*new.values(), *used.values())
        stated = min((each.oldest_version for each in every), default=0)
        oldest = min(map(int, step["token_versions"]), default=stated)
        problem = f"trains tokens of version {oldest}, older than all its groups ({stated})"
        check("reused", stated <= oldest, problem)
        left = reuse.after_step(pool, used, new, skipped=after <= before)
        self.pool = reuse.reusable(left, self.start, after)
        self.once_trained |= trained
        numbers = (each["group"] for each in again)
        return {number: group for number in numbers if (group := self.once_trained.get(number))}
