"""On a GPU with turns there has to be room for the larger turn, and for what stays of the other."""

import re
from pathlib import Path

import pytest

from grpo_tools.memory_plan.__main__ import main
from grpo_tools.memory_plan.role_memory import GIB, Device, RoleMemory
from grpo_tools.memory_plan.turns import in_turns

COLOCATED = "qwen3B_colocated_grpo_1gpu"
GPU = Device(is_gpu=True, gib=80.0)


def plan(capsys, *overrides):
    code = main(["--config", COLOCATED, *overrides])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def role(name, total, resting, smaller=""):
    found = RoleMemory(name, 4, 1.0, int(total * GIB), {}, smaller=smaller)
    found.resting = int(resting * GIB)
    return found


@pytest.mark.parametrize(
    ("training", "sampling", "most", "smaller"),
    [(60, 50, 62, "less cache"), (50, 60, 70, "less cache"), (79, 20, 81, "num_trainers")],
)
def test_a_gpu_holds_the_larger_turn_and_what_stays_of_the_other(training, sampling, most, smaller):
    trainer = role("trainer", training, 10, smaller="num_trainers")
    together = in_turns(trainer, role("generator", sampling, 2), GPU, "less cache")
    assert (together.count, together.share, together.total) == (4, 1.0, most * GIB)
    assert together.smaller == smaller


def test_turns_take_less_than_both_roles_and_no_less_than_either(capsys):
    code, shown, _ = plan(capsys)
    assert code == 0
    totals = {
        name: float(total)
        for name, total in re.findall(r"^1 x (\w+) .* ([\d.]+)$", shown, re.MULTILINE)
    }
    (used,) = re.findall(r"in turns: ([\d.]+) of 80.0 GiB", shown)
    assert max(totals.values()) < float(used) < sum(totals.values())
    docs = (Path(__file__).parents[3] / "docs/sizing.md").read_text()
    printed = [line for line in shown.splitlines() if re.match("1 x |.* in turns: ", line)]
    assert len(printed) == 4 and all(line in docs for line in printed)
    code, shown, errors = plan(capsys, "colocate=false", "--gpus", "1")
    assert code == 2 and "need 2 GPUs" in errors


def test_what_does_not_fit_is_named_and_a_reference_is_beside_both_turns(capsys):
    code, _, errors = plan(capsys, "--gpu-memory=48")
    assert code == 2 and errors.startswith("does not fit: num_trainers: ")
    reference = ["loss.kl_coeff=0.1", "gpus_per_trainer=0.8", "gpus_per_reference=0.2"]
    large = ["generator.kv_cache_gib=70", "generator.gpu_memory_utilization=0.83"]
    code, shown, errors = plan(capsys, *reference, *large)
    assert code == 2 and "1 GPUs with trainer and generator in turns + reference: " in shown
    named = [line.split()[3] for line in errors.splitlines()]
    assert named == ["generator.gpu_memory_utilization:", "generator.kv_cache_gib:"]
