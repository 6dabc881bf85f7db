"""The staleness contract as arithmetic: when a group may start, until when it may be trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StalenessContract:
    """No token older than `max_staleness` policy versions is ever trained.

    Args:
        max_staleness: the bound, in policy versions; 0 is synchronous.
        groups_per_step: groups that one training step consumes.
    """

    max_staleness: int
    groups_per_step: int

    def needed_version(self, policy_version: int, groups_ahead: int) -> int:
        """The oldest version that a group admitted now may be generated with.

        Its position is p = policy_version * groups_per_step + groups_ahead, so it will be trained
        in step p // groups_per_step.

        Args:
            policy_version: the trainer's, counting batches trained.
            groups_ahead: groups in training, buffered and in flight.
        """
        position = policy_version * self.groups_per_step + groups_ahead
        return position // self.groups_per_step - self.max_staleness

    def may_train(self, oldest_version: int, policy_version: int) -> bool:
        """Whether a group may be trained in the step that starts from `policy_version`."""
        return oldest_version >= policy_version - self.max_staleness

    def must_wait(
        self, buffered: Sequence[int], in_flight: Sequence[int], policy_version: int
    ) -> bool:
        """Whether a step that starts now, without the groups in flight, dooms some of them.

        The step takes the `groups_per_step` oldest buffered groups. A group that started with
        version s can last be trained in the step from version s + max_staleness, so that of the
        remaining groups at most (s + max_staleness - policy_version) * groups_per_step may have
        started with version s or less. Admission makes that so once all of them are buffered.

        Args:
            buffered: start version of each buffered group.
            in_flight: start version of each group in flight.
            policy_version: version that the step starts from.
        """
        remaining = sorted([*in_flight, *sorted(buffered)[self.groups_per_step :]])
        return bool(in_flight) and any(
            count > (start + self.max_staleness - policy_version) * self.groups_per_step
            for count, start in enumerate(remaining, start=1)
        )
