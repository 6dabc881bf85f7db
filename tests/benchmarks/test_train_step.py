"""Our trainer and the padded baseline make the same step, so the benchmark compares only costs."""

from dataclasses import replace

import pytest
import train_step

SMALL = train_step.Setting(
    vocabulary=384, sequences=6, longest_response=48, tokens_per_micro_batch=80
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train-step")
    train_step.write_base_model(SMALL, folder)
    return folder


def test_both_trainers_have_the_same_loss_and_gradient(folder):
    assert len(train_step.our_plan(SMALL, train_step.ragged_batch(SMALL)[0])) >= 3
    first = train_step.compare(SMALL, folder, repeats=1).first
    assert first["ours"] == pytest.approx(first["baseline"], rel=1e-4)
    assert first["ours"]["grad_norm"] > 0


@pytest.mark.parametrize("flags", [["--quick"], ["--alone"], ["--shapes", "20/6"]])
def test_the_command_prints_its_table(flags, monkeypatch, capsys):
    for name in ("in_child", "in_lean_child"):
        monkeypatch.setattr(train_step, name, lambda function, *args: function(*args))
    monkeypatch.setattr(train_step, "peak_memory_gib", lambda run, device: run() and 1.0)
    sizes = ["--sequences", "4", "--longest-response", "32", "--tokens-per-micro-batch", "256"]
    train_step.main([*flags, "--vocabulary", "384", "--repeats", "1", *sizes])
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 3
    assert table[0].count("|") == table[2].count("|")


@pytest.mark.parametrize("shape", [(40, 4), (5, 30)])
def test_groups_of_a_shape_share_prompts_of_its_length(shape):
    setting = replace(SMALL, sequences=24, shape=shape)
    trajectories, _ = train_step.ragged_batch(setting)
    for start in range(0, 24, train_step.GROUP_SIZE):
        group = trajectories[start : start + train_step.GROUP_SIZE]
        assert len({tuple(t.prompt_ids) for t in group}) == 1
    for (mean, spread), lengths in (
        ((shape[0], 0.2), [len(t.prompt_ids) for t in trajectories]),
        ((shape[1], 0.5), [len(t.response_ids) for t in trajectories]),
    ):
        assert mean * (1 - spread) <= min(lengths) <= max(lengths) <= mean * (1 + spread)


def test_wrong_arguments_are_refused(capsys):
    for arguments in (
        ["--dtype", "bf16"],
        ["--vocabulary", "9", "--model", "qwen2_5_3b"],
        ["--shapes", "40"],
        ["--shapes", "40/11", "--alone"],
    ):
        with pytest.raises(SystemExit):
            train_step.main(arguments)
        assert f"error: {arguments[0]}: " in capsys.readouterr().err
