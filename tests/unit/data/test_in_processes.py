"""Several processes give what one does, in the same order, and name what they cannot do."""

import os

import pytest

from grpo_components.data import datasets as module


@pytest.fixture(autouse=True)
def few_alone(monkeypatch):
    monkeypatch.setattr(module, "_ALONE", 3)
    monkeypatch.setattr(module, "_CHUNK", 2)


@pytest.mark.parametrize("count", [0, 2, 3, 4, 100])
def test_every_item_comes_once_and_in_order(count):
    items = list(range(count))
    found = list(module._in_processes(lambda n: (n * n, os.getpid()), items, "squares"))
    assert [square for square, _ in found] == [n * n for n in items]
    assert all((pid == os.getpid()) == (count < 4) for _, pid in found)


def test_an_error_of_another_process_is_raised_here():
    def work(n):
        if n == 50:
            raise ValueError("row 51 is none")
        return n

    with pytest.raises(ValueError, match="row 51 is none"):
        list(module._in_processes(work, list(range(100)), "rows"))
