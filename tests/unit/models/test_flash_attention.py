"""Flash attention over a column gives what masked blocks give, in less; a loop stands for it."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lib.policies import SIZES, TRANSFORMERS_SIZES, WINDOW, random_responses, random_weights
from lib.properties import many
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from torchtune.models.qwen2 import qwen2
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_components.models import hugging_face_attention, shared_prompts
from grpo_components.models.hugging_face_policy import prepared
from grpo_components.models.logprobs import ResponseLogprobs, token_batch
from grpo_components.models.shared_prompts import Part, arrange, attend
from grpo_tools.memory_plan.live_bytes import counting

aten, META = torch.ops.aten, torch.device("meta")
GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 12), min_size=1, max_size=5)),
    min_size=1,
    max_size=4,
)
"""Prompt length, and the length of each response."""
FAMILIES = {
    "qwen3": {},
    "gemma3_text": WINDOW | {"query_pre_attn_scalar": 5},
    "mistral": {"sliding_window": 1},
}


def loop(q, k, v, query_ends, key_ends, most_queries, most_keys, *, scale, window_size, enable_gqa):
    """Stands for `varlen_attn`: one sequence after the other."""
    assert query_ends.dtype == key_ends.dtype == torch.int32 and window_size[1] == 0
    outputs = []
    for number in range(len(query_ends) - 1):
        asks, seen = (slice(*ends[number : number + 2]) for ends in (query_ends, key_ends))
        one = [x.transpose(0, 1)[None] for x in (q[asks], k[seen], v[seen])]
        queries, keys = one[0].shape[2], one[1].shape[2]
        assert queries <= most_queries and keys <= most_keys
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        mask = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
        outputs.append(
            functional.scaled_dot_product_attention(
                *one, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
            )[0]
        )
    return torch.cat(outputs, dim=1).transpose(0, 1)


@pytest.fixture
def flash(monkeypatch):
    """A function that turns flash attention on or off; the list has the sizes of each call."""
    calls = []

    def counted(q, *args, **kwargs):
        calls.append(q.shape)
        return loop(q, *args, **kwargs)

    def turn(on, dtypes=(torch.float32,)):
        calls.clear()
        monkeypatch.setattr(shared_prompts, "has_flash", lambda device: on)
        monkeypatch.setattr(shared_prompts, "_FLASH_DTYPES", dtypes)
        return calls

    monkeypatch.setattr(shared_prompts, "varlen_attn", counted)
    return turn


def torchtune_policy(**changes):
    return random_weights(qwen2(**SIZES | changes))


def transformers_policy(family, **changes):
    hugging_face_attention.register()
    config = AutoConfig.for_model(family, **TRANSFORMERS_SIZES | {"head_dim": 16} | changes)
    how = {"attn_implementation": hugging_face_attention.NAME}
    return random_weights(prepared(AutoModelForCausalLM.from_config(config, **how)))


def run(model, groups):
    """Logprobs of all responses, and the gradients."""
    logprobs = ResponseLogprobs(model, chunk_tokens=9)
    values, _ = logprobs(token_batch(random_responses(*groups)))
    loss = (values * torch.linspace(-1, 2, len(values))).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return [values.detach(), torch.cat([each.flatten() for each in gradients])]


def assert_same(model, groups, flash, calls):
    flash(False)
    expected = run(model, groups)
    made = flash(True)
    for found, wanted in zip(run(model, groups), expected, strict=True):
        assert (found - wanted).norm() <= 1e-6 * max(1.0, wanted.norm())
    assert len(made) == calls


@settings(
    max_examples=many(20),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(GROUPS, st.sampled_from([1, 2, 4]))
def test_a_decoder_of_torchtune_gives_the_same_logprobs_and_gradients(flash, groups, heads):
    assert_same(torchtune_policy(num_kv_heads=heads), groups, flash, calls=2)


RAGGED = [(6, [9, 0, 1, 11]), (2, [3]), (4, [7, 0]), (9, [0])]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_transformers_gives_the_same_with_windows_and_scales(flash, family):
    assert_same(transformers_policy(family, **FAMILIES[family]), RAGGED, flash, calls=2)


@pytest.mark.parametrize(
    "family, changes",
    [
        ("gemma2", {"attn_logit_softcapping": 1.0, **WINDOW}),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW}),
        ("qwen3", {"head_dim": 12}),
        ("qwen3", {"head_dim": 264}),
    ],
)
def test_what_flash_does_not_compute_is_computed_in_blocks(flash, family, changes):
    assert_same(transformers_policy(family, **changes), RAGGED, flash, calls=0)


def test_float32_and_dropout_are_computed_in_blocks(flash):
    groups, model = [(3, [2, 5])], torchtune_policy()
    made = flash(True, dtypes=(torch.bfloat16, torch.float16))
    run(model, groups)
    assert not made
    run(model.to(torch.bfloat16), groups)
    assert len(made) == 2
    made = flash(True, dtypes=(torch.bfloat16,))
    run(torchtune_policy(attn_dropout=0.5).to(torch.bfloat16), groups)
    assert not made


def test_compiled_attention_computes_in_blocks_what_flash_does_not(flash):
    made = flash(True, dtypes=(torch.bfloat16,))
    parts = [Part(n, prompt, size) for n, (prompt, sizes) in enumerate(RAGGED) for size in sizes]
    given = torch.randn(3, len(arrange(parts).layout.positions), 2, 1, 8)
    compiled = torch.compile(attend, backend="eager")
    found = [each(*given, arrange(parts).layout, 0.0, True) for each in (compiled, attend)]
    torch.testing.assert_close(*found)
    assert not made


def of_cuda(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False):
    """The kernel that CUDA takes without cuDNN; one that takes a mask takes it as numbers."""
    if attn_mask is None:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    bias = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -torch.inf)
    over = -bias.shape[-1] % 8
    bias = functional.pad(bias, (0, over))[..., : k.shape[2]].expand(*q.shape[:3], -1)
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)[0]


MANY = np.random.default_rng(0).lognormal(5.5, 0.5, (8, 16)).clip(16, 512).astype(int).tolist()


@pytest.mark.parametrize(
    ("parts", "masked_gib"),
    [
        ([Part(n, 160, size) for n, sizes in enumerate(MANY) for size in sizes], 1.43),
        ([Part(0, 500, 8000)] * 4, 1.52),
        ([Part(0, 500, 16000)] * 2, 2.3),
    ],
    ids=["8 groups of 16", "4 of 8000", "2 of 16000"],
)
def test_a_layer_of_a_3b_policy_takes_less_memory(flash, monkeypatch, parts, masked_gib):
    """Forward and backward, on tensors that have shapes only."""
    flash(False)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", of_cuda)
    assert layer_gib(parts) > masked_gib
    flash(True, dtypes=(torch.bfloat16,))
    monkeypatch.setattr(shared_prompts, "varlen_attn", varlen_attn)
    assert layer_gib(parts) < min(0.45, masked_gib / 3)


def layer_gib(parts):
    """GiB beside the inputs."""
    with counting() as live:
        layout = arrange(parts, META).layout
        size = (len(layout.positions), 16, 1, 128)
        options = {"dtype": torch.bfloat16, "device": META, "requires_grad": True}
        queries, keys, values = (torch.empty(size, **options) for _ in range(3))
        live.mark(), (before := live.live)
        attend(queries, keys, values, layout, 0.0, True, repeats=8).sum().backward()
        return (live.peak - before) / 2**30
