"""Without a GPU, `make gpu-test` says so in one line."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="#15: there is a GPU to try")
def test_without_a_gpu_it_says_so_in_a_line_and_exits_with_2():
    script = Path(__file__).with_name("smoke.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "gpu-test: PyTorch finds no GPU here, so nothing was tried\n"
