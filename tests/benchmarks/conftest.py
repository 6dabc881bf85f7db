"""Makes the scripts in `benchmarks/` importable."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads would wait for each other on a busy machine
    yield
    torch.set_num_threads(before)
