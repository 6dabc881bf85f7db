"""A run's folder has the code that ran: recipe, commit and changes, versions, host."""

import importlib.metadata
import json
import subprocess

import pytest

from grpo_components.records.run_folder import save_code


def git(*arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *who, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The folder in which a user starts `tune run`, with a recipe of their own."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "my_grpo.py").write_text("LOSS = 1\n")
    return folder


def saved(tmp_path, recipe="my_grpo.py"):
    save_code(tmp_path / "run", 0, recipe)
    folder = tmp_path / "run" / "code" / "attempt_0"
    return folder, json.loads((folder / "environment.json").read_text())


def test_it_has_the_recipe_the_commit_and_what_was_changed_since(checkout, tmp_path):
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    (checkout / "my_grpo.py").write_text("LOSS = 2\n")
    folder, about = saved(tmp_path)
    assert (folder / "my_grpo.py").read_text() == "LOSS = 2\n"
    assert about["commit"] == git("rev-parse", "HEAD")
    assert "-LOSS = 1\n+LOSS = 2\n" in (folder / "changes.diff").read_text()
    assert about["packages"]["torch"] == importlib.metadata.version("torch")


def test_no_checkout_and_no_recipe_are_no_error_and_a_second_start_replaces_it(checkout, tmp_path):
    folder, _ = saved(tmp_path)
    (folder / "changes.diff").touch()
    folder, about = saved(tmp_path, recipe=None)
    assert about["commit"] is None and about["recipe"] is None
    assert [path.name for path in folder.iterdir()] == ["environment.json"]
