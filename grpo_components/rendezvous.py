"""Opens the TCP port on rank 0's node at which the ranks of a process group find each other."""

from __future__ import annotations

import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class Rendezvous:
    """Address at which rank 0 of a process group listens for the other ranks."""

    host: str
    """IP address of rank 0's node."""
    port: int
    listener: int | None = None
    """File descriptor of rank 0's listening socket; None if this process did not open it."""


def open_rendezvous(host: str) -> Rendezvous:
    """Listen on a free port for the other ranks; called in rank 0's process.

    The socket stays open, because a port that is only looked up may be taken before it is used.
    The caller owns the socket.
    """
    with socket.socket(_family(host)) as listener:
        listener.bind((host, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        return Rendezvous(host, port, listener.detach())


def local_rendezvous(host: str = "127.0.0.1") -> Rendezvous:
    """Find a free port of this machine for a rank 0 that opens the port later, as vLLM does."""
    with socket.socket(_family(host)) as probe:
        probe.bind((host, 0))
        return Rendezvous(host, probe.getsockname()[1])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
