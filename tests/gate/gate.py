"""Proves that a change moved no number: compares short runs with goldens, key by key (`make gate`).

The policy has weights of random integers, which are the same on every machine; its tokenizer and
data are the tiny policy's. `--write` makes the goldens.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from lib import dry_runs
from lib.chaos import RECIPE, TUNE, Fault, forked_recipe
from lib.forked_run import ForkedRun
from lib.goldens import TOLERANCE, differences, read_goldens, write_goldens
from lib.whole_runs import assert_same_run, audit, metrics, records
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

TINY = Path("/tmp/torchtune-async-grpo/tiny_policy")
GOLDENS = Path(__file__).with_name("goldens.txt")
LEFT_OUT = {
    "time/": "seconds of a clock",
    "throughput/": "tokens by seconds of a clock",
    "memory/": "peak memory, which depends on when garbage is collected",
}
"""Prefix of metric keys that are not compared -> why."""
REWARDS = '''"""Rewards that vary over the responses of a random policy."""


class HasDigit:
    max_reward = 1.0

    def __call__(self, *, response_text, **sample):
        return float(any(c.isdigit() for c in response_text))


class Letters:
    def __call__(self, *, response_text, **sample):
        return sum(c in "aeiourst" for c in response_text) / (len(response_text) or 1)
'''
EVERY_RUN = (
    "generator.backend=vllm",
    *("rewards.correctness.is_success=false", "rewards.digit._component_=gate_rewards.HasDigit"),
    *("rewards.digit.is_success=true", "rewards.letters._component_=gate_rewards.Letters"),
    *("eval_dataset.num_rows=8", "optimizer.lr=1e-3", "save_every_n_steps=100"),
)
DETERMINISTIC = ("max_staleness=0", "push_every_n_steps=1", "pull_every_m_rollouts=1")
RECORDED = (
    *("num_steps=3", "num_generators=2", "groups_per_step=4", "group_size=4"),
    *("rollouts_in_flight=4", "stale_groups=wait", "loss.kl_coeff=0.01"),
    *("generator.max_response_tokens=100", "pull_every_m_rollouts=1", "rollouts_logged_per_step=4"),
)
FAULTS = (
    Fault("replay_buffer", "add", 3),
    Fault("generator_0", "generate_group", 4, delay_s=0.05),
    Fault("parameter_server", "push", 2),
    Fault("reference_0", "add_logprobs", 8),
    Fault("trainer_0", "train_step", 3),
)
KILLED = (
    *("num_steps=5", "num_generators=2", "groups_per_step=4", "group_size=4", "max_restarts=20"),
    *("rollouts_in_flight=3", "save_every_n_steps=2", "stale_groups=wait", "loss.kl_coeff=0.001"),
)
STARTING, SAYING = threading.Lock(), threading.Lock()


def exact_policy(folder):
    """Write a policy of the tiny one's shape, with random integer weights; returns a checksum."""
    shutil.copytree(TINY, folder)
    chance, weights = random.Random(0), {}
    for name, tensor in load_file(TINY / "model.safetensors").items():
        integers = np.frombuffer(chance.randbytes(2 * tensor.numel()), "<i2").astype(np.float32)
        values = torch.tensor(integers / 2**15).reshape(tensor.shape)
        if "embed" in name:
            values[0] *= 2  # the end of text, so that responses end at different lengths
        is_norm, scale = "norm" in name, 2 if "embed" in name else 4 if tensor.dim() == 1 else 8
        weights[name] = values / scale + is_norm
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and f.name != "tiny_policy.json"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:32]


def machine():
    """What the bits of a float depend on."""
    cpu = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M))
    of_module, version = importlib.metadata.packages_distributions(), importlib.metadata.version
    return {
        "cpu": "{vendor_id} family {cpu family} model {model}".format_map(cpu),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        **{name: version(of_module[name][0]) for name in ("torch", "torchtune", "vllm", "numpy")},
    }


