"""The command that goes on from the last checkpoint is one that a user can type."""

import shlex

import pytest

from grpo_components._plugin import recipes_folder
from grpo_components.config.command_line import resume_command

RECIPE = "async_grpo_full_finetune_distributed"
SHIPPED = str(recipes_folder() / f"{RECIPE}.py")
TINY = str(recipes_folder() / "configs" / "tiny_async_grpo.yaml")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_names_of_the_shipped_recipe_and_config_are_restored():
    command = resume_command([SHIPPED, "--config", TINY, "num_steps=4", "output_dir=/runs/a b"])
    assert shlex.split(command) == [
        *("tune", "run", RECIPE, "--config", "tiny_async_grpo", "num_steps=4"),
        *("output_dir=/runs/a b", "resume_from_checkpoint=true"),
    ]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("my_grpo", "my_grpo.py"),
        ("sub.my_grpo", "sub/my_grpo.py"),
        ("{here}/my_grpo.py", "my_grpo.py"),
        ("{here}/../elsewhere.py", "{above}/elsewhere.py"),
        ("a_module", "a_module"),
    ],
)
def test_a_copy_is_named_by_its_path(here, given, shown):
    for name in ("my_grpo.py", "sub/my_grpo.py", "../elsewhere.py"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).touch()
    command = resume_command([given.format(here=here), "--config", "mine.yaml"])
    words = ["tune", "run", shown.format(above=here.parent), "--config", "mine.yaml"]
    assert shlex.split(command) == [*words, "resume_from_checkpoint=true"]


@pytest.mark.parametrize(
    "before",
    [
        "resume_from_checkpoint=/runs/b/step_2",
        "resume_from_checkpoint=true",
        "~resume_from_checkpoint",
    ],
)
def test_the_next_command_resumes_from_this_runs_checkpoint_alone(before):
    command = resume_command([SHIPPED, "--config", TINY, before, "seed=1"])
    assert shlex.split(command)[-2:] == ["seed=1", "resume_from_checkpoint=true"]
    assert command.count("resume") == 1


@pytest.mark.parametrize("argv", [["pytest", "-q", "a_test.py"], [""], [SHIPPED]])
def test_a_process_that_runs_no_recipe_has_no_such_command(argv):
    assert resume_command(argv) == ""
