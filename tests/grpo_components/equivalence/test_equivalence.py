"""Every rung of the equivalence ladder holds, and the documented table is that of this ladder."""

import math
from pathlib import Path
from typing import get_args

import pytest
import torch

from grpo_components.equivalence import __main__ as equivalence
from grpo_components.equivalence import engine_rungs as equivalence_engine_rungs
from grpo_components.equivalence import family_rungs as equivalence_family_rungs
from grpo_components.equivalence import resume as equivalence_resume
from grpo_components.equivalence import rungs as equivalence_rungs
from grpo_components.equivalence.__main__ import RUNGS, Result, Rung
from grpo_components.equivalence.families import FAMILIES
from grpo_components.equivalence.rungs import Bench, largest_difference, ragged_batch
from grpo_components.setting_types import ModelType

PAGE = Path(__file__).parents[3] / "docs" / "equivalence.md"
SLOW = {  # they start Ray or vLLM
    equivalence_rungs.recipe_is_plain_loop,
    equivalence_rungs.synchronous_runs_are_identical,
    equivalence_resume.resumed_is_uninterrupted,
    equivalence_rungs.generator_is_trainer,
    equivalence_engine_rungs.pulled_engine_is_fresh_engine,
    equivalence_engine_rungs.engine_pulled_under_load_is_fresh_engine,
    equivalence_family_rungs.every_family_samples_from_what_it_trained,
}


@pytest.fixture(scope="module")
def bench(tiny_policy, tmp_path_factory):
    bench = Bench(tmp_path_factory.mktemp("equivalence"))
    yield bench
    bench.close()


@pytest.mark.parametrize(
    "rung",
    [
        pytest.param(
            rung,
            id=rung.measure.__name__,
            marks=[pytest.mark.slow] if rung.measure in SLOW else [],
        )
        for rung in RUNGS
    ],
)
def test_a_rung_holds(bench, rung):
    result = Result(rung, rung.measure(bench))
    assert result.holds, f"{result.difference} is above {rung.tolerance}"


def test_the_families_are_those_that_a_config_may_name():
    assert {family.model_type for family in FAMILIES.values()} == set(get_args(ModelType))


def test_the_documented_table_is_this_ladder_and_all_of_it_holds():
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line[2:3].isdigit()]
    assert len(rows) == len(RUNGS)
    results = [Result(rung, float(row[4])) for rung, row in zip(RUNGS, rows, strict=True)]
    assert all(result.holds for result in results)
    assert equivalence.page(results) == PAGE.read_text(), "run `make equivalence`"


def other_advantage(bench):
    """A comparison that must fail: one response of twelve has an advantage that is 1 % higher."""
    records, advantages = ragged_batch(bench)
    other = advantages.copy()
    other[5] *= 1.01
    base = equivalence_rungs.saved_weights(Path(bench.cfg.base_model_path))
    left = equivalence_rungs.updated(bench, records, advantages)
    right = equivalence_rungs.updated(bench, records, other)
    return largest_difference(left, right) / largest_difference(left, base)


def test_a_rung_that_does_not_hold_is_told_by_exit_code_table_and_last_line(
    tiny_policy, tmp_path, capsys
):
    """At the tolerance of the update rungs, which therefore see so small an error."""
    tolerance = next(r for r in RUNGS if r.name.startswith("micro-batched")).tolerance
    broken = Rung("one advantage = another", "weights", tolerance, other_advantage)
    good = Rung("nothing = nothing", "nothing", 0.0, lambda bench: 0.0)
    output = tmp_path / "table.md"
    assert equivalence.main(["--output", str(output)], [good, broken]) == 1
    first, second = output.read_text().splitlines()[-2:]
    assert first == "| 1 | nothing = nothing | nothing | 0 | 0 | yes |"
    assert second.startswith("| 2 | one advantage = another | weights | 1.0e-05 | ")
    assert second.endswith(" | **NO** |")
    told = capsys.readouterr().err.splitlines()
    assert told[-1] == "error: this rung does not hold: one advantage = another"
    assert equivalence.main(["--output", str(output)], [good]) == 0
    assert "NO" not in output.read_text()


def test_a_difference_that_is_no_number_holds_no_rung():
    assert not Result(Rung("a", "b", 1.0, lambda bench: math.nan), math.nan).holds


ONE = torch.tensor([1.0, 0.0])


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"a": torch.tensor([1.0, 0.0])}, 0.0),
        ({"a": torch.tensor([1.5, 0.0])}, 0.5),
        ({"a": torch.tensor([1.0, -0.0])}, math.ulp(0.0)),
        ({"a": torch.tensor([math.nan, 0.0])}, math.inf),
        ({"a": ONE.double()}, math.inf),
        ({"a": ONE[None]}, math.inf),
        ({"b": ONE}, math.inf),
        ({"a": ONE, "b": ONE}, math.inf),
    ],
)
def test_no_difference_means_the_same_names_shapes_dtypes_and_bits(other, expected):
    assert largest_difference({"a": ONE}, other) == expected
