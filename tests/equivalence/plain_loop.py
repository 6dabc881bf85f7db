"""Trains with GRPO in a plain synchronous loop: no Ray, ledger, buffer, server or recipe."""

from __future__ import annotations

from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np
from torchtune import config

from equivalence.roles import GENERATOR, TRAINER, RoleProcess, tiny_arguments
from grpo_components.rendezvous import local_rendezvous
from grpo_components.settings import Settings
from grpo_components.trajectory import PackedTrajectories, concatenate


def plain_loop(cfg: Settings, scratch: Path) -> tuple[list[PackedTrajectories], Path]:
    """Train synchronously: generate groups one by one, train a step, load the weights, repeat."""
    arguments, prompts = tiny_arguments(cfg)
    advantages_of = config.instantiate(cfg.advantages)
    batches: list[PackedTrajectories] = []
    group_ids = count()
    first = {"rank": 0, "rendezvous": local_rendezvous()}
    with (
        closing(RoleProcess(GENERATOR, **arguments.generator)) as generator,
        closing(RoleProcess(TRAINER, **first, **arguments.trainer)) as trainer,
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
            advantages = advantages_of(np.array(rewards))
            trainer.call("train_step", batch, advantages.ravel(), step)
            version = trainer.call("gather_weights")
            generator.call("load_weights", version, trainer.call("export_weights", version)[0])
            batches.append(batch)
        trainer.call("hold_state", False)
        trainer.call("write_state", str(scratch / "saved"))
        return batches, scratch / "saved"
