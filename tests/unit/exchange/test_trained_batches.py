"""A batch is kept under its hash, whole or not at all."""

import numpy as np
import pytest

from grpo_components.exchange.trained_batches import read_batch, write_batch
from grpo_components.trajectory import Trajectory, batch_hash, pack


def batch(seed):
    length = 3
    return pack(
        [
            Trajectory(
                prompt_ids=np.arange(2),
                response_ids=np.arange(length) + seed,
                response_mask=np.ones(length, bool),
                generator_logprobs=np.full(length, -0.3, np.float32),
                token_versions=np.zeros(length, np.int32),
                prompt_index=0,
                epoch=0,
                group_id=0,
                attempt=0,
                finish_reason="stop",
            )
        ]
    )


def test_a_batch_comes_back_and_is_written_once(tmp_path):
    one, folder = batch(1), tmp_path / "batches"
    for _ in range(2):
        write_batch(folder, batch_hash(one), one)
    assert batch_hash(read_batch(folder, batch_hash(one))) == batch_hash(one)
    assert [path.name for path in folder.iterdir()] == [batch_hash(one)]


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.rename", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_batch(tmp_path, batch_hash(batch(1)), batch(1))
    assert not list(tmp_path.iterdir())


def test_a_missing_or_changed_batch_is_named(tmp_path):
    one, other = batch(1), batch(2)
    with pytest.raises(ValueError, match=f"no batch .*{batch_hash(one)}"):
        read_batch(tmp_path, batch_hash(one))
    write_batch(tmp_path, batch_hash(one), other)
    with pytest.raises(ValueError, match=f"{batch_hash(one)} is damaged: its hash is"):
        read_batch(tmp_path, batch_hash(one))
    (tmp_path / batch_hash(one) / "batch.npz").write_bytes(b"")
    with pytest.raises(ValueError, match=f"{batch_hash(one)} is damaged"):
        read_batch(tmp_path, batch_hash(one))
