"""A run starts only if its checkpoints fit onto the disk."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from grpo_components.config.files import check_disk
from grpo_components.errors import ConfigError
from grpo_components.records.checkpoint_folder import most_at_once, nbytes


@pytest.mark.parametrize(
    ("steps", "every", "keep_last_n", "keep_best", "most"),
    [
        *((250, 50, 2, None, 3), (250, 50, 2, "eval/success_rate", 4), (250, 50, None, None, 5)),
        *((100, 50, 2, None, 2), (10, 50, 2, "eval/success_rate", 1), (101, 50, None, None, 3)),
    ],
)
def test_one_more_checkpoint_is_written_before_an_old_one_goes(
    steps, every, keep_last_n, keep_best, most
):
    assert most_at_once(steps, every, keep_last_n, keep_best) == most


def test_a_disk_that_is_too_small_is_named_before_anything_starts(
    settings_with, tmp_path, monkeypatch
):
    save_file({"weight": torch.zeros(1000, 500)}, tmp_path / "model.safetensors")
    given = {"output_dir": str(tmp_path / "run"), "base_model_path": str(tmp_path)}
    settings = settings_with(**given, save_every_n_steps=1)
    assert nbytes(500_000, 500_000, "fp32", settings.optimizer["_component_"]) == 500_000 * 16
    usage = shutil.disk_usage(tmp_path)

    def disk(free):
        monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=free))

    disk(3 * 500_000 * 16)
    check_disk(settings)
    disk(3 * 500_000 * 16 - 1)
    with pytest.raises(ConfigError, match=r"output_dir: .* has 0\.0224 GiB free, and 3 check"):
        check_disk(settings)


@pytest.mark.parametrize("merged", [False, True])
def test_a_checkpoint_of_adapters_has_the_whole_model_only_if_it_is_saved_merged(
    settings_with, tmp_path, monkeypatch, merged
):
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({name: torch.zeros(1000, 500)}, tmp_path / "model.safetensors")
    given = {"output_dir": str(tmp_path / "run"), "base_model_path": str(tmp_path)}
    lora = {"rank": 2, "alpha": 4, "target_modules": ["q_proj"], "save_merged": merged}
    settings = settings_with(**given, num_steps=1, lora=lora)
    adapter = 2 * (1000 + 500)
    needed = nbytes(adapter + merged * 500_000, adapter, "fp32", settings.optimizer["_component_"])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=needed))
    check_disk(settings)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=needed - 1))
    with pytest.raises(ConfigError, match="GiB free, and 1 check"):
        check_disk(settings)
