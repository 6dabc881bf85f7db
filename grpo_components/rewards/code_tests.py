"""Reward for code: runs the response's program against unit tests in the sandbox."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

from grpo_components.rewards.assert_names import Asserts, read_asserts
from grpo_components.rewards.maths import RESPONSE_CPU_S
from grpo_components.rewards.sandbox.code_sandbox import CodeSandbox, Limits
from grpo_components.rewards.sandbox.inside.asserts import ASSERTS, NAMES, PACKAGES, PROGRAM, UNFIT

_RUN_ASSERTS = Path(__file__).parent / "sandbox" / "inside" / "asserts.py"
# A closing fence has at least as many of the same characters, and is not indented further.
# Possessive quantifiers avoid quadratic time on a line of 40,000 fence characters.
_OPENING = re.compile(r"([ \t]*+)(`{3,}+|~{3,}+)([^`]*+)")
_SEPARATORS = re.compile(r"([^\w.+-]+)")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4})?", re.ASCII)
_INTEGER = re.compile(r"-?(?:0|[1-9]\d*)", re.ASCII)
_PYTHON = re.compile(r"\W*py(?:thon)?\d*(?!\w)", re.IGNORECASE)


class CodeTests:
    """1 if the program in the last fenced Python block passes all tests, else 0.

    A block without a language counts as Python if no block of the response is marked as Python.

    The data set's `answer` holds the tests as JSON, in one of two forms:
    `{"stdin_stdout": [{"input": "3\\n", "output": "9\\n"}]}` runs the program once per input and
    compares its output line by line, ignoring blanks at line ends. A float may differ from the
    expected one by `float_tolerance`.
    `{"asserts": ["assert square(3) == 9"]}` runs Python statements that use the program's functions
    and classes. Optional `test_imports` (a list of statements) and `test_setup_code` run first, as
    in MBPP. The program never sees the expected results.

    Either form may have a `solution`, a program that passes the tests: `perfect_response` gives it.

    Args:
        cpu_s: CPU seconds for each run of the program.
        wall_s: seconds for all tests of one response, without the sandbox's start; must be below
            `timeouts.reward_s`. If the time runs out, the score is 0 if the test then running
            began with at least half of it left; otherwise the sample fails.
        memory_mib: MiB of address space for each run.
        float_tolerance: largest error of a printed float, absolute or relative to the expected
            one, whichever allows more; 0 compares the text.

    Raises:
        ValueError: this machine cannot sandbox programs.
    """

    response_cpu_s = RESPONSE_CPU_S

    def __init__(
        self,
        cpu_s: int = 2,
        wall_s: float = 8.0,
        memory_mib: int = 512,
        float_tolerance: float = 1e-6,
    ) -> None:
        limits = Limits(cpu_s=cpu_s, wall_s=wall_s, memory_mib=memory_mib, file_mib=16)
        self.wall_s = wall_s
        self._tolerance = Decimal(float_tolerance)
        self._sandbox = CodeSandbox(limits)
        self._run_asserts = _RUN_ASSERTS.read_text()
        spec = importlib.util.find_spec("numpy")
        assert spec and spec.origin
        found = Path(spec.origin).parents[1]  # numpy.libs there has the wheel's libraries
        folders = [found / name for name in ("numpy", "numpy.libs")]
        self._packages = {f"{PACKAGES}/{f.name}": str(f) for f in folders if f.is_dir()}

    def __call__(self, *, response_text: str, answer: str, **_: Any) -> float:
        """Score one response."""
        tests = _read_tests(answer)
        program = last_program(response_text)
        if program is None:
            return 0.0
        if isinstance(tests, Asserts):
            return float(self._passes_asserts(program, tests))
        return float(self._prints_expected(program, tests))

    def perfect_response(self, *, answer: str) -> str | None:
        """Return the row's reference solution as a response; None if the row has none."""
        _read_tests(answer)
        solution = json.loads(answer).get("solution", "")
        in_block = f"~~~~~~python\n{solution}\n~~~~~~"
        return (solution if last_program(solution) else in_block) if solution else None

    def _passes_asserts(self, program: str, asserts: Asserts) -> bool:
        outcome = self._sandbox.run_connected(
            self._run_asserts,
            {ASSERTS: asserts.source, NAMES: json.dumps(asserts.program_names)},
            self._packages,
            {PROGRAM: program},
        )
        if outcome.status == UNFIT:
            problem = f"the asserts pass the program {outcome.stderr}"
            raise ValueError(f"answer: {problem}; allowed: plain data, and objects it returned")
        return outcome.status == 0

    def _prints_expected(self, program: str, cases: list[tuple[str, str]]) -> bool:
        with self._sandbox.opened(program) as run:
            deadline = time.monotonic() + self.wall_s  # the start is not charged
            for number, (given, expected) in enumerate(cases):
                left_s = deadline - time.monotonic()
                outcome = run(given, left_s) if left_s > 0 else None
                # A program that hangs is to blame; one that had little time is not.
                was_short = left_s < self.wall_s / 2
                if outcome is None or (
                    was_short and outcome.timed_out and time.monotonic() >= deadline
                ):
                    passed = f"{number} of {len(cases)} tests passed within {self.wall_s:g} s"
                    raise TimeoutError(f"{passed}; allowed: a longer wall_s")
                if outcome.status != 0 or not self._same(outcome.stdout, expected):
                    return False
        return True

    def _same(self, printed: str, expected: str) -> bool:
        lines, wanted = _lines(printed), _lines(expected)
        return len(lines) == len(wanted) and all(map(self._same_line, lines, wanted))

    def _same_line(self, line: str, wanted: str) -> bool:
        if line == wanted or not self._tolerance:
            return line == wanted
        tokens, expected = _SEPARATORS.split(line), _SEPARATORS.split(wanted)
        return len(tokens) == len(expected) and all(map(self._same_token, tokens, expected))

    def _same_token(self, token: str, wanted: str) -> bool:
        if token == wanted or not (_NUMBER.fullmatch(token) and _NUMBER.fullmatch(wanted)):
            return token == wanted
        if _INTEGER.fullmatch(wanted):  # `2.0` for `2`, but not `02`
            return not token.lstrip("+-").isdigit() and Decimal(token) == Decimal(wanted)
        if wanted.lstrip("+-").isdigit():  # `007` is no number
            return False
        right = Decimal(wanted)
        return abs(Decimal(token) - right) <= self._tolerance * max(1, abs(right))


