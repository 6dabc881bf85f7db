"""The tiny config as plain values, as typed settings, and over a folder of made files."""

import copy
import re
import sys
from pathlib import Path

import pytest
from lib.checkpoints import write_base_model
from lib.config_errors import refused_key
from omegaconf import OmegaConf

from grpo_components.config import preflight
from grpo_components.config.reading import read_config_file, read_settings

OWN = """
class Takes:
    def __init__(self, kl_coeff=0.0): ...
    def __call__(self, tokens): ...

class Good:
    def __init__(self, limit: int):
        self.limit = limit
    def __call__(self, *, prompt_text, response_text, answer, finish_reason):
        return 1.0

class Inherited(Good):
    pass

def make(**kwargs):
    return Good(1)

def judge(*, prompt_text, response_text, answer, finish_reason):
    return 1.0

def of_trl(completions, **kwargs):
    return [1.0] * len(completions)

def leave(how):
    raise SystemExit(0)

number = 3

class Metaclass(type):
    def __call__(cls, *args, **kwargs):  # as torchrl's has
        return super().__call__(*args, **kwargs)

class Names(metaclass=Metaclass):
    def __init__(self, *, num_slots, encode, part=None):
        self.given = {"num_slots": num_slots, "encode": encode, "part": part}

def three(*, num_slots, decode, score, own=1):
    return {"num_slots": num_slots, "decode": decode, "score": score, "own": own}

def everything(**given):
    return given
"""


@pytest.fixture(scope="session")
def tiny_config():
    """The shipped config, read once."""
    return read_config_file("tiny_async_grpo", ())


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
    write_base_model(base, positions=512)
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    cfg = copy.deepcopy(tiny_config)
    cfg.base_model_path, cfg.output_dir = str(base), str(tmp_path / "run")
    # The numbers that the tests count with, however the config is tuned.
    cfg.groups_per_step = cfg.group_size = 8
    cfg.dataset.max_prompt_tokens, cfg.generator.max_response_tokens = 64, 32
    return cfg


@pytest.fixture
def own(cfg):
    """A module of the user in the current folder, as Python finds it once preflight has run."""
    Path("folder.jsonl").mkdir()
    Path("rows.jsonl.gz").touch()
    Path("own_parts.py").write_text(OWN)
    Path("own_broken.py").write_text("import os\nthis_is_not_defined\nX = int\n")
    Path("own_lacking.py").write_text("import os\nimport not_installed_here\nX = int\n")
    sys.path.append(str(Path.cwd()))
    yield
    for name in ("own_parts", "own_broken", "own_lacking"):
        sys.modules.pop(name, None)


@pytest.fixture
def merged(cfg):
    """`cfg` with overrides as on the command line, one or more in each text; `~key` removes one."""

    def merged(*texts):
        overrides = [each for text in texts for each in re.split(r" (?=~|[a-z_][\w.]*=)", text)]
        given = OmegaConf.from_dotlist([each for each in overrides if each and each[0] != "~"])
        whole = OmegaConf.merge(cfg, given)
        for key in (each[1:] for each in overrides if each.startswith("~")):
            parent, _, name = key.rpartition(".")
            del OmegaConf.select(whole, parent)[name]
        return whole

    return merged


@pytest.fixture
def read(merged):
    """Check `cfg` with overrides, but for its files, GPUs and components; returns the settings."""
    return lambda *overrides: read_settings(merged(*overrides))


@pytest.fixture
def check(merged):
    """Check `cfg` with overrides; returns the typed settings."""
    return lambda *overrides: preflight.read_config(merged(*overrides))


@pytest.fixture
def refused(check):
    """The key for which `cfg` is refused with overrides."""
    return lambda *overrides: refused_key(check, *overrides)
