"""Stand-ins for the work of roles, whose weights are the batches they were trained on."""

import asyncio
from collections import Counter
from typing import Any, NamedTuple

from lib.trajectories import summary

from grpo_components.exchange.weight_probe import LoadedWeights
from grpo_components.exchange.weights import snapshot_checksum
from grpo_components.rollout.sequence_budget import SequenceBudget
from grpo_components.training.step_result import StepResult
from grpo_components.trajectory import GroupSummary


class BrokenRule(AssertionError):
    """A schedule broke a rule."""


class Sampled(NamedTuple):
    """A generated group: what it is, and the weights that sampled its first and last token."""

    group_id: int
    prompt_index: int
    first: tuple[Any, ...]
    last: tuple[Any, ...]


Weights = tuple[tuple[Sampled, ...], ...]
"""The batches that the weights were trained on; their version is its length."""


class Generator:
    """Samples groups; real are its room for responses and that it refuses older weights."""

    def __init__(self, groups: int) -> None:
        self.weights: Weights = ()
        self._loading = 0
        self.budget = SequenceBudget(groups, 1)
        self._ends: dict[int, asyncio.Future[None]] = {}

    async def reserve(self, patience_s: float) -> int:
        return await self.budget.reserve(patience_s)

    def begin_attempt(self) -> None:
        self._loading = 0
        self.budget.begin_attempt()

    async def generate_group(
        self, prompt: dict[str, Any], epoch: int, group_id: int, attempt: int, temperature: float
    ) -> tuple[Sampled, GroupSummary, None]:
        """Sample the first token now, and the last one when the group is let end."""
        ended = self.budget.begin_group()
        first = self.weights
        self._ends[group_id] = asyncio.get_running_loop().create_future()
        await self._ends[group_id]
        del self._ends[group_id]
        ended(0)
        group = Sampled(group_id, prompt["prompt_index"], first, self.weights)
        return group, self.summary(group), None

    def summary(self, group: Sampled) -> GroupSummary:
        oldest, newest = sorted((len(group.first), len(group.last)))
        ids = {"group_id": group.group_id, "prompt_index": group.prompt_index}
        versions = {"oldest_version": oldest, "newest_version": newest}
        return summary([0.0], response_tokens=[2], response_lengths=[2], **ids, **versions)

    def end_group(self, group_id: int) -> None:
        self._ends[group_id].set_result(None)

    def load_weights(self, version: int, *buckets: Weights) -> LoadedWeights:
        """Swap the weights; see `Generator.load_weights`."""
        if version < self._loading:
            raise ValueError(f"weights of version {version} came after those of {self._loading}")
        (self.weights,) = buckets
        self._loading = version
        if len(self.weights) != version:
            raise BrokenRule(f"weights of version {len(self.weights)} came as version {version}")
        return version, snapshot_checksum(() for _ in buckets), None


class Reference:
    def add_logprobs(self, group: Sampled) -> tuple[Sampled, list[float]]:
        return group, [0.0]


NEWEST = "newest"
"""Name of the weights of the last step, which outlive the trainer."""


class Trainer:
    """Trains nothing, and checks each batch as the contract promises it."""

    def __init__(self, max_staleness: int, groups_per_step: int, files: dict[str, Any]) -> None:
        self._max_staleness, self._groups_per_step = max_staleness, groups_per_step
        self._files = files
        self.weights: Weights = ()
        self._held: Weights = ()
        self.gathered: dict[int, Weights] = {}

    def train_step(self, batch: list[Sampled], advantages: Any, step: int) -> StepResult:
        version, trained = len(self.weights), [g for b in self.weights for g in b]
        ids = [group.group_id for group in batch]
        if ids != sorted(ids) or len(ids) != self._groups_per_step:
            raise BrokenRule(f"step {step + 1} gets the groups {ids}, neither whole nor in order")
        for group in batch:
            for weights in (group.first, group.last):
                if len(weights) < version - self._max_staleness:
                    age = f"a token of version {len(weights)} in the step from version {version}"
                    raise BrokenRule(f"contract: group {group.group_id} has {age}")
                if self.weights[: len(weights)] != weights:
                    raise BrokenRule(f"group {group.group_id} was sampled by weights rolled back")
        for what in ("group_id", "prompt_index"):
            seen = [getattr(group, what) for group in (*trained, *batch)]
            if len(seen) != len(set(seen)):
                raise BrokenRule(f"a {what} is trained twice: {seen}")
        self.weights = self._files[NEWEST] = (*self.weights, tuple(batch))
        return StepResult(
            policy_version=len(self.weights),
            token_versions=Counter(len(w) for group in batch for w in (group.first, group.last)),
            token_logprobs={},
            trained_tokens=2 * len(batch),
            skipped_because="",
            metrics={"off_policy/correction_mass": 1.0},
            group_tokens={group.group_id: {"trained": 2} for group in batch},
        )

    def gather_weights(self) -> int:
        self.gathered[len(self.weights)] = self.weights
        return len(self.weights)

    def export_weights(self, version: int) -> tuple[Weights, tuple[()]]:
        return self.gathered.pop(version), ()

    def hold_state(self, copy: bool) -> None:
        self._held = self.weights

    def write_state(self, folder: str) -> None:
        self._files[folder] = self._held

    def load_state(self, folder: str) -> None:
        self.weights = self._files[NEWEST] = self._files[folder]
