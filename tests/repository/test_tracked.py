"""`make test` looks at tracked files only: what else lies in the folder cannot fail it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tracked import REPOSITORY, left_out, tracked

PYTHON = '"""A module."""\n\nNUMBER = 1\n'
TEST = "def test_one():\n    assert 1 + 1 == 2\n"
BROKEN = "def broken(:\n    rec" + "ieve\n"
OURS = {
    "benchmarks/speed.py": PYTHON,
    "grpo_components/one.py": PYTHON,
    "recipes/recipe.py": PYTHON,
    "tests/test_one.py": TEST,
    "docs/page.md": "# A page\n",
}
THEIRS = (
    *("my_rewards.py", "my_runs/code/my_rewards.py", "my_run/recipe.py", "grpo_components/two.py"),
    *("recipes/mine.py", "tests/test_mine.py", "docs/notes.md", "run.log", "benchmarks/mine.py"),
)


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A small repository with our Makefile, our settings and our tools, and files of a user."""
    folder = tmp_path / "repository"
    (folder / "tests" / "repository").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", ".gitignore", "tests/repository/tracked.py"):
        shutil.copy(REPOSITORY / name, folder / name)
    for name, text in OURS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    return folder


def add_theirs(repository: Path) -> None:
    for name in THEIRS:
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(BROKEN)


def make(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make with the tools of this environment, which are taken to be installed."""
    venv = Path(sys.executable).parents[1]
    command = ["make", f"VENV={venv}", "-o", f"{venv}/.dev", *arguments]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True)


def test_files_of_the_user_cannot_fail_it(repository: Path):
    add_theirs(repository)
    done = make(repository, "test")
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("All checks passed", "already formatted", "0 errors", "1 passed"):
        assert said in done.stdout, said


def test_a_wrong_type_is_shown_after_the_tests_and_fails_it(repository: Path):
    (repository / "benchmarks/speed.py").write_text('"""A module."""\n\nNUMBER: int = "one"\n')
    done = make(repository, "test")
    assert done.returncode != 0
    assert "1 passed" in done.stdout.partition("1 error")[0], done.stdout + done.stderr


def test_the_same_files_fail_it_once_they_are_tracked(repository: Path):
    add_theirs(repository)
    git(repository, "add", "--force", ".")
    done = make(repository, "--ignore-errors", "lint")
    assert done.stderr.count("(ignored)") == 3, done.stderr
    assert all(name in done.stdout + done.stderr for name in THEIRS)


def test_a_deleted_file_is_not_looked_at_and_an_untracked_one_is_named(repository: Path):
    add_theirs(repository)
    (repository / "docs/page.md").unlink()
    assert tracked("docs/*.md", repository=repository) == []
    assert repository / "my_rewards.py" in left_out("**/*.py", repository=repository)
    found = tracked("**/*.py", repository=repository)
    python = {path.relative_to(repository).as_posix() for path in found}
    assert python == {*(n for n in OURS if n.endswith(".py")), "tests/repository/tracked.py"}


def test_without_git_every_file_is_looked_at(repository: Path):
    shutil.rmtree(repository / ".git")
    add_theirs(repository)
    assert repository / "grpo_components/two.py" in tracked("**/*.py", repository=repository)
    assert repository / ".gitignore" not in tracked("**", repository=repository)
    assert left_out("**", repository=repository) == []
