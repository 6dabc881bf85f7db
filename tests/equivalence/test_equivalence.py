"""Every rung of the equivalence ladder holds, and the documented table is up to date."""

from pathlib import Path
from typing import get_args

import pytest

from equivalence.__main__ import page
from equivalence.families import FAMILIES, HF_FAMILIES
from equivalence.ladder import RUNGS, Bench, max_difference, saved_weights
from equivalence.update_rungs import ragged_batch, weights_after_step
from grpo_components.settings import ModelType

PAGE = Path(__file__).parents[2] / "docs" / "results" / "equivalence.md"


@pytest.fixture(scope="module")
def bench(tiny_policy, tmp_path_factory):
    bench = Bench(tmp_path_factory.mktemp("equivalence"), tiny_policy)
    yield bench
    bench.close()


@pytest.mark.parametrize(
    "rung",
    [
        pytest.param(
            rung, id=rung.measure.__name__, marks=[pytest.mark.nightly] if rung.nightly else []
        )
        for rung in RUNGS
    ],
)
def test_a_rung_holds(bench, rung):
    difference = rung.measure(bench)
    assert rung.holds(difference), f"{difference} is above {rung.tolerance}"


def test_the_families_are_those_that_a_config_may_name():
    assert {family.model_type for family in FAMILIES.values()} == set(get_args(ModelType))


def test_the_documented_families_of_transformers_are_those_of_the_rungs():
    lines = (PAGE.parents[1] / "models.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    documented = {row[0]: row for row in rows if len(row) == 6 and row[-1] == "yes"}
    assert documented.keys() == HF_FAMILIES.keys()
    for name, (_, model_type, _, shared, logprobs, _) in documented.items():
        assert model_type == f"`{HF_FAMILIES[name]().model_type}`"
        assert float(shared) < 1e-5
        assert float(logprobs) < 1e-4


def test_the_documented_table_is_up_to_date_and_every_rung_holds():
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line[2:3].isdigit()]
    differences = [float(row[4]) for row in rows]
    assert all(r.holds(difference) for r, difference in zip(RUNGS, differences, strict=True))
    assert page(RUNGS, differences) == PAGE.read_text(), "run `make equivalence`"


def test_the_tolerance_of_the_training_rungs_detects_a_changed_advantage(bench):
    """One of twelve advantages is 1 % higher."""
    records, advantages = ragged_batch(bench)
    other = advantages.copy()
    other[5] *= 1.01
    left = weights_after_step(bench, records, advantages)
    right = weights_after_step(bench, records, other)
    tolerance = next(r for r in RUNGS if r.name.startswith("FSDP")).tolerance
    change = max_difference(left, saved_weights(bench.base))
    assert max_difference(left, right) / change > tolerance
