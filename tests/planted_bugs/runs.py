"""Makes one run of the museum, and says which alarms it gave."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lib.chaos import RECIPE, TUNE

from planted_bugs.bugs import BUGS, PlantingError
from planted_bugs.exhibits import AT_START, AUDIT, SHORT, Exhibit

_TESTS = Path(__file__).resolve().parents[1]
_ALARM = re.compile(r"^(warning: |.*\bis skipped: |.*\bError\b|config error)", re.MULTILINE)
_TIMEOUT_S = 900


@dataclass(frozen=True)
class Outcome:
    code: int
    """Exit code of the run."""
    output: str
    """What it printed."""
    audit: str
    """The last line of the audit's output if a rule is broken; else empty."""
    rewards: tuple[float, ...]
    """Mean reward of each finished step."""

    @property
    def alarms(self) -> str:
        lines = [line for line in self.output.splitlines() if _ALARM.match(line)]
        ended = [f"exit code {self.code}"] if self.code else []
        return "\n".join([*lines, *ended, *filter(None, [self.audit])])


def run(
    overrides: tuple[str, ...], folder: Path, bug: str = "", *, resumes: bool = False
) -> Outcome:
    shutil.rmtree(folder, ignore_errors=True)
    report = folder.with_name(f"{folder.name}.planted").absolute()
    report.write_text("")
    given = (*SHORT, "generator.backend=vllm", *overrides, f"output_dir={folder}")
    parts = [given]
    if resumes:
        parts = [
            (*given, "num_steps=3", "save_every_n_steps=3"),
            (*given, "resume_from_checkpoint=true"),
        ]
    code, output = 0, ""
    for part in parts:
        if not code:
            done = _tune(part, bug, report)
            code, output = done.returncode, output + done.stdout
    check_planted(bug, report.read_text(), output)
    command = [sys.executable, "-m", "grpo_components.audit", str(folder), "--unfinished"]
    audited = subprocess.run(command, capture_output=True, text=True, check=False)
    broken = (audited.stdout + audited.stderr).splitlines()[-1] if audited.returncode == 1 else ""
    metrics = folder / "logs" / "metrics.jsonl"
    steps = map(json.loads, metrics.read_text().splitlines() if metrics.exists() else ())
    rewards = tuple(each["rollout/reward_mean"] for each in steps if each["step"])
    outcome = Outcome(code, output, broken, rewards)
    folder.with_name(f"{folder.name}.log").write_text(output + broken)
    return outcome


def _tune(overrides: tuple[str, ...], bug: str, report: Path) -> subprocess.CompletedProcess[str]:
    hook = [str(_TESTS / "planted_bugs" / "hook")] if bug else []
    path = [*hook, str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [TUNE, "run", RECIPE, "--config", "tiny_async_grpo", *overrides],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "GRPO_MUSEUM": bug,
            "GRPO_MUSEUM_REPORT": str(report),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


def check_planted(bug: str, report: str, output: str) -> None:
    """Check that a bug was planted, and failed in no process."""
    lines = report.splitlines()
    problems = [line for line in lines if not line.startswith("planted ")]
    if bug and not lines:
        module = BUGS[bug].module
        problems = [f"museum: bug {bug} is not planted: no process of the run loaded {module}"]
    if problems:
        raise PlantingError("\n".join(dict.fromkeys([*problems, output[-2000:]])))


def caught(exhibit: Exhibit, outcome: Outcome) -> str:
    """Return where the exhibit's alarm named the bug, such as "step 2"; empty if it did not."""
    text = outcome.audit if exhibit.alarm is AUDIT else outcome.output
    found = re.search(exhibit.alarm.pattern, text)
    if found is None:
        return ""
    if exhibit.alarm.words in AT_START:
        return "start"
    if found.groups():
        return f"step {found[1]}"
    if exhibit.alarm is AUDIT:
        named = re.search(r"step \d+", text) or re.search(r"receipts.jsonl line \d+", text)
        return named[0] if named else "audit"
    after = re.search(r"^step +(\d+)/", text[found.end() :], re.MULTILINE)  # not each is printed
    end = f"step {len(outcome.rewards) + 1}" if outcome.code else "end"
    return f"by step {after[1]}" if after else end
