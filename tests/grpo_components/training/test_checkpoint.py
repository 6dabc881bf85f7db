"""A checkpoint folder is whole or not there, and `latest` always points at a whole one."""

import pytest
import torch
from safetensors.torch import load_file

from grpo_components.training import checkpoint
from grpo_components.training.checkpoint import save_hf_checkpoint


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ):
        (folder / name).write_text(name)
    (folder / "data").mkdir()
    return folder


def weights(value):
    return {"model.norm.weight": torch.full((4,), float(value))}


def test_the_folder_has_the_weights_and_the_base_models_other_files(base, tmp_path):
    folder = save_hf_checkpoint(weights(3), base, tmp_path / "checkpoints", step=7)
    assert folder == tmp_path / "checkpoints" / "step_7"
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    loaded = load_file(tmp_path / "checkpoints" / "latest" / "model.safetensors")
    assert torch.equal(loaded["model.norm.weight"], weights(3)["model.norm.weight"])


def test_saving_a_step_again_replaces_it(base, tmp_path):
    for value in (1, 2):
        folder = save_hf_checkpoint(weights(value), base, tmp_path / "checkpoints", step=5)
    assert load_file(folder / "model.safetensors")["model.norm.weight"][0] == 2


@pytest.mark.parametrize("failing_call", range(4))
def test_a_crash_while_saving_leaves_the_last_checkpoint_in_place(
    base, tmp_path, monkeypatch, failing_call
):
    checkpoints = tmp_path / "checkpoints"
    save_hf_checkpoint(weights(1), base, checkpoints, step=1)
    calls = 0
    original = checkpoint._sync

    def crash(path):
        nonlocal calls
        if calls == failing_call:
            raise OSError("no space left on device")
        calls += 1
        original(path)

    monkeypatch.setattr(checkpoint, "_sync", crash)
    with pytest.raises(OSError, match="no space left"):
        save_hf_checkpoint(weights(2), base, checkpoints, step=2)
    assert load_file(checkpoints / "latest" / "model.safetensors")["model.norm.weight"][0] == 1
    assert not (checkpoints / "step_2").exists()
