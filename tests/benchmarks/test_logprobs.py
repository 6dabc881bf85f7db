"""Full logits and every chunk size give the same logprobs and gradients in the benchmark."""

import logprobs
import pytest

SMALL = logprobs.Setting(vocabulary=384, sequences=3, prompt_tokens=5, response_tokens=30, width=16)


def test_every_case_has_the_same_logprobs_and_gradients():
    batch = logprobs.random_batch(SMALL)
    assert list(SMALL.cases) == [logprobs.WHOLE, "16", "64", "all (90)"]
    seen = [logprobs.build_pass(SMALL, chunk)(batch) for chunk in SMALL.cases.values()]
    for each in seen[1:]:
        assert each == pytest.approx(seen[0], rel=1e-4)
    assert seen[0][0] < 0 < seen[0][1]


def test_the_command_prints_a_row_for_every_case(monkeypatch, capsys):
    for name in ("in_child", "in_lean_child"):
        monkeypatch.setattr(logprobs, name, lambda function, *args: function(*args))
    monkeypatch.setattr(logprobs, "peak_memory_gib", lambda run, device: run() and 1.0)
    sizes = ["--sequences", "2", "--prompt-tokens", "4", "--response-tokens", "20", "--width", "8"]
    logprobs.main(["--quick", "--vocabulary", "384", "500", *sizes])
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 2 * len(["full logits", "16", "all (40)"])
    assert len({line.count("|") for line in table}) == 1


def test_wrong_arguments_are_refused(capsys):
    with pytest.raises(SystemExit):
        logprobs.main(["--width", "20"])
    assert "--width" in capsys.readouterr().err
