"""The staleness contract: computes when a group may start and until when it may be trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Versions = TypeVar("Versions", int, float, "Tensor")


@dataclass(frozen=True)
class StalenessContract:
    """The rule that no token older than `max_staleness` policy versions is ever trained.

    Args:
        max_staleness: largest age of a trained token, in policy versions; 0 makes the run
            synchronous.
        groups_per_step: number of groups that one training step consumes.
    """

    max_staleness: int
    groups_per_step: int

    @property
    def max_living_groups(self) -> int:
        """Largest number of groups that are in flight, buffered or in training at once.

        Admission keeps this limit: one batch for each policy version that one step may train.
        """
        return self.groups_of(self.max_staleness + 1)

    @property
    def max_push_interval(self) -> int:
        """Largest number of training steps from one push of weights to the next.

        With more, the groups of a step would wait for a push that comes after that step.
        """
        return self.max_staleness + 1

    def groups_of(self, steps: int) -> int:
        """Return how many groups this many training steps consume."""
        return steps * self.groups_per_step

    def step_of(self, first_step: int, groups_ahead: int) -> int:
        """Return the training step that consumes a group.

        Args:
            first_step: number of the next training step; or the policy version that this step
                starts from, to get a policy version.
            groups_ahead: number of groups that are consumed before this one, from that step on.
        """
        return first_step + groups_ahead // self.groups_per_step

    def needed_version(self, policy_version: int, groups_ahead: int) -> int:
        """Return the oldest policy version that may generate a group admitted now.

        Args:
            policy_version: the trainer's policy version.
            groups_ahead: number of groups in training, buffered and in flight.
        """
        return self.oldest_trainable(self.step_of(policy_version, groups_ahead))

    @staticmethod
    def staleness(versions: Versions, policy_version: int) -> Versions:
        """Return how many policy versions the sampling weights are behind the trainer's.

        Args:
            versions: version that sampled a token, a mean of such versions, or a tensor of them.
            policy_version: version that the training step starts from.
        """
        return policy_version - versions

    def oldest_trainable(self, policy_version: int) -> int:
        """Return the oldest version whose tokens the step from `policy_version` may train."""
        return policy_version - self.max_staleness

    def may_train(self, oldest_version: int, policy_version: int) -> bool:
        """Whether the step from `policy_version` may train a token sampled by `oldest_version`."""
        return oldest_version >= self.oldest_trainable(policy_version)

    def must_wait(
        self, buffered: Sequence[int], in_flight: Sequence[int], policy_version: int
    ) -> bool:
        """Whether a step that starts now makes some of the groups in flight too old to be trained.

        The step takes the `groups_per_step` oldest buffered groups. A group that started with
        version s can last be trained in the step from version s + max_staleness. So of the groups
        that are left, at most (s + max_staleness - policy_version) * groups_per_step may have
        started with version s or less. If no group is in flight, admission has ensured this.

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
