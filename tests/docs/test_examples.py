"""Every documented command and config passes the checks; `run_examples.py` runs them."""

import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from lib.examples import PAGES as ALL_PAGES
from lib.examples import blocks, examples, files
from lib.tracked import tracked
from omegaconf import OmegaConf

from grpo_components.config import preflight
from grpo_components.config.model_trial import try_training
from grpo_components.config.reading import read_config_file
from grpo_components.examples import sample_data
from grpo_components.settings import Settings

PAGES = [page for page in ALL_PAGES if page in tracked("*.md", "docs/**/*.md")]
SAMPLES = "/tmp/torchtune-async-grpo/samples"
POLICY = "/tmp/torchtune-async-grpo/tiny_policy"
EXTERNAL_PATHS = re.compile(
    r"(train_from|replay_events|eval_only|teacher\.path)=/|reward_model\.path=|resume_|replay_(until|without)="
)
"""Overrides that name the output of another command, or a file of the reader."""
NO_GPU = {"device=cuda": "device=cpu"}


def runs(page):
    for example in examples(page):
        text = example.text.replace("\\\n", " ").replace("$seed", "0").replace("<seed>", "0")
        for line in text.replace(" <overrides of the preset>", "").splitlines():
            words = shlex.split(line, comments=True)
            if "run" in words and (name := words[words.index("--config") + 1]) != "my_config.yaml":
                yield name, words[words.index("--config") + 2 :]


RUNS = [
    pytest.param(page, name, overrides, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, (name, overrides) in enumerate(runs(page), start=1)
    if name.startswith("tiny")
]


def load_yaml(text):
    """Load a part of a config; 1e-4 is a number in OmegaConf, but text in plain YAML."""
    return yaml.safe_load(re.sub(r"\b(\d+)(e-?\d+)\b", r"\1.0\2", text))


SNIPPETS = [
    pytest.param(page, snippet, id=f"{page.stem}-{number}-{next(iter(snippet))}")
    for page in PAGES
    for number, (language, text) in enumerate(blocks(page), start=1)
    if language == "yaml" and (snippet := load_yaml(text)).keys() <= Settings.model_fields.keys()
]
FILES = [pytest.param(page, name, id=name) for page in PAGES for name in files(page)]


@pytest.fixture
def folder_of(tmp_path, tiny_policy, monkeypatch):
    """Enter a folder with the files of a page, importable from there, until the test ends."""
    modules = {name.removesuffix(".py") for page in PAGES for name in files(page)}

    def enter(page):
        for name, text in files(page).items():
            (tmp_path / name).write_text(text.replace(POLICY, str(tiny_policy)))
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    replaced = {name: sys.modules.pop(name) for name in modules & sys.modules.keys()}
    yield enter
    for name in modules:
        sys.modules.pop(name, None)
    sys.modules.update(replaced)  # modules of other tests


def test_there_are_examples():
    assert len(RUNS) >= 20 and len(SNIPPETS) >= 15 and len(FILES) >= 8


@pytest.mark.parametrize(("page", "name", "overrides"), RUNS)
def test_a_documented_run_passes_the_checks(
    tiny_policy, folder_of, monkeypatch, page, name, overrides
):
    here = folder_of(page)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    sample_data.main([str(here / "data")])
    own = [NO_GPU.get(each, each) for each in overrides if not EXTERNAL_PATHS.match(each)]
    own = [each.replace(SAMPLES, f"{here}/data").replace(POLICY, str(tiny_policy)) for each in own]
    folders = (f"output_dir={here / 'run'}", f"base_model_path={tiny_policy}")
    try_training(preflight.read_config(read_config_file(name, [*own, *folders])))


@pytest.mark.parametrize(("page", "snippet"), SNIPPETS)
def test_a_documented_part_of_a_config_is_accepted(tiny_policy, folder_of, page, snippet):
    """Merged into the tiny config; a component or the rewards replace what was there."""
    here = folder_of(page)
    sample_data.main([str(here / "data")])
    for name in ("claims.jsonl", "more_claims.jsonl"):
        (here / name).touch()
    cfg = read_config_file("tiny_async_grpo", ())
    snippet = OmegaConf.to_container(
        OmegaConf.create(yaml.safe_dump(snippet).replace(SAMPLES, str(here / "data")))
    )
    for key, value in snippet.items():
        replaced = {"_component_", "code"} & set(value) if isinstance(value, dict) else True
        new = replaced or cfg.get(key) is None
        cfg[key] = value if new else OmegaConf.merge(cfg[key], value)
    if "reward_model" in cfg:  # a folder of the reader
        cfg.reward_model.path = None
    cfg.output_dir, cfg.base_model_path = str(here / "run"), str(tiny_policy)
    try_training(preflight.read_config(cfg))


@pytest.mark.parametrize(("page", "name"), FILES)
def test_a_documented_file_is_imported(tiny_policy, folder_of, page, name):
    assert runpy.run_path(str(folder_of(page) / name))
