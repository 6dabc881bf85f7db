"""The tiny config as plain values, as typed settings, and over a folder of made files."""

import copy
import json
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpo_components.config import preflight
from grpo_components.config.reading import read_settings

CONFIG = Path(__file__).parents[3] / "recipes/configs/tiny_async_grpo.yaml"
FILES = ("model.safetensors", "vocab.json", "merges.txt", "tokenizer.json")


@pytest.fixture(scope="session")
def tiny_config():
    """The shipped config, read once."""
    return OmegaConf.load(CONFIG)


@pytest.fixture(scope="session")
def values_with(tiny_config):
    """Plain values of the tiny config with others at some keys, whose dots are written `__`."""

    tiny = OmegaConf.to_container(tiny_config, resolve=True)

    def values(**changes):
        given = copy.deepcopy(tiny)
        for key, value in changes.items():
            *sections, name = key.split("__")
            section = given
            for part in sections:
                section = section.setdefault(part, {})
            section[name] = value
        return given

    return values


@pytest.fixture(scope="session")
def settings_with(values_with):
    """Typed settings of the tiny config with other values at some keys."""
    return lambda **changes: read_settings(values_with(**changes))


@pytest.fixture
def cfg(tiny_config, tmp_path, monkeypatch):
    """The tiny config over a folder like the tiny policy, in a current folder of its own."""
    base, here = tmp_path / "tiny_policy", tmp_path / "here"
    for folder in (base / "data", here):
        folder.mkdir(parents=True)
    for name in (*FILES, "data/train.jsonl", "data/held_out.jsonl"):
        (base / name).touch()
    (base / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    cfg = copy.deepcopy(tiny_config)
    cfg.base_model_path, cfg.output_dir = str(base), str(tmp_path / "run")
    # The numbers that the tests count with, however the config is tuned.
    cfg.groups_per_step = cfg.group_size = 8
    cfg.dataset.max_prompt_tokens, cfg.generator.max_response_tokens = 64, 32
    return cfg


@pytest.fixture
def check(cfg):
    """Check `cfg` with overrides as on the command line; returns the typed settings."""

    def check(*overrides):
        given = OmegaConf.from_dotlist(list(overrides))
        for key in ("loss", "off_policy"):
            if isinstance(given.get(key), str):  # torchtune's short form for a component
                given[key] = {"_component_": given[key]}
        return preflight.check(OmegaConf.merge(cfg, given))

    return check


@pytest.fixture
def refusal(check):
    """The one line with which `cfg` is refused with overrides."""

    def refusal(*overrides):
        with pytest.raises(ValueError) as refused:
            check(*overrides)
        message = str(refused.value)
        assert "\n" not in message and "; allowed: " in message and len(message) <= 285
        return message

    return refusal
