"""A live display in a terminal, plain lines elsewhere; the same numbers in both."""

import io
import math
import os
import pty
import re
import sys

import pytest
from rich.console import Console

from grpo_components.records.progress import Progress

METRICS = {
    "rollout/reward_mean": 0.514,
    "rollout/success_rate": 0.436,
    "staleness/mean": 1.25,
    "staleness/max": 2.0,
    "buffer/size": 6,
    "throughput/generated_tokens_per_second": 1234.5,
    "throughput/trained_tokens_per_second": 987.6,
}


class Shown:
    """A progress in a pipe or a terminal, and what it has shown."""

    def __init__(self, num_steps: int, width: int = 0, **options):
        self.now, terminal = 1000.0, {"force_terminal": True, "width": width, "_environ": {}}
        self._bytes = io.BytesIO()
        file = io.TextIOWrapper(self._bytes, encoding="utf-8", write_through=True)
        given = terminal if width else {"highlight": False}
        console = Console(file=file, get_time=lambda: self.now, **given)
        self.progress = Progress(num_steps, console, **options)
        self.update, self.phase = self.progress.update, self.progress.phase
        self.note, self.close = self.progress.note, self.progress.close

    @property
    def raw(self) -> str:
        return self._bytes.getvalue().decode()

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.raw).replace("\r", "")

    @property
    def display(self) -> list[str]:
        """The last lines of a live display."""
        return [line.rstrip() for line in self.text.rstrip().splitlines()[-3:]]


def test_a_pipe_gets_a_line_for_some_steps_and_the_last():
    shown = Shown(47)
    for step in range(48):
        shown.update(step, METRICS)
    steps = [int(number) for number in re.findall(r"^step +(\d+)/47 ", shown.text, re.M)]
    assert steps == [1, 2, 3, 4, 5, 10, 20, 30, 40, 47]


def test_a_plain_line_has_all_numbers_and_is_never_wrapped():
    shown = Shown(100)
    shown.update(0, {"eval/success_rate": 0.4})
    shown.now += 3
    shown.update(1, METRICS)
    assert shown.text == (
        "step   1/100  reward 0.51  success 0.44  staleness 1.2 (max 2)  buffer 6"
        "  tokens/s 1,234 generated, 988 trained  ETA 4:57\n"
    )


