"""Stand-ins for a generator and a trainer that answer at once, with data of the real shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from grpo_components.exchange.weight_probe import LoadedWeights
from grpo_components.exchange.weights import snapshot_checksum
from grpo_components.rollout.sequence_budget import SequenceBudget
from grpo_components.training.step_result import StepResult
from grpo_components.trajectory import (
    GroupSummary,
    PackedTrajectories,
    Trajectory,
    pack,
    split,
    summarize,
)

PROMPT_TOKENS, RESPONSE_TOKENS = 20, 10


class InstantGenerator:
    """Answers every prompt at once with the same tokens."""

    def __init__(self, *, sampling: Any, rollouts_in_flight: int, **others: Any) -> None:
        self._size = sampling.group_size
        self._use_version(0)
        self._budget = SequenceBudget(rollouts_in_flight, self._size)

    async def reserve(self, patience_s: float) -> int:
        """See `Generator.reserve`."""
        return await self._budget.reserve(patience_s)

    async def generate_group(
        self, prompt: dict[str, Any], epoch: int, group_id: int, attempt: int, temperature: float
    ) -> tuple[PackedTrajectories, GroupSummary, None]:
        """See `Generator.generate_group`."""
        ended = self._budget.begin_group()
        identity = {"prompt_index": prompt["prompt_index"], "group_id": group_id}
        numbers = {name: np.full(self._size, value) for name, value in identity.items()}
        for number in range(self._size):
            ended(number)
        return self._group | numbers, replace(self._summary, **identity), None

    def _use_version(self, version: int) -> None:
        """Make the group that every prompt gets, with tokens of this version."""
        self._version = version
        self._group = pack(
            [
                Trajectory(
                    prompt_ids=np.zeros(PROMPT_TOKENS, np.int64),
                    response_ids=np.zeros(RESPONSE_TOKENS, np.int64),
                    response_mask=np.ones(RESPONSE_TOKENS, np.bool_),
                    generator_logprobs=np.zeros(RESPONSE_TOKENS, np.float32),
                    token_versions=np.full(RESPONSE_TOKENS, version, np.int32),
                    prompt_index=0,
                    epoch=0,
                    group_id=0,
                    attempt=0,
                    temperature=1.0,
                    finish_reason="stop",
                    reward=float(number % 2),
                    reward_terms={},
                    success=False,
                    error=None,
                )
                for number in range(self._size)
            ]
        )
        self._summary = summarize(self._group)

    async def evaluate(self, prompts: Sequence[Any], *others: Any) -> list[dict[str, Any]]:
        """See `Generator.evaluate`."""
        versions = {"oldest_version": self._version, "newest_version": self._version}
        answer = {"prompt_text": "", "reward": 0.0, "success": False, "error": None, **versions}
        return [{"prompt_index": prompt["prompt_index"], **answer} for prompt in prompts]

    async def load_weights(self, version: int, *buckets: Any) -> LoadedWeights:
        """See `Generator.load_weights`."""
        self._use_version(version)
        return version, snapshot_checksum(manifest for manifest, _ in buckets), None

    def begin_attempt(self) -> None:
        """See `Generator.begin_attempt`."""


class InstantTrainer:
    """Trains nothing, at once."""

    def __init__(self, **others: Any) -> None:
        self._version = 0

    def train_step(self, batch: PackedTrajectories, advantages: Any, step: int) -> StepResult:
        """See `Trainer.train_step`."""
        self._version += 1
        versions = np.concatenate(split(batch, "token_versions"))
        tokens = Counter(np.repeat(batch["group_id"], batch["token_versions"][1]).tolist())
        return StepResult(
            policy_version=self._version,
            token_versions=dict(Counter(versions.tolist())),
            token_logprobs={},
            trained_tokens=len(versions),
            skipped_because="",
            metrics={"policy_version": self._version, "off_policy/correction_mass": 1.0},
            group_tokens={group: {"trained": n} for group, n in tokens.items()},
        )

    def gather_weights(self) -> int:
        """See `Trainer.gather_weights`."""
        return self._version

    def export_weights(self, version: int) -> tuple[tuple[tuple[()], None], tuple[()]]:
        """See `Trainer.export_weights`."""
        return ((), None), ()

    def hold_state(self, copy: bool) -> None:
        """See `Trainer.hold_state`."""

    def write_state(self, folder: str) -> None:
        """See `Trainer.write_state`."""
