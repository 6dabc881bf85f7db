"""What brings a restarted role back to where it was, from what the driver knows."""

from __future__ import annotations

from grpo_components.cluster.role import Role
from grpo_components.exchange.ledger import Ledger


async def refill(buffer: Role, ledger: Ledger, timeout_s: float) -> None:
    """Give a new replay buffer the groups that the ledger has as buffered.

    Args:
        buffer: the replay buffer, empty.
        ledger: of the run; it keeps what each group is until that is trained.
        timeout_s: longest wait.
    """
    parts = [part for entry in ledger.in_state("buffered") for part in entry.parts]
    await buffer.call("refill", *parts, timeout_s=timeout_s)
