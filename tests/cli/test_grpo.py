"""The command `grpo` names what it can do, and hands over the rest of its arguments."""

import os
import subprocess
import sys

import pytest

from grpo_components._tune_run import RECIPE
from grpo_tools import __main__ as grpo
from grpo_tools.replay import __main__ as replay

COMMANDS = ("audit", "report", "plan", "simulate", "diagnose", "replay")


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["grpo", *arguments])
    return grpo.main()


def test_without_a_command_it_lists_all(monkeypatch, capsys):
    for arguments in ((), ("--help",)):
        assert run(monkeypatch, *arguments) == 0
        shown = capsys.readouterr().out
        assert all(f"  {name} " in shown for name in COMMANDS)


def test_an_unknown_command_is_an_error_that_lists_all(monkeypatch, capsys):
    assert run(monkeypatch, "audits") == 2
    assert capsys.readouterr().err.startswith("error: no command audits\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_has_an_example(monkeypatch, capsys, name):
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, name, "--help")
    shown = capsys.readouterr().out
    assert f"usage: grpo {name}" in shown and f"example: grpo {name} " in shown


def test_a_folder_that_is_no_run_is_one_line(monkeypatch, capsys, tmp_path):
    folder_alone = ("audit", "report", "simulate", "diagnose")
    for name, more in (*((name, ()) for name in folder_alone), ("replay", ("a=1",))):
        assert run(monkeypatch, name, str(tmp_path), *more) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_traceback():
    read, write = os.pipe()
    os.close(read)
    talks = "from grpo_tools.audit import __main__ as audit; audit.main = print\n"
    code = talks + "import sys; from grpo_tools.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "audit", "much to say"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_replay_is_a_run_with_the_config_and_the_events_of_the_first(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(replay, "tune", lambda: seen.append(sys.argv[1:]))
    (tmp_path / "config.yaml").touch()
    with pytest.raises(SystemExit):
        run(monkeypatch, "replay", str(tmp_path), "num_steps=2")
    assert run(monkeypatch, "replay", str(tmp_path), "output_dir=/new", "num_steps=2") == 0
    config = ["--config", f"{tmp_path}/config.yaml"]
    given = [f"replay_events={tmp_path}", "output_dir=/new", "num_steps=2"]
    assert seen == [["run", RECIPE, *config, *given]]
