"""The command `tune`: torchtune's, with a run of ours that answers before the slow imports."""

from __future__ import annotations

import contextlib
import signal
import sys
from types import FrameType
from typing import Any

from grpo_components._tune_run import is_run_of_ours
from grpo_components.cluster import early_parent


def main() -> Any:
    """Run torchtune's command; a run of ours answers before torch is imported, which takes seconds.

    Returns:
        The exit code of the command, as torchtune returns it.
    """
    if is_run_of_ours(sys.argv):
        _begin()
    from torchtune._cli.tune import main as tune

    return tune()


def _begin() -> None:
    """Say that imports take a while, start them for the roles, let Ctrl-C end them in one line."""
    sys.stdout.write("loading torch, Ray and torchtune, then checking the config ...\n")
    sys.stdout.flush()
    with contextlib.suppress(OSError):  # a run says itself why it cannot start processes
        early_parent.begin()

    def end(number: int, frame: FrameType | None) -> None:
        early_parent.stop()
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    # An exception would be lost where an import runs a callback. The recipe sets a handler again.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
