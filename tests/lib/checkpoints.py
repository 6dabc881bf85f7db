"""Writes the smallest base model that a config may name, and checkpoint to resume from."""

import json
import warnings

import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from grpo_components.state_files import FORMAT, write_state
from lib.files import write_text


def write_base_model(folder, positions, shards=("",)):
    """Write the files that a base model has, with one weight in each of its shards."""
    data = ("data/train.jsonl", "data/held_out.jsonl")
    for name in ("vocab.json", "merges.txt", "tokenizer.json", *data):
        write_text(folder / name)
    for shard in shards:
        save_file({"weight": torch.zeros(1)}, folder / f"model{shard}.safetensors")
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))


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
