"""The reward for code: the response's program against unit tests, in the sandbox."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

from grpo_components.rollout.code_sandbox import CodeSandbox, Limits
from grpo_components.rollout.sandboxed.asserts import ASSERTS, PROGRAM

_RUN_ASSERTS = Path(__file__).parent / "sandboxed" / "asserts.py"
_FENCED = re.compile(r"^```(?:python3?|py)?[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)


class CodeTests:
    """1 if the program in the last fenced block of the response passes all its tests, else 0.

    The tests are the data set's `answer`, JSON of one of two forms:
    `{"stdin_stdout": [{"input": "3\\n", "output": "9\\n"}]}` runs the program once for each input
    and compares what it prints, line by line, without the blanks at the ends of lines;
    `{"asserts": ["assert square(3) == 9"]}` runs Python statements that call the program's
    functions and classes. The program never sees what is expected of it.

    Args:
        cpu_s: seconds of CPU time for each run of the program.
        wall_s: seconds for all tests of a response together; below `timeouts.reward_s`.
        memory_mib: of each run.

    Raises:
        ValueError: a setting is out of range, or this machine cannot contain programs.
    """

    max_reward = 1.0

    def __init__(self, cpu_s: int = 2, wall_s: float = 8.0, memory_mib: int = 512) -> None:
        limits = Limits(cpu_s=cpu_s, wall_s=wall_s, memory_mib=memory_mib)
        self.wall_s = wall_s
        self._sandbox = CodeSandbox(limits)
        self._run_asserts = _RUN_ASSERTS.read_text()

    def __call__(
        self, *, prompt_text: str, response_text: str, answer: str, finish_reason: str
    ) -> float:
        """Score one response.

        Args:
            prompt_text: not used.
            response_text: searched for the last fenced block of Python.
            answer: the tests.
            finish_reason: not used.

        Raises:
            ValueError: if the answer holds no tests.
            SandboxError: if the program could not be started.
        """
        tests = _read_tests(answer)
        programs = _FENCED.findall(response_text)
        if not programs:
            return 0.0
        if "asserts" in tests:
            return float(self._holds(programs[-1], tests["asserts"]))
        return float(self._prints(programs[-1], tests["stdin_stdout"]))

    def _holds(self, program: str, asserts: list[str]) -> bool:
        outcome = self._sandbox.run_connected(
            self._run_asserts,
            {ASSERTS: "\n".join(asserts)},
            self._run_asserts,
            {PROGRAM: program},
        )
        return outcome.status == 0

    def _prints(self, program: str, cases: list[dict[str, str]]) -> bool:
        deadline = time.monotonic() + self.wall_s
        for case in cases:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            outcome = self._sandbox.run(program, case["input"], wall_s=left_s)
            if outcome.status != 0 or _lines(outcome.stdout) != _lines(case["output"]):
                return False
        return True


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _read_tests(answer: str) -> dict[str, Any]:
    try:
        tests = json.loads(answer)
        (kind, cases), *more = tests.items()
        fits = {
            "asserts": lambda case: isinstance(case, str),
            "stdin_stdout": lambda case: all(isinstance(case[k], str) for k in ("input", "output")),
        }[kind]
        known = not more and isinstance(cases, list) and cases and all(map(fits, cases))
    except (ValueError, TypeError, AttributeError, KeyError):
        known = False
    if not known:
        raise ValueError(
            f"answer: {answer[:60]!r} given; allowed: JSON with a list, not empty, of asserts, or "
            'of {"input", "output"} under stdin_stdout'
        )
    return tests
