"""Dynamic sampling: groups whose rewards are all equal teach nothing and are replaced.

DAPO, arXiv 2503.14476, section 3.2: a group whose responses all succeed or all fail has advantages
0 and dilutes the batch. Here such a group is discarded as soon as its rewards are known, before the
reference model sees it, and another prompt takes its place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from grpo_components.errors import StarvedError


class DynamicSampling:
    """Decides which groups to keep, and ends the run after too many discarded groups in a row."""

    def __init__(self, max_discarded: int) -> None:
        self.max_discarded = max_discarded
        self._successes: Counter[int] = Counter()
        self._too_few_valid = 0

    def keeps(self, rewards: Sequence[float], successes: Sequence[bool]) -> bool:
        """Decide whether to keep a group; call it once per group, in the order of finishing."""
        pairs = zip(rewards, successes, strict=True)
        scored = [(reward, success) for reward, success in pairs if not math.isnan(reward)]
        if len({reward for reward, _ in scored}) > 1:
            self._successes.clear()
            self._too_few_valid = 0
            return True
        self._successes[sum(bool(success) for _, success in scored)] += 1
        self._too_few_valid += len(scored) < 2
        if self._successes.total() > self.max_discarded:
            raise StarvedError(self._report())
        return False

    def _report(self) -> str:
        histogram = ", ".join(f"{k}: {n}" for k, n in sorted(self._successes.items()))
        failed = ""
        if self._too_few_valid:
            failed = f" {self._too_few_valid} of them had fewer than 2 samples that did not fail."
        return (
            f"dynamic_sampling.max_discarded: {self._successes.total()} groups in a row were "
            f"discarded, {self.max_discarded} are allowed: within each all rewards were equal. "
            f"Successes in group: number of groups = {{{histogram}}}.{failed} Where groups never "
            "succeed, use easier prompts; where they always do, harder ones; a larger group_size "
            "makes mixed groups likelier."
        )
