"""The checks look at tracked files only: what else lies in the folder cannot fail them."""

import shutil
import subprocess
from pathlib import Path

import pytest
from lib.tracked import left_out, tracked

OURS = ("benchmarks/speed.py", "grpo_components/one.py", "tests/test_one.py", "docs/page.md")
THEIRS = ("my_rewards.py", "my_runs/code/my_rewards.py", "grpo_components/two.py", "docs/notes.md")


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with tracked and untracked files, and a tracked one that was deleted."""
    for name in (*OURS, "docs/gone.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    (tmp_path / "docs/gone.md").unlink()
    for name in THEIRS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def names(paths: list[Path], repository: Path) -> set[str]:
    return {path.relative_to(repository).as_posix() for path in paths}


def test_only_tracked_files_that_exist_are_looked_at_and_the_rest_is_named(repository: Path):
    assert names(tracked("**", repository=repository), repository) == set(OURS)
    assert names(left_out("**", repository=repository), repository) == set(THEIRS)
    git(repository, "add", "--force", ".")
    assert names(tracked("**", repository=repository), repository) == {*OURS, *THEIRS}


def test_without_git_every_file_is_looked_at_that_is_not_hidden(repository: Path):
    shutil.rmtree(repository / ".git")
    (repository / ".hidden").touch()
    assert names(tracked("**/*", repository=repository), repository) == {*OURS, *THEIRS}
    assert left_out("**/*", repository=repository) == []
