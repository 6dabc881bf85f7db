"""The reward for code: the program in a response, its output, limits and processes."""

import contextlib
import gc
import json
import time

import psutil
import pytest
from lib.rewards import fenced, scored

from grpo_components.rewards.code_tests import CodeTests, last_program
from grpo_components.rewards.pool import RewardPool, RewardSpec
from grpo_components.rewards.sandbox.code_sandbox import CodeSandbox, Outcome

SQUARE = ["assert square(3) == 9", "assert square(-4) == 16"]
SQUARES = [{"input": "3\n", "output": "9\n"}, {"input": "-4", "output": "16"}]


@pytest.fixture(scope="module")
def reward():
    return CodeTests(cpu_s=1, wall_s=30.0, memory_mib=256)


PRINTS = "print(int(input()) ** 2)"
RIGHT = [PRINTS, f"{PRINTS}\nexit()", f"{PRINTS}\nquit(0)"]
RIGHT += ["import sys\nsys.stdout.write(f'{int(sys.stdin.read()) ** 2}  \\n\\n')"]
RIGHT += ["import os\nos.write(1, b'%d \\r\\n' % int(input()) ** 2)"]
RIGHT += ["print(int(open('/dev/stdin').read()) ** 2)"]
RIGHT += [f"assert len(str(10**5000)) == 5001\n{PRINTS}"]
WRONG = ["print(9)", f"{PRINTS}\nexit(1)", f"{PRINTS}\nraise SystemExit(1)", "while True: print(9)"]
WRONG += ["print(int(input()) ** 2, end=' .')", "import os\nos.close(1)"]
WRONG += ["import sys\nprint(int(input()) ** 2, file=sys.stderr)"]
WRONG += ["import sys\nsys.exit(str(int(input()) ** 2))"]
WRONG += ["print(open('/main.py').read(), open('/asserts.py').read())"]


@pytest.mark.parametrize(
    ("program", "worth"), [*((each, 1.0) for each in RIGHT), *((each, 0.0) for each in WRONG)]
)
def test_the_output_is_compared_for_every_input(reward, program, worth):
    assert scored(reward, fenced(program), stdin_stdout=SQUARES) == worth


PROGRAM = "def square(x): return x * x"

BLOCK = f"```python\n{PROGRAM}\n```"
WITH_PROGRAM = [BLOCK, f"```\n{PROGRAM}\n```", f"```py\npass\n```\nNo:\n```py\n{PROGRAM}\n```"]
WITH_PROGRAM += [f"~~~Python3\n{PROGRAM}\n~~~~", f'````PYTHON title="a.py"\n{PROGRAM}\n````']
WITH_PROGRAM += [f"```{{.python}}\n{PROGRAM}\n```", f"```bash\nls\n```\nSo:\n{BLOCK}"]
WITH_PROGRAM += [f"{BLOCK}\nRun:\n```bash\nls\n```", f"{BLOCK}\nIt prints\n```\n9\n```"]
WITH_PROGRAM += [f"{BLOCK}\nIt prints\n```pycon\n9\n```", f"```\nno\n```\n```\n{PROGRAM}\n```"]
WITH_PROGRAM += [f"```py\n{PROGRAM}\n```\n```py\npass"]
WITHOUT_PROGRAM = [PROGRAM, f"```python\n{PROGRAM}", "```rust\nfn square() {}\n```", ""]
LINES = "def square(x):\n    return x * x"
QUOTED = "def square(x):\n  '''\n  ```\n  '''\n  return x * x"
OTHERS = {
    f"{BLOCK}\nNo:\n```py\npass\n```": "pass",
    "```python\r\ndef square(x):\r\n    return x * x\r\n```\r\n": LINES.replace("\n", "\r\n")
    + "\r",
    "1. So:\n   ```python\n   def square(x):\n       return x * x\n   ```": LINES,
    f"```python\n{QUOTED}\n```": QUOTED,
    "```python\n```": "",
}


def test_the_last_complete_block_of_python_is_the_program():
    programs = dict.fromkeys(WITH_PROGRAM, PROGRAM) | dict.fromkeys(WITHOUT_PROGRAM) | OTHERS
    assert {response: last_program(response) for response in programs} == programs


