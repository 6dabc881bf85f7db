"""A watch of a run, and the lines that it has shown."""

from functools import partial

import pytest

from grpo_components.records.guards import RunWatch


@pytest.fixture
def notes():
    return []


@pytest.fixture
def new_watch(notes, tmp_path):
    return partial(RunWatch, notes.append, tmp_path, averages_tokens=True, ends="7 (<end>)")


@pytest.fixture
def watch(new_watch):
    return new_watch()
