"""The reference reads the whole context, and reports the divergence of the policy's tokens."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from lib.trajectories import trajectory as record
from safetensors.torch import save_file
from torchtune.models.qwen2 import qwen2
from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf
from torchtune.training import FullModelHFCheckpointer

from grpo_components.training.reference import Reference
from grpo_components.trajectory import batch_hash, pack, unpack

build_model = partial(
    qwen2,
    vocab_size=50,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    embed_dim=32,
    intermediate_dim=48,
    max_seq_len=64,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = build_model()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return model


@pytest.fixture(scope="module")
def arguments(model, tmp_path_factory):
    """Arguments of a frozen model with the weights of `model`."""
    base = tmp_path_factory.mktemp("base")
    heads = {"num_heads": 4, "num_kv_heads": 2, "dim": 32, "tie_word_embeddings": True}
    weights = qwen2_tune_to_hf(model.state_dict(), **heads)
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return {
        "build_model": build_model,
        "build_checkpointer": partial(
            FullModelHFCheckpointer,
            checkpoint_dir=str(base),
            checkpoint_files=["model.safetensors"],
            model_type="QWEN2",
            output_dir=str(tmp_path_factory.mktemp("run")),
        ),
        "device": "cpu",
        "dtype": "fp32",
        "kl_estimator": "k1",
        "tokens_per_micro_batch": 24,
        "logprob_chunk_tokens": 7,
    }


@pytest.fixture(scope="module")
def reference(arguments):
    return Reference(**arguments)


def make(number, mask):
    rng = np.random.default_rng(number)
    mask = np.array(mask, bool)
    logprobs = rng.normal(-4, 0.5, len(mask))
    return record(
        rng.integers(0, 50, len(mask)),
        mask,
        prompt_ids=rng.integers(0, 50, 4),
        # The values at the environment's tokens must not matter.
        generator_logprobs=np.where(mask, logprobs, np.nan).astype(np.float32),
        temperature=0.8,
    )


def test_the_divergence_is_that_of_the_policys_tokens_in_the_whole_context(model, reference):
    masks = [[True] * 3, [], [True, False, False, True, True], [True, True, False, True]]
    group = [make(number, mask) for number, mask in enumerate(masks)]
    before = batch_hash(pack(group))
    packed, divergences = reference.add_logprobs(pack(group))
    assert batch_hash({**packed, "reference_logprobs": None}) == before
    for trajectory, divergence in zip(unpack(packed), divergences, strict=True):
        trajectory.check()
        ids = torch.tensor(np.concatenate([trajectory.prompt_ids, trajectory.response_ids]))
        logprobs = torch.log_softmax(model(ids[None])[0] / 0.8, dim=-1)
        taken = logprobs[torch.arange(len(ids) - 1), ids[1:]].detach().numpy()[3:]
        np.testing.assert_allclose(trajectory.reference_logprobs, taken, atol=1e-5)
        own = trajectory.response_mask
        by_hand = (trajectory.generator_logprobs - taken)[own].sum()
        assert divergence == pytest.approx(by_hand, abs=1e-4)


def test_a_teacher_fills_its_own_field_beside_the_references(reference, arguments):
    """With the same weights both fields are the same bits."""
    group = pack([make(number, [True, False, True]) for number in range(3)])
    teacher = Reference(**arguments, field="teacher_logprobs")
    both, divergences = teacher.add_logprobs(reference.add_logprobs(group)[0])
    assert divergences == reference.add_logprobs(group)[1]
    for trajectory in unpack(both):
        trajectory.check()
        assert trajectory.teacher_logprobs is not None
        assert np.array_equal(trajectory.teacher_logprobs, trajectory.reference_logprobs)
    assert teacher.add_logprobs(group)[0]["reference_logprobs"] is None
