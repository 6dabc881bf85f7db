"""The reference reads the whole context, and reports the divergence of the policy's tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from lib.logprobs import whole_logprobs
from lib.trainer_ranks import build_model, checkpointer_of, make, whole_model

from grpo_components.cluster.role_host import RoleHost
from grpo_components.training.reference import Reference
from grpo_components.trajectory import batch_hash, pack, unpack


@pytest.fixture(scope="module")
def arguments(base, tmp_path_factory):
    return {
        "build_model": build_model,
        "build_checkpointer": checkpointer_of(base, tmp_path_factory.mktemp("run")),
        **{"device": "cpu", "dtype": "fp32", "kl_estimator": "k1"},
        **{"tokens_per_micro_batch": 24, "logprob_chunk_tokens": 7},
    }


@pytest.fixture(scope="module")
def reference(arguments):
    return Reference(**arguments)


def test_a_role_with_a_model_leaves_attention_to_other_kernels_than_cudnns(arguments):
    host = RoleHost.__new__(RoleHost)
    host._cpu_threads = torch.get_num_threads()
    torch.backends.cuda.enable_cudnn_sdp(True)
    host._build("grpo_components.training.reference.Reference", arguments)
    assert isinstance(host._role, Reference) and not torch.backends.cuda.cudnn_sdp_enabled()


def sampled(masks):
    """Responses whose values at the environment's tokens must not matter."""
    group = [replace(make(n, 4, mask), reference_logprobs=None) for n, mask in enumerate(masks)]
    for trajectory in group:
        trajectory.generator_logprobs[~trajectory.response_mask] = np.nan
    return group


def test_the_divergence_is_that_of_the_policys_tokens_in_the_whole_context(base, reference):
    masks = [[True] * 3, [], [True, False, False, True, True], [True, True, False, True]]
    group, model = sampled(masks), whole_model(base).requires_grad_(False)
    before = batch_hash(pack(group))
    packed, divergences = reference.add_logprobs(pack(group))
    assert batch_hash({**packed, "reference_logprobs": None}) == before
    for trajectory, divergence in zip(unpack(packed), divergences, strict=True):
        trajectory.check()
        taken = whole_logprobs(model, trajectory)[0].numpy()
        np.testing.assert_allclose(trajectory.reference_logprobs, taken, atol=1e-5)
        own = trajectory.response_mask
        by_hand = (trajectory.generator_logprobs - taken)[own].sum()
        assert divergence == pytest.approx(by_hand, abs=1e-4)


def test_a_teacher_fills_its_own_field_beside_the_references(reference, arguments):
    """With the same weights both fields are the same bits."""
    group = pack(sampled([[True, False, True]] * 3))
    teacher = Reference(**arguments, field="teacher_logprobs")
    both, divergences = teacher.add_logprobs(reference.add_logprobs(group)[0])
    assert divergences == reference.add_logprobs(group)[1]
    for trajectory in unpack(both):
        trajectory.check()
        assert trajectory.teacher_logprobs is not None
        assert np.array_equal(trajectory.teacher_logprobs, trajectory.reference_logprobs)
    assert teacher.add_logprobs(group)[0]["reference_logprobs"] is None
