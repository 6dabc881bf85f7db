"""Runs the commands of the documentation as printed, each page in its own folder.

PYTHONPATH=tests python tests/nightly/run_examples.py                          # all pages
PYTHONPATH=tests python tests/nightly/run_examples.py data.md evaluation.md
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lib.examples import PAGES, examples, files


def main(names: list[str]) -> int:
    failed = []
    for page in PAGES:
        if names and page.name not in names:
            continue
        folder = Path(tempfile.mkdtemp(prefix=f"{page.stem}-"))
        for name, text in files(page).items():
            (folder / name).write_text(text)
        for example in examples(page):
            label = f"{page.name} {example.number}"
            if not example.complete:
                sys.stdout.write(f"{label}: skipped, it has a placeholder\n")
                continue
            started, log = time.monotonic(), folder / f"{example.number}.log"
            with log.open("w") as output:
                command = ["bash", "-euc", example.text]
                code = subprocess.run(command, cwd=folder, stdout=output, stderr=output).returncode
            failed += [label] if code else []
            seconds = time.monotonic() - started
            sys.stdout.write(f"{label}: exit code {code} after {seconds:.0f} s, {log}\n")
            sys.stdout.flush()
    if failed:
        sys.stderr.write(f"error: these examples failed: {', '.join(failed)}\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
