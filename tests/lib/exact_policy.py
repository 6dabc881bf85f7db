"""A policy of the tiny policy's shape, tokenizer and data whose weights are random integers."""

import hashlib
import random
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

TINY = Path("/tmp/torchtune-async-grpo/tiny_policy")


def exact_policy(folder):
    """Write it, with the same bits on every machine; returns a checksum of all its files."""
    shutil.copytree(TINY, folder)
    chance, weights = random.Random(0), {}
    for name, tensor in load_file(TINY / "model.safetensors").items():
        integers = np.frombuffer(chance.randbytes(2 * tensor.numel()), "<i2").astype(np.float32)
        values = torch.tensor(integers / 2**15).reshape(tensor.shape)
        if "embed" in name:
            values[0] *= 2  # the end of text, so that responses end at different lengths
        is_norm, scale = "norm" in name, 2 if "embed" in name else 4 if tensor.dim() == 1 else 8
        weights[name] = values / scale + is_norm
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and f.name != "tiny_policy.json"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:32]