def last_program(response: str) -> str | None:
    """Find the last complete fenced Python block, else the last one without a language."""
    programs: dict[bool, str] = {}
    lines = iter(response.split("\n"))
    for line in lines:
        opening = _OPENING.fullmatch(line.rstrip())
        if opening is None:
            continue
        indent, fence, language = opening.groups()
        closing = re.compile(rf"[ \t]{{0,{len(indent)}}}+{fence}{fence[0]}*+\s*+")
        block: list[str] = []
        for inside in lines:
            if closing.fullmatch(inside):
                says_python = bool(_PYTHON.match(language))
                if says_python or not language.strip():
                    programs[says_python] = "\n".join(block)
                break
            block.append(inside.removeprefix(indent))
    return programs.get(True, programs.get(False))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _read_tests(answer: str) -> Asserts | list[tuple[str, str]]:
    """Parse `answer` into asserts, or into cases with input and output."""
    asserts, cases = "", []
    try:
        tests = json.loads(answer)
        if "asserts" in tests:
            before = *tests.get("test_imports", ()), tests.get("test_setup_code", "")
            asserts = "\n".join([*before] + tests["asserts"])
        else:
            cases = [(case["input"], case["output"]) for case in tests["stdin_stdout"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    if not (asserts or cases):
        raise ValueError(
            f"answer: {answer[:60]!r} given; allowed: JSON with a non-empty list: texts under "
            'asserts, or {"input", "output"} under stdin_stdout'
        )
    return cases or read_asserts(asserts)
