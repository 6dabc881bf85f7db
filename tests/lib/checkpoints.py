"""Writes the smallest checkpoint that a run would resume from."""

import warnings

import torch
from omegaconf import OmegaConf
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from grpo_components.state_files import FORMAT, write_state


def write_checkpoint(folder, driver=None, config=None):
    """Write the given state of the driver and config, and one weight, to the checkpoint."""
    state = folder / "state"
    write_state(state, "driver", {"ledger": {"steps_done": 0}, **(driver or {}), "format": FORMAT})
    write_state(state, "trainer", {})
    write_state(state, "buffer", [])
    OmegaConf.save(OmegaConf.create(config or {}), state / "config.yaml")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = FileSystemWriter(state / "trainer")
        save({"model.weight": torch.ones(3)}, storage_writer=writer, no_dist=True)
