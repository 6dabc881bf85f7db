"""The staleness atlas: which objective tolerates which staleness, at which learning rate.

    make atlas

225 short runs of the tiny job: 5 objectives, 5 bounds of the staleness, 3 learning rates, 3 seeds,
each with its audit. A run that is done is never made again: end the command at any moment, and call
it again to go on. After each run it writes docs/staleness.md, and all results beside it as a CSV
file, from which a clone of the repository goes on.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from staleness_lines import ORDER, Cell, Line, append, read, text_of
from staleness_page import page
from staleness_runs import Interrupted, NoResultError, preload, run

from grpo_components.whole_files import write_whole

DEFAULT_OUTPUT = Path("docs/staleness.md")
DEFAULT_FOLDER = Path(tempfile.gettempdir()) / "torchtune-async-grpo" / "atlas"
_LOCK_S = 60.0
"""A run whose command was killed ends within this time, and holds the lock until then."""


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder: it is passed on to the run, and free once both have ended."""
    with (folder / "lock").open("w") as lock:
        end = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise ValueError(f"another atlas is at work in {folder}") from None
                time.sleep(0.5)
        yield


def results(folder: Path, output: Path) -> dict[Cell, Line]:
    """Return all results that there are: those beside the page, and those of the folder."""
    return read(folder / "runs.csv") | read(output.with_suffix(".csv"))


def write(output: Path, known: dict[Cell, Line]) -> None:
    """Write the page, and all results beside it."""
    lines = [known[cell] for cell in ORDER if cell in known]
    write_whole(output.with_suffix(".csv"), text_of(lines))
    write_whole(output, page(lines))


def go_on(
    make: Callable[[Cell, Path], Line],
    folder: Path,
    output: Path,
    limit: int,
    say: Callable[..., object],
) -> None:
    """Make the runs that have no result yet, in order, and write the page after each."""
    known = results(folder, output)
    write(output, known)
    for cell in [cell for cell in ORDER if cell not in known][:limit]:
        try:
            line = known[cell] = make(cell, folder / cell.folder)
        except NoResultError as error:
            say(f"{cell.folder}: no result, because {error}; the next call tries again\n")
            continue
        append(folder / "runs.csv", line)
        write(output, known)
        held_out = line.ended or f"held-out success {line.before} -> {line.after}"
        say(
            f"{len(known)}/{len(ORDER)} {cell.folder}: {held_out}, staleness {line.staleness}, "
            f"audit {line.audit or 'passed'}, {line.cpu_s:.0f} CPU s\n"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Go on with the atlas."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=len(ORDER), help="at most so many; 0: the page")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    given = parser.parse_args(arguments)
    folder = Path(os.path.abspath(given.folder))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if given.runs:
            with _alone(folder):
                preload()
                go_on(run, folder, given.output, given.runs, _say)
        else:
            write(given.output, results(folder, given.output))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except Interrupted as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
