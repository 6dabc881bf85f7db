"""MFU is the operations over what the ranks' GPUs could have done; on a CPU there is none."""

import pytest
import torch
from lib.policies import SIZES
from torchtune.models.qwen2 import qwen2

from grpo_components.models.shared_prompts import Part
from grpo_components.training.resource_use import ResourceUse

PARTS, NUM_LOGPROBS = [Part("a", 4, 3), Part("a", 4, 2)], 6


@pytest.fixture(scope="module")
def model():
    return qwen2(**SIZES)


def test_on_a_known_gpu_mfu_counts_every_pass_and_all_ranks(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    use = ResourceUse(model, torch.device("cuda"), "bf16", 4, log_peak_memory_stats=False)
    once = use.metrics(PARTS, NUM_LOGPROBS, passes=1, start_known=False, seconds=2.0)
    expected = use.flops.train(PARTS, NUM_LOGPROBS) / (2.0 * 4 * 989.4e12)
    assert once == {"throughput/mfu": pytest.approx(expected)}
    more = use.metrics(PARTS, NUM_LOGPROBS, passes=2, start_known=True, seconds=2.0)
    assert more["throughput/mfu"] == pytest.approx(expected * (2 + 1 / 3))


def test_without_a_known_peak_there_is_no_mfu(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Another GPU")
    for device in ("cuda", "cpu"):
        use = ResourceUse(model, torch.device(device), "bf16", 1, log_peak_memory_stats=False)
        assert use.metrics(PARTS, NUM_LOGPROBS, passes=1, start_known=False, seconds=2.0) == {}
