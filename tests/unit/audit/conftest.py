"""Makes a valid run's events, and audits changed ones."""

from typing import NamedTuple

import pytest

from grpo_tools.audit.__main__ import main


class Audited(NamedTuple):
    code: int
    broken: dict[str, str]
    """Broken rule -> its line of the table."""
    out: str


@pytest.fixture
def events(tmp_path, write_run):
    """The events of a valid run of six steps."""
    return write_run(tmp_path / "receipts.jsonl")


@pytest.fixture
def audit(tmp_path, capsys, write_receipts):
    """Audits events with a valid chain, by default alone: without a run's other files."""

    def audit(events, *options, folder="alone"):
        write_receipts(tmp_path / folder, events)
        code = main([str(tmp_path / folder), *options])
        out = capsys.readouterr().out
        broken = {line.split()[0]: line for line in out.splitlines() if " BROKEN: " in line}
        return Audited(code, broken, out)

    return audit
