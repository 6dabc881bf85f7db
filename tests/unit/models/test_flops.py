"""The count of operations is PyTorch's own; MFU is them over what the ranks' GPUs could do."""

from functools import partial

import pytest
import torch
from lib.policies import SIZES
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchtune.models.gemma import gemma
from torchtune.models.llama2 import llama2
from torchtune.models.phi3 import phi3
from torchtune.models.qwen2 import qwen2

from grpo_components.models.flops import ModelFlops, ResourceUse
from grpo_components.models.shared_prompts import Part

BUILDERS = {
    "llama2": llama2,
    "phi3": phi3,
    "gemma, wide heads": partial(gemma, head_dim=24),
    "qwen2, tied": partial(qwen2, tie_word_embeddings=True),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_forward_and_backward_count_as_in_pytorch_but_for_the_masked_half(name):
    model, length = BUILDERS[name](**SIZES), 9
    flops = ModelFlops.of(model)
    # The counter knows no fused attention on a CPU; this one computes all pairs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.arange(length)[None]).sum().backward()
    masked_pairs = length**2 - length * (length + 1) / 2
    expected = flops.train([Part("", length, 0)], length) + 3 * flops.per_pair * masked_pairs
    assert counter.get_total_flops() == expected


def test_a_shared_prompt_counts_once_and_is_seen_by_every_response():
    flops = ModelFlops(per_token=1.0, per_pair=10.0, per_logprob=100.0)
    assert flops.layers(3) == 3 + 60
    assert flops.layers(2, earlier=3) == 2 + 90 == flops.layers(5) - flops.layers(3)
    siblings, other = [Part("a", 3, 2), Part("a", 3, 1)], Part("b", 1, 0)
    assert flops.train(siblings, 4) == 3 * (63 + 92 + 41 + 400)
    assert flops.train([*siblings, other], 4) == 3 * (63 + 92 + 41 + 11 + 400)


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
