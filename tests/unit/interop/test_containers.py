"""Batches of ours as torchrl's containers, and back."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from grpo_components.interop.containers import from_tensordict, to_tensordict
from grpo_components.trajectory import Trajectory, batch_hash, pack

SIZES = ((3, 5), (1, 1), (7, 2), (2, 0))
"""Tokens of each prompt and response."""


def trajectory(number, prompt, response, **changes):
    numbers = np.random.default_rng(number)
    mask = np.arange(response) % 3 != 1
    made = Trajectory(
        prompt_ids=numbers.integers(0, 9, prompt),
        response_ids=numbers.integers(0, 9, response),
        response_mask=mask,
        generator_logprobs=np.where(mask, numbers.normal(size=response), 0).astype(np.float32),
        token_versions=np.where(mask, 5, -1).astype(np.int32),
        prompt_index=number,
        epoch=1,
        group_id=number // 2,
        attempt=2,
        finish_reason="length",
        temperature=0.7,
        reward=0.1 * number,
        reward_terms={"a": float(number)},
        success=bool(number % 2),
        reference_logprobs=numbers.normal(size=response).astype(np.float32),
        advantage=0.5 - number,
    )
    return replace(made, **changes)


@pytest.fixture
def batch():
    return [trajectory(number, *sizes) for number, sizes in enumerate(SIZES)]


def test_the_way_back_loses_nothing(batch):
    failed = {"finish_reason": "error", "error": "reward: no luck", "reward": np.nan}
    batch[3] = replace(batch[3], **failed, reward_terms={})
    back = from_tensordict(to_tensordict(batch))
    assert batch_hash(pack(back)) == batch_hash(pack(batch))
    assert [each.error for each in back] == [each.error for each in batch]
    bare = [replace(each, reference_logprobs=None) for each in batch]
    assert batch_hash(pack(from_tensordict(to_tensordict(bare)))) == batch_hash(pack(bare))


def test_tokens_masks_and_logprobs_stand_where_torchrl_reads_them(batch):
    found = to_tensordict(batch, pad_id=99)
    assert isinstance(found["tokens"], Tokens) and isinstance(found["log_probs"], LogProbs)
    assert isinstance(found["masks"], Masks) and found.batch_size == (len(SIZES),)
    width = max(sum(sizes) for sizes in SIZES)
    for row, each in zip(found.unbind(0), batch, strict=True):
        prompt, response = len(each.prompt_ids), len(each.response_ids)
        padding = width - prompt - response
        full = row["tokens", "full"]
        assert full.tolist() == [99] * padding + [*each.prompt_ids, *each.response_ids]
        assert row["tokens", "prompt"].tolist()[-prompt:] == each.prompt_ids.tolist()
        assert row["tokens", "response"].tolist()[:response] == each.response_ids.tolist()
        attention = row["masks", "all_attention_mask"].tolist()
        assert attention == [False] * padding + [True] * (prompt + response)
        assistant = row["masks", "all_assistant_mask"].tolist()
        assert assistant == [False] * (padding + prompt) + each.response_mask.tolist()
        logprobs = row["log_probs", "full"].numpy()
        assert (np.isfinite(logprobs) == assistant).all(), "no number where nothing was sampled"
        assert (logprobs[assistant] == each.generator_logprobs[each.response_mask]).all()
        ends = (row["advantage"][:, 0] == each.advantage).tolist()
        assert ends == [False] * (padding + prompt) + [True] * response
        reference = row["next", "ref_log_probs", "full"].numpy()
        assert (reference[width - response :] == each.reference_logprobs).all()


def test_advantages_may_differ_from_token_to_token(batch):
    own = [np.arange(response, dtype=np.float32) for _, response in SIZES]
    found = to_tensordict(batch, own)["advantage"]
    for row, values in zip(found, own, strict=True):
        assert row[len(row) - len(values) :, 0].tolist() == values.tolist()


def test_a_padded_batch_of_torchrl_becomes_trajectories(batch):
    found = to_tensordict(batch)
    del found["trajectory"]
    for each, back in zip(
        batch, from_tensordict(found, policy_version=5, temperature=0.7), strict=True
    ):
        for name in ("prompt_ids", "response_ids", "response_mask", "generator_logprobs"):
            assert np.array_equal(getattr(back, name), getattr(each, name)), name
        for name in ("token_versions", "reference_logprobs"):
            assert np.array_equal(getattr(back, name), getattr(each, name)), name
        assert (back.temperature, back.reward) == (0.7, pytest.approx(each.reward))


def test_a_ragged_batch_of_torchrl_becomes_trajectories():
    def row(prompt, response):
        return TensorDict(
            tokens=Tokens(prompt=torch.arange(prompt), response=torch.arange(response)),
            log_probs=LogProbs(response=torch.full((response,), -0.5)),
        )

    back = from_tensordict(lazy_stack([row(3, 2), row(1, 4)], 0), policy_version=7)
    assert [each.prompt_ids.tolist() for each in back] == [[0, 1, 2], [0]]
    assert [each.response_ids.tolist() for each in back] == [[0, 1], [0, 1, 2, 3]]
    assert all(each.response_mask.all() and (each.token_versions == 7).all() for each in back)
    assert all((each.generator_logprobs == -0.5).all() and np.isnan(each.reward) for each in back)


def test_what_cannot_be_read_is_refused(batch):
    found = to_tensordict(batch)
    del found["trajectory"]
    padded = found.exclude("masks")
    with pytest.raises(ValueError, match=r"^batch: padded, and without masks\.all_att"):
        from_tensordict(padded)
    with pytest.raises(ValueError, match=r"^batch: no log_probs\.response"):
        from_tensordict(found.exclude("log_probs"))