class Gate:
    """The parts, each of which returns its golden lines, and what is wrong with it otherwise."""

    def __init__(self, folder):
        self.folder, self.policy = folder, folder / "policy"
        self.checksum = exact_policy(self.policy)
        (folder / "gate_rewards.py").write_text(REWARDS)

    def start(self, *command, env=()):
        """Run a command to its end; returns its output. Its driver is forked."""
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        with STARTING:
            run = ForkedRun(command, cwd=self.folder, env={**environment, **dict(env)})
        output, _ = run.communicate(timeout=600)
        if run.returncode != 0:
            raise RuntimeError(f"exit code {run.returncode}\n{output}")
        return output

    def tune(self, name, *overrides, config="tiny_async_grpo", recipe=RECIPE, env=()):
        """Run `tune run`; returns its folder and its output."""
        folder = self.folder / name
        given = (f"output_dir={folder}", f"base_model_path={self.policy}", *EVERY_RUN, *overrides)
        return folder, self.start(TUNE, "run", recipe, "--config", config, *given, env=env)

    def golden_run(self, config):
        """Metrics, batches and weights of five steps that are the same in every run."""
        folder, _ = self.tune(config, *DETERMINISTIC, "num_steps=5", config=config)
        for record in metrics(folder):
            groups = {}
            for key, value in record.items():
                if not key.startswith(tuple(LEFT_OUT)):
                    group, slash, name = key.partition("/")
                    groups.setdefault(group if slash else "-", {})[name or key] = value
            for group, values in groups.items():
                yield f"{config} step {record['step']} {group}", values
        num_generators = OmegaConf.load(folder / "config.yaml").num_generators
        base = {"version": 0, "checksum": None}
        loaded = {f"generator_{n}": base for n in range(num_generators)}
        for event in records(folder / "receipts.jsonl"):
            if event["event"] == "load":
                loaded[event["role"]] = {name: event[name] for name in ("version", "checksum")}
            elif event["event"] == "step":
                kept = {"batch_hash": event["batch_hash"], "generators": dict(loaded)}
                yield f"{config} step {event['step']} receipt", kept
            elif event["event"] == "end":
                yield f"{config} step {event['step']} end", {"generators": dict(loaded)}

    def replayed_run(self):
        """An asynchronous run comes out the same to the bit if its events are replayed."""
        original, _ = self.tune("recorded", *RECORDED)
        replay, output = self.tune("replayed", *RECORDED, f"replay_events={original}")
        assert "events in the recorded order" in output, output
        assert_same_run(original, replay, num_steps=3)
        assert any(r["staleness/max"] for r in metrics(original)[1:]), "nothing was stale"
        return ()

    def killed_roles(self):
        """A run in which a role of each kind is killed completes, and its audit holds."""
        with STARTING:  # a command that starts while the environment changes gets a bad address
            recipe, environment = forked_recipe(self.folder, FAULTS)
        folder, output = self.tune("killed", *KILLED, recipe=recipe, env=environment)
        died = Counter(re.findall(r"^(\w+) died.* \(restart \d+ of", output, re.M))
        assert died >= Counter(fault.role for fault in FAULTS), output
        assert "Traceback" not in output, output
        code, table = audit(folder)
        assert code == 0 and "= 20 trained + 0 dropped" in table, table
        return ()

    def dry_runs(self):
        """What every shipped config would run, on as many GPUs as it needs."""
        self.start(Path(dry_runs.__file__), self.folder)
        for config, plan in json.loads((self.folder / "dry_runs.json").read_text()).items():
            for heading, lines in plan.items():
                yield f"dry_run {config} {heading}", lines


def compare(part, folder, goldens, exact):
    """Run a part and say what differs; returns its values, and whether all hold."""
    started, found, wrong = time.monotonic(), {}, []
    name, run = part
    try:
        found = json.loads(json.dumps(dict(run())))
    except (AssertionError, RuntimeError, OSError, LookupError, ValueError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        log = folder / f"{name}.log"
        log.write_text(str(error))
        last = (str(error).splitlines() or ["no more is known"])[-1]
        wrong = [f"  {name}: {type(error).__name__} at `{where.line}` ({log}): {last}"]
    if goldens and not wrong:
        own = {key: value for key, value in goldens.items() if key.startswith(f"{name} ")}
        for key in {**own, **found}:
            one, other = own.get(key, "(none)"), found.get(key, "(none)")
            wrong += differences(key, one, other, exact or name == "dry_run")
    verdict = f"{len(wrong)} differ" if wrong else f"{len(found)} lines" if found else "holds"
    say(*wrong, f"{name}: {verdict}, {time.monotonic() - started:.0f} s")
    return found, not wrong


def say(*lines):
    with SAYING:
        sys.stdout.writelines(f"{line}\n" for line in lines)
        sys.stdout.flush()


def main():
    """Run all parts, two at a time, and compare; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="make the goldens of this code")
    parser.add_argument("--only", nargs="+", metavar="PART", help="compare these parts alone")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write takes all parts: --only is for comparing")
    sys.modules["__main__"].__file__ = None  # a forked driver would import this script
    started, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="gate-"))
    gate, here = Gate(folder), machine()
    goldens = {} if options.write else read_goldens(GOLDENS)
    there, policy = goldens.get("machine", here), goldens.get("policy", gate.checksum)
    if there != here:
        say(
            *(f"  {n}: {there.get(n)} -> {here.get(n)}" for n in here if here[n] != there.get(n)),
            f"The goldens are of another machine or other versions: numbers may differ by "
            f"{TOLERANCE:g} of them, hashes are not compared. For bits, make goldens here, "
            f"of the code before your change.",
        )
    if policy != gate.checksum:
        say(f"  policy (tokenizer, data, weights): {policy} -> {gate.checksum}")
    parts = {
        "replayed": gate.replayed_run,
        "killed": gate.killed_roles,
        "dry_run": gate.dry_runs,
        "tiny_async_grpo_2x2": lambda: gate.golden_run("tiny_async_grpo_2x2"),
        "tiny_async_grpo": lambda: gate.golden_run("tiny_async_grpo"),
    }
    parts = {name: run for name, run in parts.items() if name in (options.only or parts)}
    with ThreadPoolExecutor(2) as pool:  # what takes longest, imports, needs a core each
        done = pool.map(lambda part: compare(part, folder, goldens, there == here), parts.items())
    found, holds = zip(*done, strict=True)
    good, took = all(holds) and policy == gate.checksum, f"{time.monotonic() - started:.0f} s"
    if good:
        shutil.rmtree(folder)
    if options.write and good:
        values = {key: value for part in reversed(found) for key, value in part.items()}
        write_goldens(GOLDENS, {"machine": here, "policy": gate.checksum, **values})
    say(f"gate: {'nothing' if good else f'something (runs in {folder})'} differs, {took}")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
