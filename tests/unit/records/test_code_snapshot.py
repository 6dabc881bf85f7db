"""A run's folder has the code that ran: recipe, the user's modules, versions, commits, host."""

import importlib
import importlib.metadata
import json
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo_components._plugin import recipes_folder
from grpo_components.records import code_snapshot
from grpo_components.records.code_snapshot import ABOUT, copy_code, save_code

SHIPPED = recipes_folder() / "async_grpo_full_finetune_distributed.py"
OURS = ("modules/snap", "modules/unrelated")
TESTS = str(Path(__file__).parents[2])
HEAD = "# run: 1\n# incarnation: 2\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    # All test files of this process would be the user's, and each would be parsed.
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(TESTS):
            monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(f"{HEAD}seed: 1\n")
    return folder


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The folder in which a user starts `tune run`, with rewards that import other files."""
    folder = tmp_path / "project"
    sources = {
        "snap_rewards.py": "import snap_tools.text\nimport numpy\n",
        "snap_tools/__init__.py": "",
        "snap_tools/text.py": "def late():\n    from . import words\n    import snap_lazy\n",
        "snap_tools/words.py": "import os\n",
        "snap_lazy.py": "raise ImportError('not imported by a snapshot')\n",
        "unrelated.py": "",
        ".env": "TOKEN=1\n",
    }
    for name, text in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    importlib.import_module("snap_rewards")
    yield folder
    for name in [name for name in sys.modules if name.startswith("snap_")]:
        del sys.modules[name]


def about(folder):
    return json.loads((folder / ABOUT).read_text())


def copied(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def git(folder, *arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True)


def test_the_users_modules_and_what_they_import_are_copied(run, project, monkeypatch):
    secret = secrets.token_hex()
    monkeypatch.setenv("WANDB_API_KEY", secret)
    folder = save_code(run, 0, str(SHIPPED))
    assert folder == run / "code" / "attempt_0"
    ours = {name for name in copied(folder) if name.startswith(OURS)}
    names = ("snap_rewards.py", "snap_lazy.py")
    names += tuple(f"snap_tools/{name}.py" for name in ("__init__", "text", "words"))
    assert ours == {f"modules/{name}" for name in names}
    for name in names:
        assert (folder / "modules" / name).read_bytes() == (project / name).read_bytes()
    assert (folder / SHIPPED.name).read_bytes() == SHIPPED.read_bytes()
    assert not any("numpy" in name or ".env" in name for name in copied(folder))
    texts = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not any(secret.encode() in text for text in texts)


def test_versions_and_host_are_recorded(run, project):
    found = about(save_code(run, 0, str(SHIPPED)))
    for name in ("torch", "ray", "numpy"):
        assert found["packages"][name] == importlib.metadata.version(name)
    assert found["host"] == socket.gethostname()
    assert found["python"] == sys.version.split()[0]
    assert found["recipe"]["shipped"] and found["left_out"] == {}


def test_the_commit_of_the_users_folder_is_recorded_and_whether_it_is_dirty(run, project):
    git(project, "init", "-q")
    assert about(save_code(run, 0, None))["git"]["user"]["commit"] is None
    git(project, "add", "-A")
    git(project, "commit", "-q", "-m", "one")
    clean = about(save_code(run, 1, None))["git"]["user"]
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (project / "snap_rewards.py").write_text("changed = True\n")
    dirty = about(save_code(run, 2, None))["git"]["user"]
    assert dirty == {**clean, "dirty": True}


def test_without_git_or_a_checkout_the_snapshot_is_written(run, project, monkeypatch):
    assert about(save_code(run, 0, None))["git"]["user"] is None
    monkeypatch.setenv("PATH", "")
    assert "problem" in about(save_code(run, 1, None))["git"]["user"]


@pytest.mark.parametrize("changed", [False, True])
def test_config_yaml_says_that_the_objective_comes_from_a_copy(run, project, changed):
    copy = project / "my_grpo.py"
    copy.write_text(SHIPPED.read_text() + "# mine\n" * changed)
    folder = save_code(run, 3, str(copy))
    assert (folder / "my_grpo.py").read_text() == copy.read_text()
    assert about(folder)["recipe"]["same_as_shipped"] is not changed
    text = (run / "config.yaml").read_text()
    assert text.startswith(HEAD) and yaml.safe_load(text) == {"seed": 1}
    (line,) = [line for line in text.splitlines() if line.startswith("# recipe: ")]
    assert str(copy) in line and ("code/attempt_3" in line) == changed


def test_of_the_shipped_recipe_config_yaml_says_nothing(run, project):
    save_code(run, 0, str(SHIPPED))
    assert (run / "config.yaml").read_text() == f"{HEAD}seed: 1\n"


def test_what_is_too_large_is_left_out_and_named(run, project, monkeypatch):
    monkeypatch.setattr(code_snapshot, "MAX_FILE_BYTES", 30)
    found = about(save_code(run, 0, None))
    large = str(project / "snap_rewards.py")
    assert "30 bytes" in found["left_out"][large] and large not in found["files"].values()
    assert "modules/snap_tools/words.py" in found["files"]
    monkeypatch.setattr(code_snapshot, "MAX_FILE_BYTES", 10**6)
    monkeypatch.setattr(code_snapshot, "MAX_FILES", 1)
    found = about(save_code(run, 1, None))
    assert len(found["files"]) == 1 and len(found["left_out"]) > 1


def test_snapshots_of_earlier_attempts_stay(run, project, tmp_path):
    (tmp_path / "other").mkdir()
    first = save_code(run, 0, None)
    before = (first / ABOUT).read_bytes()
    save_code(run, 2, None)
    copy_code(run, tmp_path / "other")
    for folder in (run, tmp_path / "other"):
        assert sorted(p.name for p in (folder / "code").iterdir()) == ["attempt_0", "attempt_2"]
        assert (folder / "code" / "attempt_0" / ABOUT).read_bytes() == before
