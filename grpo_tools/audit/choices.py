"""Computes from the records which prompts a curriculum draws and which groups are reused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_components.data.curriculum import Curriculum, curriculum_of
from grpo_components.exchange.group_reuse import Candidate, ReusePool
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.files import Record
from grpo_tools.audit.findings import Findings

Prompt = tuple[int, int]
"""(row of the data set, epoch)."""
_DRAWS = "seed", "curriculum", "prompts"
"""Fields of a start record that only a run with a curriculum has."""


@dataclass
class Group:
    """A group of a run."""

    prompt: Prompt
    tokens: int | None = None
    """Number of tokens of its responses; None until the group is generated."""
    in_flight: bool = True
    """Whether it was issued since its generator was lost."""


Groups = Mapping[int, Group]


@dataclass
class Choices:
    """The state after a step on which the draws of prompts and the reuse of groups depend."""

    start: Record = field(default_factory=dict)
    """The attempt's start record."""
    curriculum: Curriculum | None = None
    """Draws the prompts once more; None if the run has no curriculum, or an invalid one."""
    pool: ReusePool | None = None
    """Chooses the reused groups once more; None if nothing is reused."""
    once_trained: dict[int, tuple[Group, Candidate]] = field(default_factory=dict)
    """All trained groups, by group number, if the run reuses groups."""

    def begin(self, start: Record, before: Record, findings: Findings) -> None:
        """Check that an attempt's rules for draws and reuse are valid and the last attempt's."""
        self.start = start
        described, known = ([record.get(key) for key in _DRAWS] for record in (start, before))
        if before and described != known:
            findings.check("curriculum", False, "draws otherwise than the attempt before")
        if "curriculum" in start and self.curriculum is None:
            try:
                self.curriculum = curriculum_of(start)
            except ValueError as error:
                findings.check("curriculum", False, str(error))
        # Go on with the groups that the attempt before left, by the attempt's own rule.
        rule, earlier, self.pool = start.get("replay_generation"), self.pool, None
        if rule is None:
            self.once_trained = {}
            return
        contract = StalenessContract(start["max_staleness"], start["groups_per_step"])
        pool = ReusePool(contract, min(rule["share"], 1.0), rule["max_uses"])
        possible = rule["share"] < 1 and pool.most > 0 and pool.max_uses > 1
        problem = f"the rule {rule} can reuse nothing, or too much"
        if findings.check("reused", possible and start["max_staleness"] > 0, problem):
            self.pool = pool
            if earlier is not None:
                pool.candidates = earlier.candidates
                pool.forget(start["policy_version"])

    def check_draw(self, prompt: Prompt, number: int, findings: Findings) -> None:
        """Check that a new group has the prompt that the success rates and the seed give."""
        if self.curriculum is not None:
            row, epoch = self.curriculum.draw()
            problem = f"group {number} has prompt {prompt[0]} of epoch {prompt[1]}, "
            problem += f"but seed and success rates draw {row} of epoch {epoch}"
            findings.check("curriculum", prompt == (row, epoch), problem)

    def add_result(self, event: Record, prompt: Prompt, findings: Findings) -> None:
        """Check that a generated group has a possible result exactly if there is a curriculum."""
        number, has, wanted = event["group"], "scored" in event, "curriculum" in self.start
        if not (wanted or has):
            return
        problem = f"group {number} has {'no' if wanted else 'a'} result"
        findings.check("curriculum", has == wanted, problem)
        if has:
            result = event["successes"], event["scored"]
            possible = result[0] <= result[1] <= self.start["group_size"]
            findings.check("curriculum", possible, f"group {number} has {result[0]} of {result[1]}")
            if self.curriculum is not None and self.curriculum.knows(prompt[0]):
                self.curriculum.add_result(prompt[0], *result)

    def end_step(
        self, sample: Record, step: Record, trained: Groups, findings: Findings
    ) -> dict[int, Group]:
        """Check which groups a step trained again, and return them."""
        if self.curriculum is not None:
            self.curriculum.end_step()
        groups, worths = sample["groups"], sample.get("worths") or []
        reuses = self.pool is not None
        problem = f"{len(worths)} of {len(groups)} groups are trained with spread and oldest "
        findings.check("reused", len(worths) == len(groups) * reuses, f"{problem}version")
        for number, worth in zip(groups, worths, strict=False):
            if reuses and number in trained:
                known = Candidate(number, worth["spread"], worth["oldest_version"])
                self.once_trained[number] = trained[number], known
        reused: dict[int, Group] = {}
        for event in sample.get("reused") or ():
            self._check_reuse(event, step, reused, findings)
        if self.pool is not None:
            self._check_choice(self.pool, step, trained, reused, findings)
        return reused

    def _check_reuse(
        self, event: Record, step: Record, reused: dict[int, Group], findings: Findings
    ) -> None:
        """Check one reuse of a group, and add the group."""
        check, number, use = findings.check, event["group"], event["use"]
        known = self.once_trained.get(number) if self.pool is not None else None
        problem = f"group {number} is reused before it is trained"
        if not check("reused", known is not None, problem):
            return
        assert known is not None and self.pool is not None
        group, worth = known
        once, next_use = number not in reused, worth.uses + 1
        check("reused", once, f"group {number} is reused twice in a step")
        check("reused", use == next_use, f"use {use} of group {number} follows use {worth.uses}")
        most = self.pool.max_uses
        check("reused", use <= most, f"use {use} of group {number}, more than max_uses {most}")
        age = StalenessContract.staleness(worth.oldest_version, step["trained_from"])
        most = self.start["max_staleness"]
        check(
            "reused", age <= most, f"group {number} is reused {age} versions old, more than {most}"
        )
        reused[number] = group

    def _check_choice(
        self, pool: ReusePool, step: Record, trained: Groups, reused: Groups, findings: Findings
    ) -> None:
        """Check that a step reused the groups that the rule chooses, and count their uses."""
        before, after = step["trained_from"], step["policy_version"]
        chosen = pool.choose(before)
        problem = f"reuses the groups {sorted(reused)[:8]}, but the priority chooses {chosen[:8]}"
        findings.check("reused", sorted(reused) == chosen, problem)
        worths = {n: self.once_trained[n][1] for n in (*trained, *reused) if n in self.once_trained}
        if worths and step["token_versions"]:
            stated = min(worth.oldest_version for worth in worths.values())
            oldest = min(map(int, step["token_versions"]))
            problem = f"trains tokens of version {oldest}, older than all its groups ({stated})"
            findings.check("reused", stated <= oldest, problem)
        new = [worths[number] for number in trained if number in worths]
        pool.end_step(new, [n for n in reused if n in pool.candidates], before, after)
