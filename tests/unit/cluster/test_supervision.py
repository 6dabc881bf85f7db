"""The exit code and the last line on stderr show how a run ended."""

import asyncio
import contextlib
import os
import pty
import runpy
import signal
import sys
from fnmatch import fnmatchcase

import pytest
from omegaconf import OmegaConf
from torchtune import config
from yaml import YAMLError

from grpo_components.cluster.role_host import named_failure
from grpo_components.cluster.supervision import exit_code, root_cause, undisturbed
from grpo_components.errors import (
    ConfigError,
    DisagreementError,
    DryRunEnd,
    FailedSamplesError,
    RoleFailedError,
    SkippedStepsError,
    StarvedError,
)

REFUSED = RoleFailedError("trainer_0", "loss: my.Loss returned shape ()", "/a.log", "refused")
DEAD = RoleFailedError("generator_0", "died", "/runs/a/logs/generator_0.log", "died")


@pytest.fixture(autouse=True)
def handlers():
    """The signal handlers of a fresh process, and pytest's own again afterwards."""
    fresh = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL)
    fresh[signal.SIGINT] = signal.default_int_handler
    before = {number: signal.signal(number, handler) for number, handler in fresh.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def raising(error):
    def main():
        raise error

    return main


def missing_key():
    config = OmegaConf.create({"a": 1})
    OmegaConf.set_struct(config, True)
    config.b  # noqa: B018 -- raises


def unset_user_key():
    OmegaConf.create({"user": {}}).user.x  # noqa: B018 -- raises


WRONG = "loss.clip_low: 2  given;\n\tallowed: above 0"
OF_A_COMPONENT = ConfigError("advantages", "my.Ranks returned shape [3]", "[B, G]")
TRACE = 'Traceback (most recent call last):\n  File "/here/my.py", line 3, in f\nKeyError: 1\n'
WITH_TRACE = ConfigError(
    "loss", "my.Loss raised KeyError (/here/my.py:3): 1", "...", TRACE.rstrip()
)


@pytest.mark.parametrize(
    ("main", "code", "out", "err"),
    [
        (lambda: None, 0, "", ""),
        (raising(ValueError(WRONG)), 2, "", "config error: loss.clip_low: 2 given; allowed: *\n"),
        (raising(YAMLError(WRONG)), 2, "", "config error: loss.clip_low: 2 given; allowed: *\n"),
        (missing_key, 2, "", "config error: *\n"),
        (unset_user_key, 2, "", "config error: user.x: missing; allowed: *user: in the config\n"),
        (raising(OF_A_COMPONENT), 2, "", f"config error: {OF_A_COMPONENT}\n"),
        (raising(WITH_TRACE), 2, "", f"{TRACE}config error: {WITH_TRACE}\n"),
        (raising(ExceptionGroup("", [OF_A_COMPONENT])), 1, "", f"error: {OF_A_COMPONENT}\n"),
        (raising(ExceptionGroup("", [ValueError("no number")])), 1, "", "*\nerror: no number\n"),
        (raising(DryRunEnd("steps  \x1b[2J")), 0, "steps  \\x1b[2J\n", ""),
    ],
)
def test_each_end_has_its_code_and_its_line(main, code, out, err, capsys):
    """Errors are of the config before the start, and of the run once a loop raised them."""
    assert exit_code(main) == code
    shown, said = capsys.readouterr()
    assert shown == out and fnmatchcase(said, err.replace("[", "[[]")), said
    assert not err.startswith("config error") or said.count("\n") == 1


def test_the_line_of_a_wrong_config_has_300_characters_at_most(capsys):
    exit_code(raising(ValueError(f"loss: {'x' * 5000}; allowed: a loss")))
    err = capsys.readouterr().err
    assert err.startswith("config error: loss: xxx") and err.endswith("; allowed: a loss\n")
    assert len(err.rstrip("\n")) <= 300


def through_torchtune(body, tmp_path, monkeypatch):
    """The exit code of a recipe whose main is parsed by torchtune, as in a run."""

    @config.parse
    def recipe_main(cfg):
        return body()

    path = tmp_path / "config.yaml"
    path.write_text("seed: 1\n")
    monkeypatch.setattr("sys.argv", ["recipe", "--config", str(path)])
    return exit_code(recipe_main)


@pytest.mark.parametrize("code", [0, None, 7, "bye"])
def test_code_that_the_recipe_calls_cannot_end_the_run_silently(
    code, tmp_path, monkeypatch, capsys
):
    component = tmp_path / "component.py"
    component.write_text(f"import sys\n\ndef call():\n    sys.exit({code!r})\n")
    call = runpy.run_path(str(component))["call"]
    assert through_torchtune(call, tmp_path, monkeypatch) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and f"component.py:4 called sys.exit({code!r})" in err


def test_the_recipe_and_torchtune_may_end_the_process(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as normal_end:
        through_torchtune(lambda: None, tmp_path, monkeypatch)
    with pytest.raises(SystemExit) as of_a_fork:
        through_torchtune(lambda: sys.exit(3), tmp_path, monkeypatch)
    assert (normal_end.value.code, of_a_fork.value.code) == (None, 3)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (DEAD, "generator_0 died\n  its log: /runs/a/logs/generator_0.log"),
        (REFUSED, "loss: my.Loss returned shape () (found by trainer_0)"),
        (TimeoutError("no batch within 600 s"), "no batch within 600 s"),
        (TimeoutError(), "TimeoutError"),
        (SkippedStepsError("max_skipped_steps: 2"), "max_skipped_steps: 2"),
        (FailedSamplesError("max_failed_samples: 2"), "max_failed_samples: 2"),
        (StarvedError("10 groups in a row"), "10 groups in a row"),
        (DisagreementError("mismatch/fresh_kl"), "mismatch/fresh_kl"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_an_expected_failure_is_1_and_its_cause_without_a_traceback(error, line, wrapped, capsys):
    raised = ExceptionGroup("loops", [ExceptionGroup("inner", [error])]) if wrapped else error
    assert exit_code(raising(raised)) == 1
    assert capsys.readouterr() == ("", f"error: {line}\n")


@pytest.mark.parametrize(
    ("error", "kind", "what"),
    [
        (
            ConfigError("loss", "my.Loss returned None", "a pair"),
            *("refused", "loss: my.Loss returned None; allowed: a pair"),
        ),
        (SystemExit(0), "raised", "failed: SystemExit: 0"),
        (TimeoutError("a collective"), "waited", "failed: TimeoutError: a collective"),
        (KeyError("x"), "raised", "failed: KeyError: 'x'"),
    ],
)
def test_every_error_of_a_role_becomes_a_named_failure(error, kind, what):
    log = "/runs/a/logs/trainer_0.log"
    with pytest.raises(RoleFailedError) as raised, named_failure("trainer_0", log, "train_step"):
        raise error
    assert (raised.value.role, raised.value.kind, raised.value.what) == ("trainer_0", kind, what)
    assert raised.value.log == log


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_unexpected_error_is_1_with_a_traceback_and_the_error_as_the_last_line(wrapped, capsys):
    def forked_recipe():
        try:
            raise AssertionError("a bug in a fork")
        except AssertionError as error:
            if wrapped:
                raise ExceptionGroup("loops", [error]) from None
            raise

    assert exit_code(forked_recipe) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and "in forked_recipe" in err
    assert err.splitlines()[-1] == "error: a bug in a fork"


def test_control_characters_in_an_error_are_escaped(capsys):
    for error in (ValueError, TimeoutError, AssertionError):
        exit_code(raising(error("in 'a\x1b[2J'")))
    failed = RoleFailedError("generator_0", "failed: KeyError: '\x1b[31m'", "/runs/log", "raised")
    exit_code(raising(failed))
    err = capsys.readouterr().err
    assert "\x1b" not in err and err.count(r"\x1b[2J") >= 3 and r"\x1b[31m" in err


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGINT, 130, "interrupted: all roles stopped\n"),
        (signal.SIGTERM, 143, "terminated: all roles stopped\n"),
        (signal.SIGHUP, 129, "terminal closed: all roles stopped\n"),
    ],
)
@pytest.mark.parametrize("in_loop", [False, True])
def test_ctrl_c_sigterm_and_sighup_end_a_run_after_its_clean_up(number, code, line, in_loop, capfd):
    """And say at once that it has begun."""
    cleaned_up = []

    async def run():
        asyncio.get_running_loop().call_soon(signal.raise_signal, number)
        async with asyncio.TaskGroup() as loops:
            loops.create_task(asyncio.Event().wait())  # a loop that never ends

    def main():
        try:
            asyncio.run(run()) if in_loop else signal.raise_signal(number)
        finally:
            with undisturbed():
                cleaned_up.append(capfd.readouterr().err)

    assert exit_code(main) == code
    assert capfd.readouterr() == ("", line)
    assert cleaned_up == ["interrupted: stopping all roles ...\n"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_roles_that_the_same_signal_ended_are_not_the_cause(number, capsys):
    def main():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise ExceptionGroup("loops", [DEAD]) from None

    assert exit_code(main) in (129, 143)
    assert "generator_0" not in capsys.readouterr().err


def test_the_second_hangup_is_ignored_and_after_nohup_the_first(capsys):
    def main():
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            signal.raise_signal(signal.SIGHUP)

    assert exit_code(main) == 129
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert exit_code(lambda: signal.raise_signal(signal.SIGHUP)) == 0


CLOSED = """
import os, signal, sys, threading
from grpo_components.cluster.supervision import exit_code, undisturbed

def main():
    try:
        sys.stdout.write("running\\n")
        sys.stdout.flush()
        while not threading.Event().wait(0.1):  # a signal just before a wait is seen after it
            pass
    finally:
        with undisturbed():
            signal.raise_signal(signal.SIGHUP)
            sys.stdout.write("cleaning up\\n")
            sys.stdout.flush()
            open("cleaned", "w").close()

sys.exit(exit_code(main))
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_run_whose_terminal_is_closed_cleans_up(number, tmp_path):
    """Before, or during its clean-up: no line that it writes then may stop it."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(sys.executable, [sys.executable, "-c", CLOSED], os.environ)
    assert b"running" in os.read(terminal, 4096)
    if number == signal.SIGTERM:
        os.kill(pid, number)
    os.close(terminal)  # the kernel sends SIGHUP
    _, status = os.waitpid(pid, 0)
    assert (tmp_path / "cleaned").exists()
    assert os.waitstatus_to_exitcode(status) in (129, 128 + number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("fails", [False, True])
def test_signals_are_ignored_during_a_clean_up_and_work_again_after_it(number, fails):
    received = []
    signal.signal(number, lambda *_: received.append(number))
    with contextlib.suppress(OSError), undisturbed():
        signal.raise_signal(number)
        received.append("cleaned up")
        if fails:
            raise OSError("while cleaning up")
    signal.raise_signal(number)
    assert received == ["cleaned up", number]


def test_the_cause_is_a_failed_role_or_else_the_first_failure():
    others = [TimeoutError("no batch"), OSError("closed")]
    assert root_cause(ExceptionGroup("loops", others)) is others[0]
    assert root_cause(others[0]) is others[0]
    nested = ExceptionGroup("watching", [ExceptionGroup("loops", [*others, DEAD])])
    assert root_cause(nested) is DEAD