def test_a_pipe_sees_no_control_codes_even_with_forced_colours(monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", "1")
    progress = Progress(2)
    progress.phase("starting roles")
    progress.update(1, METRICS)
    progress.note("saved /somewhere")
    progress.close()
    out = capfd.readouterr().out
    assert "\x1b[?25l" not in out and "\x1b[2K" not in out, "no cursor movement"
    assert "starting roles ..." in out and "saved /somewhere" in out


def test_a_missing_or_nan_metric_is_a_dash():
    shown = Shown(3)
    shown.update(1, {"rollout/reward_mean": math.nan})
    assert "reward -  success -  staleness - (max -)  buffer -" in shown.text
    assert shown.text.endswith("ETA -\n")


@pytest.mark.parametrize(("seconds", "left"), [(0, "30:00"), (60, "29:00"), (3600 * 9, "0:00")])
def test_the_time_left_follows_the_recent_steps_and_counts_down(seconds, left):
    shown = Shown(1000, width=80)
    for step in range(101):
        shown.update(step, METRICS)
        shown.now += 10 if step < 50 else 2  # the slow first steps are forgotten
    shown.now += seconds - 2
    shown.close()
    assert shown.display[0].endswith(f"ETA {left}")


def test_a_terminal_shows_everything_within_its_width():
    shown = Shown(100, width=80)
    shown.phase("starting roles")
    for step in range(43):
        shown.update(step, METRICS | {"eval/success_rate": 0.5})
        shown.now += 1
    shown.note("step 25: held-out success 0.50")
    shown.close()
    bar, learning, machinery = shown.display
    assert bar.startswith("step 42/100") and bar.endswith("ETA 0:57")
    assert learning == "reward 0.51   success 0.44   held-out 0.50"
    assert machinery == "staleness 1.2 (max 2)   buffer 6   tokens/s 1,234 generated, 988 trained"
    assert "step 25: held-out success 0.50" in shown.text
    assert all(len(line) <= 80 for line in shown.text.splitlines())


@pytest.mark.parametrize("done", [False, True])
def test_the_live_display_shows_the_phase_until_the_next_step(done):
    shown = Shown(100, width=80)
    shown.phase("evaluating")
    shown.now += 61
    if done:
        shown.update(0, {})
    shown.close()  # draws it once more
    assert any("evaluating (1:01)" in line for line in shown.display) != done
    assert any("step 0/100" in line for line in shown.display) == done


def test_beside_a_logger_that_prints_a_terminal_gets_plain_lines():
    shown = Shown(10, width=80, plain=True)
    shown.phase("starting roles")
    shown.update(1, METRICS)
    shown.close()
    assert shown.text.splitlines()[0] == "starting roles ..."
    assert shown.text.count("\n") == 2 and "reward 0.51" in shown.text


@pytest.mark.parametrize("width", [0, 80])
def test_the_summary_comes_last_and_aligned(width):
    shown, path = Shown(10, width), "/a/long/path" * 12
    rows = [("reward", "0.4 -> 0.9"), ("checkpoint", path), ("next", "this\nthat"), ("", "")]
    shown.progress.summary(rows)
    aligned = f"reward      0.4 -> 0.9\ncheckpoint  {path}\nnext        this\n            that"
    assert shown.text.splitlines()[-5:-1] == aligned.splitlines()


@pytest.mark.parametrize("width", [0, 80])
def test_control_characters_in_a_note_are_escaped(width):
    shown = Shown(3, width)
    shown.note("reward: ValueError: 'a\x1b[2J\x1b]0;mine\x07\nb [bold]c[/bold]'")
    shown.close()
    assert "\x1b[2J" not in shown.raw and "\x1b]" not in shown.raw and "\x07" not in shown.raw
    whole = r"'a\x1b[2J\x1b]0;mine\x07 b [bold]c[/bold]'"
    assert whole in shown.raw, "all of it, and no markup"


def in_terminal(folder, code: str, first: str = "") -> tuple[int, int]:
    """Start a process with a `progress` in a terminal; its id, and the terminal's other end."""
    program = folder / "program.py"
    begin = "from grpo_components.records.progress import Progress\nprogress = Progress(3)\n"
    program.write_text(first + begin + code)
    pid, terminal_end = pty.fork()
    if pid == 0:
        os.chdir(folder)
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        environment.pop("NO_COLOR", None)
        os.execve(sys.executable, [sys.executable, str(program)], environment)
    return pid, terminal_end


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # Linux raises EIO when the other side is closed
        return b""


def test_in_a_real_terminal_the_cursor_comes_back_and_prints_are_kept(tmp_path):
    pid, terminal_end = in_terminal(
        tmp_path,
        "progress.phase('starting roles')\n"
        "for step in (1, 2, 3):\n"
        "    print(f'a stray print {step}')\n"
        "    progress.update(step, {'rollout/reward_mean': step / 3})\n"
        "progress.summary([('reward', '0.33 -> 1.00')])\n",
    )
    shown = b""
    while chunk := read(terminal_end):
        shown += chunk
    os.close(terminal_end)
    assert os.waitpid(pid, 0) == (pid, 0)
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l"), "the cursor is shown again"
    for expected in (b"a stray print 3", b"step 3/3", b"reward 1.00", b"0.33 -> 1.00"):
        assert expected in shown
    assert shown.rindex(b"0.33 -> 1.00") > shown.rindex(b"step 3/3")


def test_a_run_in_the_background_goes_on_after_its_terminal_was_closed(tmp_path):
    """A shell sends no signal to a job that it disowned; writing to the terminal then fails."""
    pid, terminal_end = in_terminal(
        tmp_path,
        "progress.note('running')\n"
        "signal.sigwait([signal.SIGHUP])\n"
        "for step in range(1, 4): progress.update(step, {})\n"
        "progress.note('one')\n"
        "progress.summary([('reward', '1.00')])\n"
        "open('done', 'w').close()\n",
        # Before the progress, whose thread would otherwise take the signal.
        first="import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])\n",
    )
    shown = b""
    while b"running" not in shown:
        shown += read(terminal_end)
    os.close(terminal_end)
    os.waitpid(pid, 0)
    assert (tmp_path / "done").exists()
