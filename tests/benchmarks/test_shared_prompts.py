"""Both passes of the benchmark give the same gradient, so it compares only costs."""

import pytest
import shared_prompts

SMALL = shared_prompts.Setting(12, 6, groups=2, group_size=3, tokens_per_micro_batch=60)


def test_both_passes_have_the_same_gradient_and_only_one_shares_prompts():
    assert shared_prompts.disagreement(SMALL) < 1e-5
    padded, shared = (shared_prompts.tokens_of(case, SMALL) for case in shared_prompts.PASSES)
    sequences = shared_prompts.random_groups(SMALL)
    assert padded >= sum(len(s.prompt_ids) + len(s.response_ids) for s in sequences) > shared


def test_the_command_prints_its_table(monkeypatch, capsys):
    for name in ("in_child", "in_lean_child"):
        monkeypatch.setattr(shared_prompts, name, lambda function, *args: function(*args))
    monkeypatch.setattr(shared_prompts, "peak_memory_gib", lambda run, device: 1.0)
    monkeypatch.setattr(shared_prompts.torch, "set_num_threads", lambda number: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shared_prompts.main(["--shapes", "12/6", "9/3", "--repeats", "1", "--groups", "2"])
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 4 and len({line.count("|") for line in table}) == 1


def test_a_shape_without_two_numbers_is_refused(capsys):
    for shape in ("12", "12/0", "a/b"):
        with pytest.raises(SystemExit):
            shared_prompts.main(["--shapes", shape])
        assert "--shapes" in capsys.readouterr().err
