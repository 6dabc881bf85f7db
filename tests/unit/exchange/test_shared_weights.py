"""Tensors reach another process as views of one memory, which leaves nothing behind."""

import multiprocessing
import os

import pytest
import torch

from grpo_components.exchange.shared_weights import SharedMemory, open_shared, split

TENSORS = {
    "bf16": torch.arange(15).reshape(3, 5).to(torch.bfloat16),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "f32": torch.randn(33),
}


def same(left, right):
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
        for name in left
    )


def read(shared, connection):
    opened = open_shared(shared)
    connection.send(same(opened, TENSORS))
    connection.recv()  # the owner has closed the memory
    connection.send(same(opened, TENSORS))
    opened["f32"].zero_()
    connection.send("written to")


def test_another_process_sees_the_tensors_even_after_the_owner_closed_them():
    memory = SharedMemory(TENSORS)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    reader = context.Process(target=read, args=(memory.tensors, theirs))
    reader.start()
    assert ours.recv()
    own = open_shared(memory.tensors)
    memory.close()
    with pytest.raises(OSError):
        open_shared(memory.tensors)
    ours.send("closed")
    assert ours.recv() and ours.recv() == "written to"
    reader.join(10)
    assert same(own, TENSORS), "a reader's writes reach nobody else"


def test_no_file_descriptor_stays_open():
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    memory = SharedMemory(TENSORS)
    opened = open_shared(memory.tensors)
    memory.close()
    assert same(opened, TENSORS)
    del opened, memory
    assert descriptors() == before


def test_parts_keep_the_order_and_exceed_the_size_only_with_one_tensor():
    tensors = {str(i): torch.zeros(n) for i, n in enumerate([1, 2, 30, 4, 4, 1])}
    parts = list(split(tensors, 40))  # bytes; each number has 4
    assert [list(part) for part in parts] == [["0", "1"], ["2"], ["3", "4", "5"]]
    assert list(split({}, 40)) == []
