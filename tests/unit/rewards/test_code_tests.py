"""The reward for code: the program in a response, its output, limits and processes."""

import contextlib
import gc
import json
import time

import psutil
import pytest

from grpo_components.rewards.code_tests import CodeTests, last_program
from grpo_components.rewards.pool import RewardPool, RewardSpec
from grpo_components.rewards.sandbox.code_sandbox import CodeSandbox, Outcome

SQUARE = ["assert square(3) == 9", "assert square(-4) == 16"]
SQUARES = [{"input": "3\n", "output": "9\n"}, {"input": "-4", "output": "16"}]


@pytest.fixture(scope="module")
def reward():
    return CodeTests(cpu_s=1, wall_s=30.0, memory_mib=256)


def scored(reward, response, **tests):
    answer = json.dumps(tests)
    return reward(prompt_text="?", response_text=response, answer=answer, finish_reason="stop")


def fenced(program):
    return f"I think of it like this.\n```python\n{program}\n```\nThat is all."


@pytest.mark.parametrize(
    ("program", "worth"),
    [
        ("print(int(input()) ** 2)", 1.0),
        ("import sys\nsys.stdout.write(f'{int(sys.stdin.read()) ** 2}  \\n\\n')", 1.0),
        ("import os\nos.write(1, b'%d \\r\\n' % int(input()) ** 2)", 1.0),
        ("print(int(input()) ** 2)\nexit()", 1.0),
        ("print(int(input()) ** 2)\nquit(0)", 1.0),
        ("print(int(input()) ** 2)\nexit(1)", 0.0),
        ("print(int(open('/dev/stdin').read()) ** 2)", 1.0),
        ("assert len(str(10**5000)) == 5001\nprint(int(input()) ** 2)", 1.0),
        ("print(9)", 0.0),
        ("print(int(input()) ** 2, end=' .')", 0.0),
        ("print(int(input()) ** 2)\nraise SystemExit(1)", 0.0),
        ("import sys\nprint(int(input()) ** 2, file=sys.stderr)", 0.0),
        ("import sys\nsys.exit(str(int(input()) ** 2))", 0.0),
        ("import os\nos.close(1)", 0.0),
        ("while True: print(9)", 0.0),
        ("print(open('/main.py').read(), open('/asserts.py').read())", 0.0),
    ],
)
def test_the_output_is_compared_for_every_input(reward, program, worth):
    assert scored(reward, fenced(program), stdin_stdout=SQUARES) == worth


def test_only_a_line_end_ends_a_line(reward):
    case = {"input": "", "output": "a\nb\n"}
    assert scored(reward, fenced(r"print('a\nb')"), stdin_stdout=[case]) == 1.0
    assert scored(reward, fenced(r"print('a\x0cb')"), stdin_stdout=[case]) == 0.0


PROGRAM = "def square(x): return x * x"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        (f"```python\n{PROGRAM}\n```", PROGRAM),
        (f"```\n{PROGRAM}\n```", PROGRAM),
        (f"```py\npass\n```\nNo:\n```py\n{PROGRAM}\n```", PROGRAM),
        (f"```py\n{PROGRAM}\n```\nNo:\n```py\npass\n```", "pass"),
        (
            "```python\r\ndef square(x):\r\n    return x * x\r\n```\r\n",
            "def square(x):\r\n    return x * x\r",
        ),
        (
            "1. So:\n   ```python\n   def square(x):\n       return x * x\n   ```",
            "def square(x):\n    return x * x",
        ),
        (f"~~~Python3\n{PROGRAM}\n~~~~", PROGRAM),
        (f'````PYTHON title="a.py"\n{PROGRAM}\n````', PROGRAM),
        (f"```{{.python}}\n{PROGRAM}\n```", PROGRAM),
        (
            "```python\ndef square(x):\n  '''\n  ```\n  '''\n  return x * x\n```",
            "def square(x):\n  '''\n  ```\n  '''\n  return x * x",
        ),
        (f"```bash\nls\n```\nSo:\n```python\n{PROGRAM}\n```", PROGRAM),
        (f"```python\n{PROGRAM}\n```\nRun:\n```bash\nls\n```", PROGRAM),
        (f"```python\n{PROGRAM}\n```\nIt prints\n```\n9\n```", PROGRAM),
        (f"```python\n{PROGRAM}\n```\nIt prints\n```pycon\n9\n```", PROGRAM),
        (f"```\nno\n```\n```\n{PROGRAM}\n```", PROGRAM),
        (f"```py\n{PROGRAM}\n```\n```py\npass", PROGRAM),
        ("```python\n```", ""),
        (PROGRAM, None),
        (f"```python\n{PROGRAM}", None),
        ("```rust\nfn square() {}\n```", None),
        ("", None),
    ],
)
def test_the_last_complete_block_of_python_is_the_program(response, program):
    assert last_program(response) == program


