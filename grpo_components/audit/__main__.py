"""The audit of a run's receipts, offline: `python -m grpo_components.audit OUTPUT_DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_components.audit.attempts import Attempts
from grpo_components.audit.beside import rules_beside
from grpo_components.audit.chain import Chain
from grpo_components.audit.findings import RULES, Broken, Report
from grpo_components.audit.lines import UnreadableError, lines_of, parse
from grpo_components.audit.one_run import check_one_run
from grpo_components.plain_text import one_line


def audit(path: Path, unfinished: bool = False) -> tuple[Report, str]:
    """Check a file of receipts, streaming, and against the other files in its folder.

    Args:
        path: of receipts.jsonl.
        unfinished: a run without its end record (killed, or still running) is no violation.

    Returns:
        The report, and one line about the run.

    Raises:
        OSError: if there is no record, or the file cannot be read.
    """
    if not path.is_file() or not path.stat().st_size:
        raise FileNotFoundError(path)
    report = Report()
    chain = Chain(path, report)  # first: of a run that still writes it is the older of the two
    starts = _starts(path)
    beside = rules_beside(path.parent, [attempt for attempt, _ in starts], report)
    following = Attempts(path.name, [step for _, step in starts], chain, beside, report)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(lines_of(file), start=1):
                if unfinished and not line.endswith(b"\n"):
                    break  # torn while it was written
                following.follow(line, number)
        following.finish(unfinished)
    except Broken:
        pass
    report.where = str(path.parent)
    check_one_run(path, report.check)
    return report, following.summary()


def _starts(path: Path) -> list[tuple[int, int]]:
    """Attempt and steps done of each start record; what cannot be read is found later."""
    found: list[tuple[int, int]] = []
    with path.open("rb") as file:
        for line in lines_of(file):
            if line.startswith(b'{"record": "start"'):
                try:
                    record = parse(line)
                except UnreadableError:
                    continue
                values = (record.get("attempt"), record.get("steps_done"))
                if all(type(value) is int for value in values):
                    found.append(values)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of rules.

    Returns:
        The exit code: 0 where all rules hold, 1 where one is broken, 2 without receipts.
    """
    parser = argparse.ArgumentParser(prog="python -m grpo_components.audit", description=__doc__)
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="of the run")
    parser.add_argument(
        "--unfinished", action="store_true", help="the run was killed or is still running"
    )
    options = parser.parse_args(arguments)
    path = options.output_dir / "receipts.jsonl"
    try:
        report, summary = audit(path, options.unfinished)
    except OSError:
        sys.stderr.write(f"no receipts in {one_line(str(path))}\n")
        return 2
    sys.stdout.write(report.table() + summary)
    sys.stdout.writelines(f"note: {note}\n" for note in report.notes)
    if report.broken:
        rule = next(iter(report.broken))
        sys.stdout.write(f"broken: {rule} ({RULES[rule]}): {report.broken[rule]}\n")
        return 1
    sys.stdout.write("every rule holds\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
