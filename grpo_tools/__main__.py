"""The command `grpo`: tools that plan a run, or read its files during or after training."""

from __future__ import annotations

import importlib
import os
import sys

_COMMANDS = {
    "audit": ("audit", "check what a run says it did: staleness, exactly once, tokens, hashes"),
    "report": ("report", "write the page of a run, or overlay the curves of several"),
    "plan": ("memory_plan", "estimate the memory of each role of a config, without GPUs"),
    "simulate": ("simulate", "predict a run with other settings from a finished one"),
    "diagnose": ("diagnose", "say what looks wrong in a run, the worst first, and what to try"),
    "replay": ("replay", "repeat a finished run in the order of its events, to the same bits"),
}
_USAGE = "usage: grpo COMMAND ...    (grpo COMMAND --help says more)\n\n" + "".join(
    f"  {name:<10}{what}\n" for name, (_, what) in _COMMANDS.items()
)


def main() -> int:
    """Run the command that the first argument names, with the other arguments."""
    name, arguments = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if name not in _COMMANDS:
        wrong = name not in ("", "-h", "--help")
        problem = f"error: no command {name}\n\n" if wrong else ""
        (sys.stderr if wrong else sys.stdout).write(problem + _USAGE)
        return 2 if wrong else 0
    module = importlib.import_module(f"grpo_tools.{_COMMANDS[name][0]}.__main__")
    try:
        code = module.main(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # as `| head` ends: Python would flush what is left, and fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