def test_a_response_without_a_program_is_worth_nothing(reward):
    assert scored(reward, "", asserts=SQUARE) == scored(reward, PROGRAM, asserts=SQUARE) == 0.0
    windows = fenced("def square(x):\n    return x * x").replace("\n", "\r\n")
    assert scored(reward, windows, asserts=SQUARE) == 1.0


@pytest.mark.parametrize("end", ["", "`", "\n", "\n```", "x"])
@pytest.mark.parametrize(
    "piece", [*"~` \t1", *["```\n", "~~~\n", "```py ", " ```py\n", "~`", "py", "~~~py\n~~\n"]]
)
def test_a_long_response_is_searched_in_linear_time(piece, end):
    """A quadratic search would take minutes."""
    response = (piece * 200_000)[:200_000] + end
    for text in (response, f"```py{response}"):
        assert PROGRAM not in (last_program(text) or "")


NO_TESTS = ["", "9", '{"asserts": []}', '{"asserts": "assert True"}', '{"doctests": ["x"]}']
NO_TESTS += ['{"stdin_stdout": [{"input": "1"}]}']
NO_TESTS += ['{"asserts": ["assert f()"], "test_setup_code": ["x = 1"]}']


@pytest.mark.parametrize("answer", NO_TESTS)
def test_an_answer_without_tests_is_an_error(reward, answer):
    with pytest.raises(ValueError, match=r"^answer: "):
        reward(prompt_text="", response_text="", answer=answer, finish_reason="stop")


def test_all_tests_of_a_response_share_one_deadline_and_one_start(monkeypatch):
    limits, starts = [], []

    @contextlib.contextmanager
    def opened(self, program):
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
    assert scored(reward, fenced(PRINTS), stdin_stdout=SQUARES) == 1.0


def test_a_program_that_hangs_is_worth_nothing_and_one_of_many_slow_tests_a_failed_sample():
    reward = CodeTests(wall_s=3.0)
    assert scored(reward, fenced("import time\ntime.sleep(60)"), stdin_stdout=SQUARES) == 0.0
    slow = fenced("import time\ntime.sleep(0.7)\nprint(9)")
    with pytest.raises(TimeoutError):
        scored(reward, slow, stdin_stdout=[SQUARES[0]] * 50)
    wrong = fenced("print(8)")
    assert scored(reward, wrong, stdin_stdout=[SQUARES[0]] * 50) == 0.0


NEAR = [("0.333333333333", "0.333333"), ("123456789.0", "123456700"), ("2", "2.0")]
NEAR += [("Case #1: [0.333333, 2]", "Case #1: [0.3333333333333333, 2]")]
NEAR += [("0.00001", "1e-05"), ("0.0", "-0.0")]
FAR = [("0.333333", "0.34"), ("2", "2.0000001"), ("1000000001", "1000000000"), ("007", "7")]
FAR += [("7", "007"), ("0.5", "nan"), ("0.5", "1e9999"), ("1.2.3", "1.2.30")]
FAR += [("0.5 0.5", "0.5  0.5"), ("0.5 0.5", "0.5")]


@pytest.mark.parametrize(("expected", "printed"), [*NEAR, *FAR])
def test_a_float_may_differ_within_the_tolerance_and_all_else_not_at_all(reward, expected, printed):
    case, exact = {"input": "", "output": expected}, CodeTests(float_tolerance=0)
    found = [
        scored(each, fenced(f"print({printed!r})"), stdin_stdout=[case]) for each in (reward, exact)
    ]
    assert found == [float((expected, printed) in NEAR), 0.0]


def test_programs_are_scored_in_the_reward_processes_which_close_while_one_sleeps():
    component = "grpo_components.rewards.code_tests.CodeTests"
    spec = RewardSpec(component, {"wall_s": 50.0, "cpu_s": 1}, 1.0, True)
    answer = json.dumps({"asserts": SQUARE})
    row = {"prompt_text": "", "answer": answer, "finish_reason": "stop"}
    with contextlib.closing(RewardPool({"code": spec}, num_workers=2, timeout_s=60)) as pool:
        programs = [PROGRAM, "import os\nos._exit(0)", "while True: pass"]
        scores = pool([{**row, "response_text": fenced(each)} for each in programs])
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
