"""A run whose generator has two tensor-parallel workers: exact, supervised, and nothing is left."""

import os
import re
import signal

import psutil
from lib.whole_runs import SHORT, assert_audited, finish, metrics, receipts, records, wait_for_line


def test_a_killed_generator_takes_its_workers_along_and_the_run_completes(tune):
    synchronous = ("max_staleness=0", "pull_every_m_rollouts=1", "num_steps=3")
    parallel = ("generator.tensor_parallel_size=2", "push=delta")
    process, output_dir = tune(*SHORT, *synchronous, *parallel)
    wait_for_line(process, r"step +1/")
    (pid,) = (
        role["pid"]
        for role in records(output_dir / "logs" / "roles.jsonl")
        if role["role"] == "generator_0"
    )
    children = psutil.Process(pid).children(recursive=True)
    log = (output_dir / "logs" / "generator_0.log").read_text()
    workers = {int(pid) for pid in re.findall(r"Worker\S* pid=(\d+)\)", log)}  # vLLM warns there
    assert len(workers) == 2 and workers <= {child.pid for child in children}, log
    os.kill(pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, "workers, rewards, or Python's tracker of shared memory"

    code, output = finish(process)
    assert code == 0, output
    assert "generator_0 died" in output and "generator_0 is back" in output
    assert_audited(output_dir)
    steps = {record["step"]: record for record in metrics(output_dir)}
    assert sorted(steps) == [0, 1, 2, 3] and steps[3]["restarts"] == 1
    assert all(steps[step]["mismatch/generator_kl"] < 1e-6 for step in (1, 2, 3))
    versions = [list(receipt["token_versions"]) for receipt in receipts(output_dir)]
    assert versions == [["0"], ["1"], ["2"]], "each batch is sampled by the weights of its step"
