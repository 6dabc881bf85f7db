"""Shows the progress of a run: a live display in a terminal, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import errno
import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from grpo_components.plain_text import one_line
from grpo_components.terminal import leave_terminal

REFRESHES_PER_SECOND = 4
STEPS_FOR_ETA = 20
EVERY_STEP_UNTIL = 5
THEN_EVERY_N_STEPS = 10
_MACHINERY = (
    "staleness {staleness} (max {stalest})",
    "buffer {buffer}",
    "tokens/s {generated} generated, {trained} trained",
)


class Progress:
    """Shows phases, steps and notes of a run on stdout."""

    def __init__(self, num_steps: int, console: Console | None = None, *, plain: bool = False):
        # With FORCE_COLOR, rich takes a pipe for a terminal: fine for colours, not for a display.
        is_terminal = console.is_terminal if console else sys.stdout.isatty()
        self._console = console or Console(highlight=False)
        self._num_steps = num_steps
        self._step = 0
        self._metrics: Mapping[str, float] = {}
        self._held_out = math.nan
        self._step_ends: deque[float] = deque(maxlen=STEPS_FOR_ETA + 1)
        self._started = self._console.get_time()
        self._phase = ""
        self._phase_started = self._started
        self._spinner = Spinner("line", style="cyan")
        self._live: Live | None = None
        if is_terminal and self._console.is_interactive and not plain:
            self._live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=REFRESHES_PER_SECOND,
                # If stderr goes to a file, it must still arrive there.
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()

    def phase(self, text: str) -> None:
        """Show what the run is doing until the next step or phase."""
        self._phase, self._phase_started = text, self._console.get_time()
        if self._live is None:
            self._print(Text(f"{text} ..."))

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step's metrics; outside a terminal, print a line for some steps only."""
        self._phase = ""
        self._step, self._metrics = step, metrics
        self._held_out = metrics.get("eval/success_rate", self._held_out)
        self._step_ends.append(self._console.get_time())
        is_due = step <= EVERY_STEP_UNTIL or step % THEN_EVERY_N_STEPS == 0
        if self._live is None and step > 0 and (is_due or step == self._num_steps):
            self._print(Text(self._plain_line()))

    def note(self, text: str) -> None:
        """Print a line above the display, such as an evaluation's result."""
        self._print(Text(one_line(text)))

    def close(self) -> None:
        """End the live display; its last state stays on the screen."""
        live, self._live = self._live, None
        if live is not None:
            with _without_terminal():
                live.stop()

    def summary(self, rows: Sequence[tuple[str, str]]) -> None:
        """End the display and print the run's closing table, with (label, value) in each row."""
        self.close()
        width = max((len(label) for label, _ in rows), default=0)
        self._print(Text())
        for label, value in rows:
            first, *others = value.splitlines() or [""]
            self._print(Text.assemble((f"{label:<{width}}", "bold"), "  ", first))
            for line in others:
                self._print(Text(" " * (width + 2) + line))

    def _print(self, text: Text) -> None:
        with _without_terminal():
            # soft_wrap keeps a long path in one piece, and one line per step in a log file.
            self._console.print(text, soft_wrap=True)

    def _seconds_left(self) -> float:
        if len(self._step_ends) < 2:
            return math.nan
        per_step = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
        since_last_step = self._console.get_time() - self._step_ends[-1]
        return max(0.0, (self._num_steps - self._step) * per_step - since_last_step)

    def _fields(self) -> dict[str, str]:
        tokens = "throughput/{}_tokens_per_second"
        shown = {
            "reward": ("rollout/reward_mean", ".2f"),
            "success": ("rollout/success_rate", ".2f"),
            "staleness": ("staleness/mean", ".1f"),
            "stalest": ("staleness/max", ".0f"),
            "buffer": ("buffer/size", ".0f"),
            "generated": (tokens.format("generated"), ",.0f"),
            "trained": (tokens.format("trained"), ",.0f"),
        }
        fields = {
            name: _number(self._metrics.get(key), spec) for name, (key, spec) in shown.items()
        }
        held_out, left = _number(self._held_out, ".2f"), _duration(self._seconds_left())
        return {**fields, "held-out": held_out, "left": left}

    def _plain_line(self) -> str:
        width = len(str(self._num_steps))
        return (
            f"step {self._step:>{width}}/{self._num_steps}"
            f"  reward {{reward}}  success {{success}}  {'  '.join(_MACHINERY)}  ETA {{left}}"
        ).format(**self._fields())

    def _render(self) -> RenderableType:
        lines: list[RenderableType] = []
        if self._step_ends:
            fields, seconds = self._fields(), self._console.get_time() - self._started
            bar = Table.grid(padding=(0, 2), expand=True)
            for ratio in (None, 1, None, None):
                bar.add_column(ratio=ratio, no_wrap=True)
            bar.add_row(
                Text(f"step {self._step}/{self._num_steps}", style="bold"),
                ProgressBar(total=self._num_steps, completed=self._step),
                f"elapsed {_duration(seconds)}",
                f"ETA {fields['left']}",
            )
            learning = "reward {reward}   success {success}   held-out {held-out}".format(**fields)
            machinery = "   ".join(_MACHINERY).format(**fields)
            lines += [bar, Text(learning, no_wrap=True, overflow="crop")]
            lines += [Text(machinery, style="dim", no_wrap=True, overflow="crop")]
        if self._phase:
            elapsed = _duration(self._console.get_time() - self._phase_started)
            self._spinner.update(text=Text(f"{self._phase} ({elapsed})"))
            lines.append(self._spinner)
        return Group(*lines)


@contextlib.contextmanager
def _without_terminal() -> Iterator[None]:
    """Context manager: if the terminal was closed, detach from it, so that the run continues."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        leave_terminal()


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, spec)


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
