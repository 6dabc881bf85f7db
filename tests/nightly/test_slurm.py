"""The batch script for Slurm, with a stand-in Slurm."""

import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from lib.whole_runs import wait_for_line
from omegaconf import OmegaConf
from torchtune.config._utils import _merge_yaml_and_cli_args

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "slurm" / "async_grpo.sbatch"
CONFIG = ROOT / "recipes" / "configs" / "tiny_async_grpo_2x2.yaml"
RUN = ("async_grpo_full_finetune_distributed", "--config", "tiny_async_grpo_2x2")
SCONTROL = """#!/bin/sh
case "$1 $2" in
    "show node") echo "NodeName=here NodeAddr=127.0.0.1 CPUTot=2" ;;
    "show hostnames") echo here ;;
    requeue*) echo "$2" >requeued ;;
esac
"""
TUNE = """#!/bin/sh
printf '%s\\n' "$@" >arguments
echo "$RAY_AUTH_TOKEN" >token
ps -eo args >commands
trap 'kill $!; exit 143' TERM
echo running
[ -z "$FAILS" ] || exit 1
sleep 100 >/dev/null &
wait
"""
NO_RAY = {
    "ray": "#!/bin/sh\n[ -z $RAY_FAILS ] || { echo no such port; exit 1; }\nexec sleep 100\n",
    "python": "#!/bin/sh\ntest $1 = - || { echo 7000; exit; }\n"
    "[ -z $RAY_FAILS ] || exec sleep 100\n",
}
"""Commands in place of Ray's: all nodes join at once, or Ray fails and none does."""


@pytest.fixture
def job(tmp_path):
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    started = []

    def start(*arguments, real_ray=False, **variables):
        texts = {"scontrol": SCONTROL, "squeue": "#!/bin/sh\necho $STATE\n", "tune": TUNE}
        for name, text in (texts | ({} if real_ray else NO_RAY)).items():
            (stubs / name).write_text(text)
            (stubs / name).chmod(0o755)
        environment = os.environ | {
            "PATH": f"{stubs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_JOB_ID": f"test{os.getpid()}",
            "SLURM_JOB_NODELIST": "here",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_CPUS_ON_NODE": "2",
            "SLURMD_NODENAME": "here",
            "STATE": "RUNNING",
            **variables,
        }
        process = subprocess.Popen(
            ["bash", str(SCRIPT), *RUN, *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def save_checkpoint(output_dir):
    checkpoints = output_dir / "checkpoints"
    (checkpoints / "step_2").mkdir(parents=True)
    (checkpoints / "latest").symlink_to("step_2")


def finish(process):
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def test_a_start_without_output_dir_is_refused(job):
    code, output = finish(job())
    assert code == 2 and "with output_dir=..." in output


def test_a_first_start_does_not_take_over_the_checkpoints_of_an_earlier_run(job, tmp_path):
    save_checkpoint(tmp_path / "run")
    code, output = finish(job(f"output_dir={tmp_path}/run"))
    assert code == 2
    assert f"{tmp_path}/run has a run: give another output_dir, or resume_" in output


def test_a_job_has_the_exit_code_of_its_run_and_stays_out_of_the_queue(job, tmp_path):
    code, output = finish(job(f"output_dir={tmp_path}/run", FAILS="yes"))
    assert code == 1, output
    assert not (tmp_path / "requeued").exists()


def test_a_ray_that_fails_ends_the_job_with_its_output_before_the_run(job, tmp_path):
    code, output = finish(job(f"output_dir={tmp_path}/run", RAY_FAILS="yes"))
    assert code != 0
    assert "here: Ray did not start" in output and "no such port" in output
    assert not (tmp_path / "arguments").exists()


@pytest.mark.parametrize(
    ("restarts", "saves", "state", "requeues"),
    [
        pytest.param(0, False, "RUNNING", True, id="before-the-first-checkpoint"),
        pytest.param(7, True, "RUNNING", True, id="after-a-checkpoint"),
        pytest.param(7, False, "RUNNING", False, id="without-progress"),
        pytest.param(0, True, "COMPLETING", False, id="scancel"),
    ],
)
def test_a_signalled_job_is_requeued_unless_in_vain(
    job, tmp_path, restarts, saves, state, requeues
):
    process = job(f"output_dir={tmp_path}/run", SLURM_RESTART_COUNT=str(restarts), STATE=state)
    wait_for_line(process, "running$")
    assert "resume_from_checkpoint=true" not in (tmp_path / "arguments").read_text()
    if saves:
        save_checkpoint(tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 143, output
    assert (tmp_path / "requeued").exists() is requeues, output


def test_a_requeued_job_resumes_on_a_ray_of_its_own_with_a_secret_token(job, tmp_path):
    save_checkpoint(tmp_path / "run")
    given = f"output_dir={tmp_path}/run"
    process = job(given, real_ray=True, SLURM_RESTART_COUNT="1")
    wait_for_line(process, "running$")
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 143, output

    overrides = (tmp_path / "arguments").read_text().split()[1 + len(RUN) :]
    assert overrides[:2] == [given, "resume_from_checkpoint=true"]
    assert re.fullmatch(r"ray\.address=127\.0\.0\.1:\d+", overrides[2])
    config = OmegaConf.load(CONFIG)
    merged = _merge_yaml_and_cli_args(Namespace(config=str(CONFIG)), overrides)
    for override in overrides:
        key, _, value = override.partition("=")
        assert OmegaConf.select(config, key, default="absent") != "absent"
        assert str(OmegaConf.select(merged, key)).lower() == value

    token = (tmp_path / "token").read_text().strip()
    assert re.fullmatch(r"[0-9a-f]{64}", token)
    commands = (tmp_path / "commands").read_text()
    assert "raylet" in commands and token not in commands
    assert not list(Path("/tmp").glob(f"ray-test{os.getpid()}*"))