def test_a_response_without_a_program_is_worth_nothing(reward):
    assert scored(reward, "", asserts=SQUARE) == scored(reward, PROGRAM, asserts=SQUARE) == 0.0
    windows = fenced("def square(x):\n    return x * x").replace("\n", "\r\n")
    assert scored(reward, windows, asserts=SQUARE) == 1.0


@pytest.mark.parametrize("end", ["", "`", "\n", "\n```", "x"])
@pytest.mark.parametrize(
    "piece",
    ["~", "`", " ", "\t", "```\n", "~~~\n", "```py ", " ```py\n", "~`", "py", "1", "~~~py\n~~\n"],
)
def test_a_long_response_is_searched_in_linear_time(piece, end):
    """A quadratic search would take minutes."""
    response = (piece * 200_000)[:200_000] + end
    for text in (response, f"```py{response}"):
        assert PROGRAM not in (last_program(text) or "")


def test_a_block_with_a_fence_of_any_length_is_found():
    for fence, closing in (("~" * 9999, "~" * 10_000), ("`" * 9999, "`" * 9999)):
        block = f"{fence}python\n{PROGRAM}\n"
        assert last_program(block + fence[1:]) is None
        assert last_program(block + closing) == PROGRAM


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "9",
        '{"asserts": []}',
        '{"asserts": "assert True"}',
        '{"stdin_stdout": [{"input": "1"}]}',
        '{"asserts": ["assert True"], "stdin_stdout": []}',
        '{"doctests": ["x"]}',
        '{"asserts": ["assert f()"], "test_imports": "import math"}',
        '{"asserts": ["assert f()"], "test_setup_code": ["x = 1"]}',
    ],
)
def test_an_answer_without_tests_is_an_error(reward, answer):
    with pytest.raises(ValueError, match=r"^answer: "):
        reward(prompt_text="", response_text="", answer=answer, finish_reason="stop")


def test_all_tests_of_a_response_share_one_deadline_and_one_start(monkeypatch):
    limits, starts = [], []

    @contextlib.contextmanager
    def opened(self, program, used_s=0.0):
        def run(stdin="", wall_s=None):
            limits.append(wall_s)
            return Outcome(0, "9\n" if stdin else "contained", "", False)

        starts.append(program)
        yield run

    monkeypatch.setattr(CodeSandbox, "opened", opened)
    cases = [SQUARES[0]] * 5
    assert scored(CodeTests(wall_s=30.0), fenced("pass"), stdin_stdout=cases) == 1.0
    assert starts[1:] == ["pass"]
    _, *limits = limits  # without the trial program
    assert limits == sorted(set(limits), reverse=True) and 0 < limits[-1] < limits[0] <= 30.0
    with pytest.raises(TimeoutError):  # the machine may be to blame: a failed sample
        scored(CodeTests(wall_s=1e-9), fenced("pass"), stdin_stdout=cases)


