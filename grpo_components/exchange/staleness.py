"""The staleness contract as arithmetic: when a group may start, until when it may be trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Versions = TypeVar("Versions", int, float, "Tensor")


@dataclass(frozen=True)
class StalenessContract:
    """No token older than `max_staleness` policy versions is ever trained.

    Args:
        max_staleness: the bound, in policy versions; 0 is synchronous.
        groups_per_step: groups that one training step consumes.
    """

    max_staleness: int
    groups_per_step: int

    @property
    def max_living_groups(self) -> int:
        """Most groups that are in flight, buffered or in training at once.

        Admission never lets in more: one batch for each version that may be trained together.
        """
        return self.groups_of(self.max_staleness + 1)

    @property
    def max_push_interval(self) -> int:
        """Most training steps from one push to the next.

        With more, the groups of a step would wait for a push that comes after that step.
        """
        return self.max_staleness + 1

    def groups_of(self, steps: int) -> int:
        """How many groups this many training steps consume."""
        return steps * self.groups_per_step

    def step_of(self, first_step: int, groups_ahead: int) -> int:
        """The training step that consumes a group.

        Args:
            first_step: the next training step, or the version that it starts from.
            groups_ahead: groups that are consumed before this one, from that step on.
        """
        return first_step + groups_ahead // self.groups_per_step

    def needed_version(self, policy_version: int, groups_ahead: int) -> int:
        """The oldest version that a group admitted now may be generated with.

        Args:
            policy_version: the trainer's, counting batches trained.
            groups_ahead: groups in training, buffered and in flight.
        """
        return self.oldest_trainable(self.step_of(policy_version, groups_ahead))

    @staticmethod
    def staleness(versions: Versions, policy_version: int) -> Versions:
        """How many policy versions older than the trainer the sampling weights are.

        Args:
            versions: that sampled a token; their mean; or those of many tokens, as a tensor.
            policy_version: that the training step starts from.
        """
        return policy_version - versions

    def oldest_trainable(self, policy_version: int) -> int:
        """The oldest version whose tokens the step from `policy_version` may train."""
        return policy_version - self.max_staleness

    def may_train(self, oldest_version: int, policy_version: int) -> bool:
        """Whether the step from `policy_version` may train a group with this oldest token."""
        return oldest_version >= self.oldest_trainable(policy_version)

    def must_wait(
        self, buffered: Sequence[int], in_flight: Sequence[int], policy_version: int
    ) -> bool:
        """Whether a step that starts now, without the groups in flight, dooms some of them.

        The step takes the `groups_per_step` oldest buffered groups. A group that started with
        version s can last be trained in the step from version s + max_staleness. So of the
        remaining groups, at most (s + max_staleness - policy_version) * groups_per_step may have
        started with version s or less. Admission ensures this once all of them are buffered.

        Args:
            buffered: start version of each buffered group.
            in_flight: start version of each group in flight.
            policy_version: version that the step starts from.
        """
        remaining = sorted([*in_flight, *sorted(buffered)[self.groups_per_step :]])
        return bool(in_flight) and any(
            count > self.groups_of(start - self.oldest_trainable(policy_version))
            for count, start in enumerate(remaining, start=1)
        )
