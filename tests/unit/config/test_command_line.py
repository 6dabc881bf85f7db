"""Overrides merge as typed, and a mistake ends the command before anything heavy is imported."""

import contextlib
import shutil
import subprocess
import sys
import threading

import pytest
from lib.chaos import RECIPE
from lib.config_errors import refusal_of, refused_key
from omegaconf import OmegaConf

from grpo_components import _tune_run
from grpo_components._plugin import recipes_folder
from grpo_components.cluster.supervision import exit_code
from grpo_components.config.command_line import check_early
from grpo_components.config.preflight import parse
from grpo_components.config.reading import merge_overrides
from grpo_components.errors import ConfigError

SHIPPED = str(recipes_folder() / f"{RECIPE}.py")
TINY = str(recipes_folder() / "configs" / "tiny_async_grpo.yaml")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'{question} ='", "{question} ="),
        ('"{question}\\n= "', "{question}\n= "),
        ("/runs/epoch=3/step=4", "/runs/epoch=3/step=4"),
        ("=x", "=x"),
        ("[x=1, {k: a==b}, 'c,=']", ["x=1", {"k": "a==b"}, "c,="]),
        ("", None),
        ("None", None),
    ],
)
@pytest.mark.parametrize("key", ["a", "b.c", "new"])
def test_the_first_equals_sign_ends_the_key(key, text, value):
    merged = merge_overrides({"a": 1, "b": {"c": 2, "d": 3}}, [f"{key}={text}"])
    assert OmegaConf.select(merged, key) == value


def test_a_component_is_replaced_by_its_path_alone():
    given = {"model": {"_component_": "m.A", "size": 1}, "gone": 1, "kept": {"x": 1, "y": 2}}
    overrides = ["model=m.B", "loss=m.Loss", "~gone", "~kept.x=", "loss.clip=0.1"]
    assert merge_overrides(given, overrides) == {
        "model": {"_component_": "m.B", "size": 1},
        "loss": {"_component_": "m.Loss", "clip": 0.1},
        "kept": {"y": 2},
    }


@pytest.mark.parametrize(
    ("override", "key"),
    [
        *(("num_steps", "overrides"), ("=3", "overrides"), ("~no.such=1", "~no.such")),
        *(("~model", "~model"), ("a={question} =", "a"), ("a==", "a")),
        *(("rewards.formal=null", "rewards.formal"), ("user.long_cof=9", "user.long_cof")),
        *(("rewards=[1]", "rewards"), ("rewards.format=[1]", "rewards.format")),
    ],
)
def test_an_override_that_cannot_be_merged_is_named(override, key):
    given = {"model": {"_component_": "m.A"}, "rewards": {"format": {}}, "user": {"long_coeff": 1}}
    assert merge_overrides(given, ["user.other=1", "user.long_coeff=2"]).user.long_coeff == 2
    assert refused_key(merge_overrides, given, [override]) == key


@pytest.mark.parametrize("text", ["a: [1,", "a: {b: *x}", "- a", "a: \xe9", None])
def test_a_file_that_is_no_config_is_one_line(here, monkeypatch, capsys, text):
    @parse
    def recipe_main(cfg):
        raise AssertionError("it was parsed")

    if text is not None:
        (here / "config.yaml").write_text(text, encoding="latin-1")
    monkeypatch.setattr("sys.argv", ["recipe", "--config", "config.yaml"])
    assert exit_code(recipe_main) == 2
    err = capsys.readouterr().err
    assert err.startswith("config error: ") and err.count("\n") == 1


LIGHT = """
import atexit, os, sys
from grpo_components.config.command_line import main
heavy = {"numpy", "torch", "ray", "torchtune", "vllm"}
end = os._exit

def show(*code):
    print(*sorted(heavy & set(sys.modules)), flush=True)
    return code and end(*code)

atexit.register(show)
os._exit = show
sys.argv = ["tune", "run", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    ("override", "key", "imported"),
    [
        ("max_stalenes=2", "max_stalenes", ""),
        ("dataset.source=/nowhere/no.jsonl", "dataset.source", ""),
        ("loss._component_=grpo_components.objective.losses.Nolo", "loss._component_", ""),
        ("resume_from_checkpoint=/nowhere", "resume_from_checkpoint", "numpy torch"),
        ("rewards.my._component_=no_module.Reward", "rewards.my._component_", ""),
        ("model.num_layer=3", "model.num_layer", "numpy torch torchtune"),
    ],
)
def test_a_mistake_ends_tune_run_before_ray_is_imported(cfg, here, override, key, imported):
    """As imports are what takes seconds."""
    OmegaConf.save(cfg, here / "mine.yaml")
    command = [sys.executable, "-c", LIGHT, RECIPE, "--config", str(here / "mine.yaml"), override]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (2, imported)
    (line,) = (line for line in done.stderr.splitlines() if "torchao" not in line)
    assert line.startswith(f"config error: {key}: ")


@pytest.mark.parametrize(
    ("recipe", "config", "found"),
    [
        *((RECIPE, TINY, True), ("fork.py", TINY, True), ("changes.py", TINY, False)),
        *((RECIPE, "list.yaml", True), (RECIPE, "none.yaml", True), ("torchtunes", TINY, False)),
    ],
)
def test_only_a_config_that_the_recipe_takes_as_it_is_is_checked_that_early(
    here, recipe, config, found
):
    shutil.copy(SHIPPED, "fork.py")
    changed = (here / "fork.py").read_text().replace("read_config(given)", "read_config(mine)")
    (here / "changes.py").write_text(changed)
    (here / "list.yaml").write_text("- a")
    for wrong in ("group_size=1", "base_model_path=/nowhere"):
        for words in (["--config", config, wrong], [wrong, "--config", config]):
            with pytest.raises(ConfigError) if found else contextlib.nullcontext():
                assert check_early([recipe, *words]) is None


@pytest.mark.parametrize("option", ["--nproc_per_node 2", "--nproc-per-node=2", "--nnodes 1:2"])
def test_ranks_of_torchrun_are_refused_for_our_recipe_and_its_copies(here, option):
    shutil.copy(SHIPPED, "fork.py")
    (here / "theirs.py").write_text("import torch\n")
    for recipe in (RECIPE, "fork.py"):
        error = refusal_of(check_early, [*option.split(), recipe, "--config", TINY])
        assert option.startswith(error.key) and "num_trainers" in error.allowed
    assert check_early([*option.split(), "theirs.py", "--config", TINY]) is None


def test_long_imports_are_not_silent_until_the_recipe_begins(monkeypatch, capsys):
    loaded = threading.Event()
    monkeypatch.setattr("grpo_components.config.preflight.LOADED", loaded)
    monkeypatch.setattr(_tune_run, "LOADED", loaded)
    monkeypatch.setattr(_tune_run, "_SILENT_S", 0.01)
    teller = threading.Thread(target=_tune_run._tell_while_loading)
    teller.start()
    while not (told := capsys.readouterr().out):
        assert teller.is_alive()
    monkeypatch.setattr(sys, "argv", ["recipe", "--config", TINY])
    parse(lambda cfg: None)()
    teller.join(10)
    assert "still loading\n" in told and not teller.is_alive()
