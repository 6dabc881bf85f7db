"""Live bytes are those of PyTorch's allocator: storages count once, while they are alive."""

import torch

from grpo_tools.memory_plan.live_bytes import counting, imagining


def test_a_storage_counts_once_and_until_its_last_view_is_gone():
    with counting() as live:
        x = torch.zeros(1000)
        view = x[10:]
        assert live.live == 4000
        y = x + 1
        assert live.live == 8000
        del x, y
        assert live.live == 4000
        assert view.sum() == 0
    assert live.peak >= 8000


def test_a_storage_that_changes_its_size_counts_with_the_new_one():
    with counting() as live:
        x = torch.zeros(1000)
        x.untyped_storage().resize_(0)
        assert live.live == 0
        x.untyped_storage().resize_(8000)
        assert live.live == 8000


def test_a_terabyte_is_counted_without_memory():
    with imagining() as live:
        x = torch.empty(2**20, 2**18)
        assert live.live == x.nbytes == 2**40
