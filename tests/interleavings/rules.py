"""What must hold at the end of every schedule; `roles` and `world` check the rest as it happens."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from interleavings.roles import NEWEST
from interleavings.world import World

from grpo_tools.books import Amount


@dataclass
class Finals:
    """The batches that the first run of a synchronous job trained: all others train the same."""

    weights: list[Any] = field(default_factory=list)


def check_end(world: World, finals: Finals) -> str:
    ledger, bound, prompts = world.ledger, world.bound, world.prompts
    weights = world.files[NEWEST]
    trained = [group for batch in weights for group in batch]
    dropped, living = sum(ledger.dropped_groups.values()), len(ledger.living())
    if len(weights) != bound.steps or ledger.steps_done != bound.steps:
        return f"{ledger.steps_done} steps are done, {len(weights)} are in the weights"
    if ledger.trained_groups != len(trained):
        return f"books: {ledger.trained_groups} groups trained, {len(trained)} are in the weights"
    residual = ledger.issued - ledger.trained_groups - dropped - living
    if residual:
        counts = f"{ledger.issued} issued, {ledger.trained_groups} trained, {dropped} dropped"
        return f"books: {counts}, {living} living: residual {residual}"
    world.receipts.close()
    books = world.books
    if books.problem or books.residual != Amount():
        return f"books: {books.problem}; {books.line()}"
    if living or ledger.waiting_prompts:
        return f"{living} groups and {len(ledger.waiting_prompts)} prompts are left behind"
    accounted = Counter([group.prompt_index for group in trained] + prompts.ended)
    if accounted != Counter(range(prompts.drawn)):
        return f"prompts: {prompts.drawn} drawn, trained or ended: {sorted(accounted.elements())}"
    if not {*prompts.ended} <= {*bound.failing}:
        return f"prompts {prompts.ended} ended untrained; only {list(bound.failing)} fail"
    if world.budget._restarts and not (bound.crash and not world.crashes_left):
        return f"{[role for _, role in world.budget._restarts]} restarted, and nothing killed them"
    stale = ledger.dropped_groups["stale"]
    if stale and (bound.max_staleness == 0 or (bound.stale_groups == "wait" and not bound.crash)):
        return f"{stale} groups were dropped as stale, which none may be here"
    if bound.max_staleness == 0:
        finals.weights = finals.weights or [weights]
        if finals.weights[0] != weights:
            return "a synchronous run trained other batches than another schedule of it"
    return ""
