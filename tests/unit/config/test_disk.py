"""A run starts only if its checkpoints fit onto the disk."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from grpo_components.config.files import check_disk
from grpo_components.errors import ConfigError
from grpo_components.records.checkpoint_folder import most_at_once, nbytes
from grpo_components.settings import Settings

BEST = "eval/success_rate"
MOST = {(250, 50, 2, None): 3, (250, 50, 2, BEST): 4, (250, 50, None, None): 5}
MOST |= {(100, 50, 2, None): 2, (10, 50, 2, BEST): 1, (101, 50, None, None): 3}
"""Number of steps, steps between two checkpoints, keep_last_n and keep_best: how many there are."""
ADAM = Settings.model_construct(dtype="fp32", optimizer={"_component_": "torch.optim.AdamW"})


@pytest.mark.parametrize(("given", "most"), MOST.items())
def test_one_more_checkpoint_is_written_before_an_old_one_goes(given, most):
    keys = ("num_steps", "save_every_n_steps", "keep_last_n", "keep_best")
    assert most_at_once(Settings.model_construct(**dict(zip(keys, given, strict=True)))) == most


@pytest.fixture
def check(settings_with, tmp_path, monkeypatch):
    """Check a run over a layer of 500,000 weights, on a disk with this many bytes free."""
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({name: torch.zeros(1000, 500)}, tmp_path / "model.safetensors")
    folders = {"output_dir": str(tmp_path / "run"), "base_model_path": str(tmp_path)}
    usage = shutil.disk_usage(tmp_path)

    def check(free, **changes):
        monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=free))
        check_disk(settings_with(**folders, **changes))

    return check


def test_a_disk_that_is_too_small_is_named_before_anything_starts(check):
    assert nbytes(ADAM, 500_000, 500_000) == 500_000 * 16
    check(3 * 500_000 * 16, save_every_n_steps=1)
    with pytest.raises(ConfigError, match=r"output_dir: .* has 0\.0224 GiB free, and 3 check"):
        check(3 * 500_000 * 16 - 1, save_every_n_steps=1)


@pytest.mark.parametrize("merged", [False, True])
def test_a_checkpoint_of_adapters_has_the_whole_model_only_if_it_is_saved_merged(check, merged):
    lora = {"rank": 2, "alpha": 4, "target_modules": ["q_proj"], "save_merged": merged}
    adapter = 2 * (1000 + 500)
    needed = nbytes(ADAM, adapter + merged * 500_000, adapter)
    check(needed, num_steps=1, lora=lora)
    with pytest.raises(ConfigError, match="GiB free, and 1 check"):
        check(needed - 1, num_steps=1, lora=lora)
