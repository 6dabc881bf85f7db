"""A damaged checkpoint is named before a run resumes from it; the newest whole one is taken."""

import shutil
from pathlib import Path

import pytest
import torch
from lib.checkpoints import write_checkpoint
from lib.config_errors import refused_key
from safetensors.torch import save_file

from grpo_components.errors import ConfigError
from grpo_components.records.checkpoint_folder import point_latest
from grpo_components.records.resume import damage, find_checkpoint
from grpo_components.state_files import FORMAT, write_state

FILES = (
    *("config.yaml", "driver.json", "driver.npz", "trainer.json", "trainer.npz"),
    *("buffer.json", "buffer.npz", "trainer/.metadata", "trainer/__0_0.distcp"),
)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoints" / "step_4"
    write_checkpoint(folder, {"ledger": {"steps_done": 4}})
    save_file({"weight": torch.ones(3)}, folder / "model.safetensors")
    assert damage(folder) is None
    return folder


def half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def garbled(file):
    file.write_bytes(b"\x80\x04\xff{[\x00" * 9)


missing = Path.unlink


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        *((f"state/{file}", harm) for file in FILES for harm in (half, garbled, missing)),
        *(("model.safetensors", harm) for harm in (half, garbled)),  # an adapter's has none
    ],
)
def test_a_damaged_file_is_named(checkpoint, name, harm):
    harm(checkpoint / name)
    found = damage(checkpoint)
    assert name.removesuffix(".npz").removesuffix(".json") in found


def test_another_version_is_named(checkpoint):
    write_state(checkpoint / "state", "driver", {"ledger": {}, "format": FORMAT + 1})
    assert "format" in damage(checkpoint)


def test_the_newest_whole_checkpoint_is_taken_or_offered(checkpoint):
    """Checkpoints after `latest` belong to an attempt that was rolled back."""
    run = checkpoint.parent.parent
    for step in (1, 2, 3, 5):
        shutil.copytree(checkpoint, checkpoint.with_name(f"step_{step}"))
    point_latest(checkpoint)
    assert find_checkpoint(True, run) == checkpoint
    missing(checkpoint / "state/buffer.npz")
    half(checkpoint.with_name("step_3") / "state/trainer/__0_0.distcp")
    assert find_checkpoint(True, run) == checkpoint.with_name("step_2")
    with pytest.raises(ConfigError) as refused:
        find_checkpoint(str(checkpoint), run)
    assert "state/buffer.npz is missing" in refused.value.problem
    assert str(checkpoint.with_name("step_2")) in refused.value.allowed
    for step in (1, 2):
        missing(checkpoint.with_name(f"step_{step}") / "state/config.yaml")
    assert refused_key(find_checkpoint, True, run) == "resume_from_checkpoint"
