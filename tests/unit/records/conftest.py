"""A watch of a run, and the lines that it has shown."""

import pytest

from grpo_components.records.guards import RunWatch


@pytest.fixture
def notes():
    return []


@pytest.fixture
def watch(notes):
    return RunWatch(notes.append, averages_tokens=True, ends="7 (<end>)")
