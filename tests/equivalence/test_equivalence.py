"""Every rung of the equivalence ladder holds, and the documented table is up to date."""

import math
from pathlib import Path
from typing import get_args

import pytest
import torch

from equivalence.__main__ import main, page
from equivalence.families import FAMILIES, HF_FAMILIES
from equivalence.ladder import RUNGS, Bench, Rung, max_difference, saved_weights
from equivalence.update_rungs import ragged_batch, weights_after_step
from grpo_components.settings import ModelType

PAGE = Path(__file__).parents[2] / "docs" / "equivalence.md"


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
    lines = (PAGE.parent / "models.md").read_text().splitlines()
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


def test_a_failed_rung_is_reported_by_exit_code_table_and_last_line(tiny_policy, tmp_path, capsys):
    failing = Rung("one = another", "weights", 1e-5, lambda bench: 1.0)
    good = Rung("nothing = nothing", "nothing", 0.0, lambda bench: 0.0)
    output = tmp_path / "table.md"
    arguments = ["--output", str(output), "--policy", str(tiny_policy)]
    assert main(arguments, [good, failing]) == 1
    first, second = output.read_text().splitlines()[-2:]
    assert first == "| 1 | nothing = nothing | nothing | 0 | 0 | yes |"
    assert second == "| 2 | one = another | weights | 1.0e-05 | 1.0e+00 | **NO** |"
    assert "one = another" in capsys.readouterr().err.splitlines()[-1]
    assert main(arguments, [good]) == 0
    assert "NO" not in output.read_text()
    assert not failing.holds(math.nan)


ONE = torch.tensor([1.0, 0.0])


def test_a_difference_of_0_means_equal_names_shapes_dtypes_and_bits():
    for first, second, gap in ((1.0, 0.0, 0.0), (1.5, 0.0, 0.5), (1.0, -0.0, math.ulp(0.0))):
        assert max_difference({"a": ONE}, {"a": torch.tensor([first, second])}) == gap
    nan = torch.tensor([math.nan, 0.0])
    for other in (*({"a": each} for each in (nan, ONE.double(), ONE[None])), {"b": ONE}):
        assert max_difference({"a": ONE}, other) == math.inf
    assert max_difference({"a": ONE}, {"a": ONE, "b": ONE}) == math.inf
