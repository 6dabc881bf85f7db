"""Several processes give what one does, in the same order, and name what they cannot do."""

import os

import pytest
from lib.rows import Characters, write_rows
from tqdm import tqdm

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


def test_reading_and_tokenizing_show_how_far_they_are(monkeypatch, capsys, tmp_path):
    how = {"delay": 0, "mininterval": 0}  # a run waits for 5 s before it shows anything
    monkeypatch.setattr(module, "tqdm", lambda *args, **kwargs: tqdm(*args, **kwargs | how))
    rows = [{"question": f"{number}?", "answer": "#### 1"} for number in range(50)]
    source = write_rows(tmp_path / "rows.jsonl", *rows)
    module.gsm8k_dataset(Characters(), source=str(source))
    shown = capsys.readouterr().err
    assert f"reading {source}: 50 rows" in shown and "50/50" in shown.partition("tokenizing ")[2]
