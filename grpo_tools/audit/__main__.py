"""Audit a run's receipts offline: `grpo audit OUTPUT_DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

from yaml import YAMLError

from grpo_components.plain_text import one_line
from grpo_components.quiet import quiet_libraries
from grpo_tools.audit.cross_checks import check_one_run
from grpo_tools.audit.findings import RULES, FatalViolation, Findings
from grpo_tools.audit.run import RunAudit
from grpo_tools.report.run_files import DAMAGED

_DAMAGED = (*DAMAGED, OSError, YAMLError, BadZipFile)
"""What reading a damaged file can raise."""


def audit(path: Path, unfinished: bool = False) -> tuple[Findings, str]:
    """Check receipts.jsonl, a run's log of events, and compare it with the run's other files."""
    if not path.is_file() or not path.stat().st_size:
        raise FileNotFoundError(path)
    findings, run = Findings(), None
    try:
        run = RunAudit(path, findings)
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if unfinished and not line.endswith(b"\n"):
                    break  # incomplete: the run was killed, or is writing it now
                run.follow(line, number)
        run.finish(unfinished)
        findings.where = str(path.parent)
        check_one_run(path, findings.check)
    except FatalViolation:
        pass
    except _DAMAGED as error:
        problem = f"a file of the run is damaged: {type(error).__name__}: {error}"
        findings.check("one_run", False, problem)
    return findings, run.summary() if run else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit a run and print the outcome of every rule."""
    parser = argparse.ArgumentParser(
        prog="grpo audit", description=__doc__, epilog="example: grpo audit /tmp/run --unfinished"
    )
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="the run's output_dir")
    parser.add_argument(
        "--unfinished",
        action="store_true",
        help="accept a missing end record: the run was killed or is still running",
    )
    parser.add_argument(
        "--rescore",
        action="store_true",
        help="compute the logprob of every trained token again (needs save_every_n_steps: 1)",
    )
    options = parser.parse_args(arguments)
    path = options.output_dir / "receipts.jsonl"
    try:
        findings, summary = audit(path, options.unfinished)
    except OSError:
        sys.stderr.write(f"no receipts in {one_line(str(path))}\n")
        return 2
    sys.stdout.write(findings.table() + summary)
    if findings.broken:
        rule = next(iter(findings.broken))
        sys.stdout.write(f"broken: {rule} ({RULES[rule]}): {findings.broken[rule]}\n")
        return 1
    sys.stdout.write("every rule holds\n")
    return _rescore(options.output_dir) if options.rescore else 0


def _rescore(output_dir: Path) -> int:
    quiet_libraries("WARNING")
    # Torch and transformers take seconds to import.
    from grpo_tools.audit.rescore import CannotRescoreError, rescore

    try:
        result = rescore(output_dir)
    except CannotRescoreError as error:
        sys.stderr.write(f"cannot rescore: {one_line(str(error))}\n")
        return 2
    sys.stdout.write(result.table())
    sys.stdout.write(f"broken: rescore: {result.broken}\n" if result.broken else "all agree\n")
    return int(bool(result.broken))