def test_the_start_of_a_sandbox_is_not_charged_to_the_program(monkeypatch):
    """A start that takes longer than all tests may."""
    start = CodeSandbox._start

    def slowly(*args):
        time.sleep(2.5)
        return start(*args)

    reward = CodeTests(wall_s=2.0)
    monkeypatch.setattr(CodeSandbox, "_start", slowly)
    assert scored(reward, fenced("print(int(input()) ** 2)"), stdin_stdout=SQUARES) == 1.0


def test_a_program_that_hangs_is_worth_nothing_and_one_of_many_slow_tests_a_failed_sample():
    reward = CodeTests(wall_s=3.0)
    assert scored(reward, fenced("import time\ntime.sleep(60)"), stdin_stdout=SQUARES) == 0.0
    slow = fenced("import time\ntime.sleep(0.7)\nprint(9)")
    with pytest.raises(TimeoutError):
        scored(reward, slow, stdin_stdout=[SQUARES[0]] * 50)
    wrong = fenced("print(8)")
    assert scored(reward, wrong, stdin_stdout=[SQUARES[0]] * 50) == 0.0


@pytest.mark.parametrize(
    ("expected", "printed", "worth"),
    [
        ("0.333333333333", "0.333333", 1.0),
        ("Case #1: [0.333333, 2]", "Case #1: [0.3333333333333333, 2]", 1.0),
        ("123456789.0", "123456700", 1.0),
        ("2", "2.0", 1.0),
        ("0.00001", "1e-05", 1.0),
        ("0.0", "-0.0", 1.0),
        ("0.333333", "0.34", 0.0),
        ("2", "2.0000001", 0.0),
        ("1000000001", "1000000000", 0.0),
        ("007", "7", 0.0),
        ("7", "007", 0.0),
        ("0.5", "nan", 0.0),
        ("0.5", "1e9999", 0.0),
        ("1.2.3", "1.2.30", 0.0),
        ("0.5 0.5", "0.5  0.5", 0.0),
        ("0.5 0.5", "0.5", 0.0),
    ],
)
def test_a_float_may_differ_within_the_tolerance_and_all_else_not_at_all(
    reward, expected, printed, worth
):
    case = {"input": "", "output": expected}
    assert scored(reward, fenced(f"print({printed!r})"), stdin_stdout=[case]) == worth
    if expected != printed:
        exact = CodeTests(float_tolerance=0)
        assert scored(exact, fenced(f"print({printed!r})"), stdin_stdout=[case]) == 0.0


@pytest.mark.parametrize("tolerance", [-1, 1, "1e-6"])
def test_a_tolerance_out_of_range_is_refused(tolerance):
    with pytest.raises(ValueError, match=r"^float_tolerance: "):
        CodeTests(float_tolerance=tolerance)


def test_programs_are_scored_in_the_reward_processes_which_close_while_one_sleeps():
    component = "grpo_components.rewards.code_tests.CodeTests"
    spec = RewardSpec(component, {"wall_s": 50.0, "cpu_s": 1}, 1.0, True)
    answer = json.dumps({"asserts": SQUARE})
    row = {"prompt_text": "", "answer": answer, "finish_reason": "stop"}
    with contextlib.closing(RewardPool({"code": spec}, num_workers=2, timeout_s=60)) as pool:
        programs = [PROGRAM, "import os\nos._exit(0)", "while True: pass"]
        scores = pool.score([{**row, "response_text": fenced(each)} for each in programs])
        found = [(score.reward, score.success, score.error) for score in scores]
        assert found == [(1.0, True, None), *[(0.0, False, None)] * 2]
        asleep = pool.begin({**row, "response_text": fenced("import time\ntime.sleep(600)")})
    assert asleep.cancelled() or asleep.result().error == "reward code: its process died"


def test_no_descriptor_is_left_open(reward):
    gc.collect()  # what other tests have dropped may hold some
    before = psutil.Process().num_fds()
    for tests in ({"asserts": SQUARE}, {"stdin_stdout": SQUARES}):
        scored(reward, fenced("def square(x): return 9\nprint(9)"), **tests)
    assert psutil.Process().num_fds() == before
