"""Rungs that compare whole runs of the recipe at `max_staleness: 0`."""

import math
import signal
from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np
from lib.whole_runs import assert_audited, batch_hashes, finish, transformers_policy, wait_for_line
from torchtune import config

from equivalence.ladder import SYNCHRONOUS, Bench, max_difference, rung, saved_weights
from equivalence.roles import GENERATOR, TRAINER, tiny_arguments
from grpo_components.records.resume import last_attempt
from grpo_components.rendezvous import local_rendezvous
from grpo_components.trajectory import batch_hash, concatenate

_SAVING = ("save_every_n_steps=1", "async_checkpoint=true", "keep_last_n=2")


@rung(
    "asynchronous at `max_staleness: 0` = plain synchronous loop",
    "`tune run` with 4 groups in flight on Ray, and a plain loop over Generator and Trainer: "
    "hash of every batch, and the weights after 3 steps",
    0.0,
)
def recipe_is_plain_loop(bench: Bench) -> float:
    hashes, saved = _plain_loop(bench)
    run = _synchronous_run(bench)
    if not hashes or [*batch_hashes(run).values()] != hashes:
        return math.inf
    return max_difference(saved_weights(run / "checkpoints/latest"), saved_weights(saved))


@rung(
    "two runs at `max_staleness: 0` are identical",
    "`tune run` with whole pushes and with `push: delta`: hash of every batch, and the weights "
    "after 3 steps",
    0.0,
)
def synchronous_runs_are_identical(bench: Bench) -> float:
    return _difference(_synchronous_run(bench), bench.run("push=delta"))


@rung(
    "resumed = uninterrupted, at `max_staleness: 0`",
    "`tune run` killed with SIGKILL after its first checkpoint and resumed, and one without "
    "interruption: hash of every batch, and the weights after 3 steps; the audit passes over "
    "both attempts",
    0.0,
)
def resumed_is_uninterrupted(bench: Bench) -> float:
    return _difference(_synchronous_run(bench), _killed_and_resumed(bench))


@rung(
    "resumed = uninterrupted, policy of transformers",
    "as the rung before, with the tiny policy as a model of transformers",
    0.0,
    nightly=True,
)
def resumed_is_uninterrupted_by_transformers(bench: Bench) -> float:
    policy = transformers_policy(bench.base)
    return _difference(bench.run(*policy), _killed_and_resumed(bench, *policy))


def _synchronous_run(bench: Bench) -> Path:
    return bench.once("synchronous run", lambda: bench.run("push=whole"))


def _killed_and_resumed(bench: Bench, *overrides: str) -> Path:
    process, folder = bench.tune(*SYNCHRONOUS, *overrides, *_SAVING)
    wait_for_line(process, r".*step 1: saved")
    process.send_signal(signal.SIGKILL)
    finish(process)
    resume = (f"output_dir={folder}", "resume_from_checkpoint=true")
    bench.run(*overrides, *_SAVING, *resume)
    assert_audited(folder)
    assert last_attempt(folder) == 1
    return folder


def _difference(one: Path, other: Path) -> float:
    if not batch_hashes(one) or batch_hashes(one) != batch_hashes(other):
        return math.inf
    latest = "checkpoints/latest"
    return max_difference(saved_weights(one / latest), saved_weights(other / latest))


def _plain_loop(bench: Bench) -> tuple[list[str], Path]:
    """Train without Ray, ledger, buffer, server or recipe; return batch hashes and a checkpoint."""
    cfg = bench.cfg
    arguments, prompts = tiny_arguments(cfg)
    advantages_of = config.instantiate(cfg.advantages)
    hashes, group_ids, saved = [], count(), bench.folder() / "saved"
    first = {"rank": 0, "rendezvous": local_rendezvous()}
    with (
        closing(bench.process(GENERATOR, **arguments["generator"])) as generator,
        closing(bench.process(TRAINER, **first, **arguments["trainer"])) as trainer,
    ):
        for step in range(cfg.num_steps):
            groups, rewards = [], []
            for _ in range(cfg.groups_per_step):
                prompt, epoch = next(prompts)
                group, summary, _ = generator.call(
                    "generate_group", prompt, epoch, next(group_ids), 0, cfg.generator.temperature
                )
                groups.append(group)
                rewards.append(summary.rewards)
            batch = concatenate(groups)
            trainer.call("train_step", batch, advantages_of(np.array(rewards)).ravel(), step)
            version = trainer.call("gather_weights")
            generator.call("load_weights", version, trainer.call("export_weights", version)[0])
            hashes.append(batch_hash(batch))
        trainer.call("hold_state", False)
        trainer.call("write_state", str(saved))
    return hashes, saved
