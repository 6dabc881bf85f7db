"""Lists the files of the repository that git tracks: `make test` looks at no other.

python tests/lib/tracked.py '**/*.py'               # prints them, one a line
python tests/lib/tracked.py --left-out '**/*.py'    # says which are not looked at
"""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def tracked(*patterns: str) -> list[Path]:
    """Return the tracked files that exist, sorted; outside of git, all files but hidden ones."""
    if (REPOSITORY / ".git").exists():
        found = _git_files("--cached", *patterns)
    else:  # an unpacked archive: nothing tells its files from the reader's
        found = [path for pattern in patterns for path in REPOSITORY.glob(pattern)]
        found = [path for path in found if "/." not in f"/{path.relative_to(REPOSITORY)}"]
    return sorted({path for path in found if path.is_file()})


def left_out(*patterns: str) -> list[Path]:
    """Return the files that git neither tracks nor ignores, sorted."""
    if not (REPOSITORY / ".git").exists():
        return []
    return _git_files("--others", "--exclude-standard", *patterns)


def _git_files(*arguments: str) -> list[Path]:
    options = [each for each in arguments if each.startswith("--")]
    globs = [f":(glob){each}" for each in arguments if not each.startswith("--")]
    command = ["git", "-C", str(REPOSITORY), "ls-files", "-z", *options, "--", *globs]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return sorted(REPOSITORY / name for name in listed.split("\0") if name)


def main(arguments: list[str]) -> None:
    """Print the files that git tracks or, with `--left-out`, those that checks do not look at."""
    if arguments[:1] == ["--left-out"]:
        names = [str(path.relative_to(REPOSITORY)) for path in left_out(*arguments[1:])]
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        if names:
            shown = ", ".join(names[:5]) + more
            sys.stdout.write(f"not checked, as git does not track it: {shown}\n")
        return
    for path in tracked(*arguments):
        sys.stdout.write(f"{path.relative_to(REPOSITORY)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
