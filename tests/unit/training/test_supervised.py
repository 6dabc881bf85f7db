"""Which examples an update has depends on its number alone, and every epoch has each once."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_components.training.supervised import SupervisedExamples


def make(size, per_update, seed=3):
    examples = [([number], [number, number]) for number in range(size)]
    return SupervisedExamples(examples, coeff=0.1, examples_per_update=per_update, seed=seed)


def rows(examples, update):
    return [sample.trajectory.prompt_index for sample in examples.batch(update)]


@given(size=st.integers(1, 9), per_update=st.integers(1, 20), epochs=st.integers(1, 3))
def test_every_epoch_has_each_example_once(size, per_update, epochs):
    examples = make(size, per_update)
    updates = -(-size * epochs // per_update)
    drawn = [row for update in range(updates) for row in rows(examples, update)]
    for epoch in range(epochs):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_a_resumed_run_has_the_examples_that_it_would_have_had():
    assert rows(make(7, 3), 5) == rows(make(7, 3), 5)
    assert [rows(make(50, 50), epoch) for epoch in (0, 1)] != [rows(make(50, 50), 0)] * 2
    assert rows(make(50, 50), 0) != rows(make(50, 50, seed=4), 0)
