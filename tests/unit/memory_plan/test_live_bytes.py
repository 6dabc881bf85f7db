"""Live bytes are those of PyTorch's allocator: storages count once, while they are alive."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from grpo_tools.memory_plan.live_bytes import counting, imagined_ranks, imagining


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


def test_a_mark_begins_a_new_peak():
    with counting() as live:
        x = torch.zeros(1000)
        del x
        assert live.mark() == 4000
        torch.zeros(10)
        assert live.mark() == 40


def test_a_terabyte_is_counted_without_memory():
    with imagining() as live:
        x = torch.empty(2**20, 2**18)
        assert live.live == x.nbytes == 2**40


def test_imagined_ranks_shard_without_processes():
    with imagined_ranks(64):
        assert dist.get_world_size() == 64
        assert init_device_mesh("cpu", (8, 8)).shape == (8, 8)
    assert not dist.is_initialized()
