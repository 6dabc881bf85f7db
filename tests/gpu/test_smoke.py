"""Without a GPU, `make gpu-test` says so in a line; it skips checks that a machine cannot do."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

SCRIPT = Path(__file__).with_name("smoke.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="#15: there is a GPU to try")
def test_without_a_gpu_it_says_so_in_a_line_and_exits_with_2():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "gpu-test: PyTorch finds no GPU here, so nothing was tried\n"


@pytest.mark.parametrize(
    ("check", "gpus", "gb", "needs"),
    [
        ("20 steps of qwen3B_async_grpo", 4, 80, "8 GPUs"),
        ("it to 3 generators", 3, 80, "4 GPUs"),
        ("5 steps of qwen3B_colocated_grpo_1gpu", 1, 48, "80 GB of GPU memory"),
        ("60 steps of qwen0.5B_async_grpo_1gpu", 1, 16, "24 GB of GPU memory"),
        ("5 steps of qwen3B_colocated_grpo_1gpu", 1, 80, "Qwen2.5-3B"),
    ],
)
def test_a_check_that_the_machine_cannot_do_is_skipped(
    monkeypatch, tmp_path, check, gpus, gb, needs
):
    spec = importlib.util.spec_from_file_location("smoke", SCRIPT)
    smoke = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(smoke)
    card = SimpleNamespace(total_memory=gb * 1e9)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)
    options = smoke.parsed(["--models", str(tmp_path)])
    needed = str(tmp_path / needs) if needs.startswith("Qwen") else needs
    assert smoke.OF_GPUS[check](options) == (None, f"needs {needed}")
