"""The staleness contract: computes when a group may start and until when it may be trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Versions = TypeVar("Versions", int, float, "Tensor")


class Reused(NamedTuple):
    """Numbers of groups that steps train again, in place of new ones from the buffer."""

    next: int = 0
    """Number of groups that the next step trains again."""
    most: int = 0
    """Largest number of groups that a later step trains again."""


NONE_REUSED = Reused()


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

    @classmethod
    def of(cls, settings: Any) -> StalenessContract:
        """Build the contract from a config's settings."""
        return cls(settings.max_staleness, settings.groups_per_step)

    def groups_of(self, steps: int, reused: Reused = NONE_REUSED) -> int:
        """Return the minimum number of new groups that the next `steps` steps consume."""
        later = steps * (self.groups_per_step - reused.most)
        return later + reused.most - reused.next if steps else 0

    def step_of(self, first_step: int, groups_ahead: int, reused: Reused = NONE_REUSED) -> int:
        """Return the last training step that may consume a group with `groups_ahead` before it.

        `first_step` is the next step's number. If it is a policy version, the result is one, too.

        Without reuse, exactly that step consumes the group. With reuse, the next step consumes
        exactly `groups_per_step - reused.next` new groups, and each later one at least
        `groups_per_step - reused.most`.
        """
        ahead = groups_ahead + reused.next - reused.most
        return first_step + max(0, ahead // (self.groups_per_step - reused.most))

    def needed_version(
        self, policy_version: int, groups_ahead: int, reused: Reused = NONE_REUSED
    ) -> int:
        """Return the oldest policy version that may generate a group admitted now."""
        return self.oldest_trainable(self.step_of(policy_version, groups_ahead, reused))

    @staticmethod
    def staleness(versions: Versions, policy_version: int) -> Versions:
        """Return how many policy versions the sampling weights are behind the trainer's."""
        return policy_version - versions

    def oldest_trainable(self, policy_version: int) -> int:
        """Return the oldest version whose tokens a step starting at `policy_version` may train."""
        return policy_version - self.max_staleness

    def may_train(self, oldest_version: int, policy_version: int) -> bool:
        """Whether a step starting at `policy_version` may train a token from `oldest_version`."""
        return oldest_version >= self.oldest_trainable(policy_version)

    def must_wait(
        self,
        buffered: Sequence[int],
        in_flight: Sequence[int],
        policy_version: int,
        reused: Reused = NONE_REUSED,
    ) -> bool:
        """Whether a step that starts now makes some of the groups in flight too old to be trained.

        The step takes the `groups_per_step` oldest buffered groups. A group that started with
        version s can last be trained in the step from version s + max_staleness. So of the groups
        that are left, at most (s + max_staleness - policy_version) * groups_per_step may have
        started with version s or less. If no group is in flight, admission has ensured this limit.
        With reuse, a step takes `groups_per_step` minus the groups that it trains again.
        """
        taken = self.groups_of(1, reused)
        remaining = sorted([*in_flight, *sorted(buffered)[taken:]])
        later = self.groups_per_step - reused.most
        return bool(in_flight) and any(
            count > (start - self.oldest_trainable(policy_version)) * later
            for count, start in enumerate(remaining, start=1)
        )
