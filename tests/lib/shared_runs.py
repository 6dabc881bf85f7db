"""Whole runs that are made once per test session, and that many tests look at.

The first test that asks for a run makes it, in whichever worker; all others get what it left. If
the run fails, the test that made it fails with the run's log; the others are skipped.
"""

import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock


@dataclass(frozen=True)
class FinishedRun:
    """What a run left: look at it, and write nothing into it."""

    folder: Path
    output: str
    seen: dict[str, Any] = field(default_factory=dict)
    """What could be seen only while it ran."""


class SharedRuns:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def look(self, name: str, make: Callable[[Path], FinishedRun]):
        """Give a run to a test, which must leave it as it is."""
        run = self._run(name, make)
        before = _listing(run.folder)
        yield run
        assert _listing(run.folder) == before, f"a test changed the shared run {name}"

    def _run(self, name: str, make: Callable[[Path], FinishedRun]) -> FinishedRun:
        place = self.folder / name
        left = place / "finished_run.json"
        with FileLock(f"{place}.lock"):
            if not place.exists():
                place.mkdir(parents=True)
                run = make(place)
                left.write_text(json.dumps(asdict(run), default=str))
        if not left.exists():
            pytest.skip(f"the shared run {name!r} failed: the test that made it has its log")
        found = json.loads(left.read_text())
        return FinishedRun(Path(found["folder"]), found["output"], found["seen"])


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path in folder.rglob("*"):
        if not path.is_dir():
            state = path.lstat()
            found[str(path)] = state.st_size, state.st_mtime_ns
    return found


@pytest.fixture(scope="session")
def shared_runs(tmp_path_factory, worker_id):
    own = tmp_path_factory.getbasetemp()
    return SharedRuns((own if worker_id == "master" else own.parent) / "shared_runs")
