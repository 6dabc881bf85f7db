"""A slow cable between two network namespaces: each frame takes 100 ms, and 10 Mbit pass a second.

Few kernels have netem, which would do the same to a fast one.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import queue
import struct
import sys
import threading
import time
from pathlib import Path

NAME = "slow0"
_DELAY_S, _BITS_PER_S = 0.1, 10e6
_MOST_QUEUED = 1000
_CLONE_NEWNET, _TUNSETIFF = 0x40000000, 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x2, 0x1000


def open_end(pid: int) -> int:
    """Make a network device in the namespace of a process; return the descriptor of its frames."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{pid}/ns/net").open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"the network of process {pid} cannot be entered")
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", NAME.encode(), _IFF_TAP | _IFF_NO_PI))
    return end


def carry(source: int, target: int) -> None:
    """Carry frames one way; a full queue loses them, as that of a router does."""
    waiting: queue.Queue[tuple[float, bytes]] = queue.Queue(_MOST_QUEUED)

    def deliver() -> None:
        while True:
            due, frame = waiting.get()
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                os.write(target, frame)
            except OSError:  # the other device is down
                continue

    threading.Thread(target=deliver, daemon=True).start()
    sent = 0.0
    while True:
        frame = os.read(source, 65536)
        sent = max(sent, time.monotonic()) + 8 * len(frame) / _BITS_PER_S
        if not waiting.full():
            waiting.put((sent + _DELAY_S, frame))


def main() -> None:
    """Connect the namespaces of two processes, say so, and carry frames until killed."""
    ends = [open_end(int(pid)) for pid in sys.argv[1:]]
    sys.stdout.write("connected\n")
    sys.stdout.flush()
    threading.Thread(target=carry, args=ends, daemon=True).start()
    carry(*reversed(ends))


if __name__ == "__main__":
    main()
