"""Calls every component of a config once, on one small made-up batch, before anything starts.

Copies are called, and the states of the random number generators are restored: when the run
begins, counters and random numbers are as if no component had been called.
"""

from __future__ import annotations

import contextlib
import copy
import random
import tempfile
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, cast

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray

from grpo_components.config.components import RAISES, SHIPPED_ENVIRONMENT, build, environment_kind
from grpo_components.config.environment_trial import try_environment
from grpo_components.config.model_trial import try_teacher, try_training
from grpo_components.data.columns import reward_input
from grpo_components.errors import fail
from grpo_components.objective.component_errors import name_of, named_failure
from grpo_components.objective.composition import Penalties, has_entropy_gradient, objective_losses
from grpo_components.objective.contracts import (
    advantages_of,
    check_entropy,
    check_first_weights,
    check_numbers,
    checked_aggregation,
    checked_weights,
)
from grpo_components.objective.doubts import (
    doubts_about_advantages,
    doubts_about_loss,
    doubts_about_micro_batches,
    doubts_about_sign,
)
from grpo_components.objective.losses import LossInputs
from grpo_components.objective.objective import Objective, TrainedObjective
from grpo_components.objective.off_policy import NoCorrection, correction_weights
from grpo_components.rewards.pool import RewardInput, reward_specs
from grpo_components.rewards.reward_trial import RewardTrial
from grpo_components.settings import Settings
from grpo_components.slow_calls import told_if_slow
from grpo_components.training.sample import TrainSample

LENGTHS = (3, 1, 4, 2)
"""Number of tokens of each made-up response."""
_MOST_SIBLINGS, _ROWS = 16, 4


def try_components(
    cfg: Settings,
    tokenizer: Any,
    dataset: Any,
    held_out: Any,
    objective: Objective,
) -> tuple[list[str], list[str]]:
    """Call each component once as the run will; refuse one that breaks the contract of its kind.

    Returns warnings, and each reward's scores of known answers.
    """
    scores: list[str] = []
    about_rates = try_training(cfg)
    doubts = about_rates if cfg.trains else []
    if cfg.teacher:
        try_teacher(cfg, cfg.teacher.path)
    if cfg.checkpointer is not None and not cfg.is_hugging_face:
        node = cfg.checkpointer.copy()
        with tempfile.TemporaryDirectory() as folder:  # it creates its folder: not the run's
            if "output_dir" in node:
                node.output_dir = folder
            build("checkpointer", node)
    with _undisturbed(), contextlib.ExitStack() as ending:
        trial = _begin_rewards(cfg, dataset)
        if trial is not None:  # it runs in the background meanwhile
            ending.callback(trial.close)
        if cfg.trains:
            doubts += _try_objective(cfg, objective.trained)
        rewards = _made_rewards(min(cfg.group_size, _MOST_SIBLINGS))
        advantages = objective.advantages
        allowed = "rewards, a NumPy array [B, G] -> advantages [B, G]"
        with named_failure("advantages", name_of(advantages), RAISES, allowed):
            advantages_of(_own(advantages), rewards)
            found = doubts_about_advantages(_own(advantages), min(cfg.group_size, _MOST_SIBLINGS))
            doubts += [f"warning: advantages: {name_of(advantages)}: {each}" for each in found]
        if not (cfg.train_from or cfg.environment == SHIPPED_ENVIRONMENT):
            prompts = [dataset[row] for row in range(min(len(dataset), _ROWS))]
            try_environment(cfg, tokenizer, prompts)
        if trial is not None:
            with told_if_slow("the trial of the rewards"):
                scores, found = trial.finish()
                doubts += found
            data = {} if cfg.eval_only else {"dataset": dataset}
            data |= {} if cfg.rollout_only else {"eval_dataset": held_out}
            doubts += trial.check_rows(data, _samples_of(cfg))
    return doubts, scores


@contextlib.contextmanager
def _undisturbed() -> Generator[None]:
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(pytorch)


def _own(component: Any) -> Any:
    """Return a copy of a component for a trial call; the component itself if copying fails."""
    try:
        return copy.deepcopy(component)
    except Exception:  # a component's parts may raise anything
        return component


def _sent(key: str, component: Any) -> Any:
    """Return the component as the trainer's process gets it: pickled and unpickled."""
    name = name_of(component)
    allowed = "one that can be pickled: without open files, locks or generators"
    with named_failure(key, name, RAISES, allowed):
        return cloudpickle.loads(cloudpickle.dumps(component))


def _try_objective(cfg: Settings, objective: TrainedObjective) -> list[str]:
    keys = ("loss", "penalties", "aggregation", "off_policy", "ptx")
    parts = {key: getattr(objective, key) for key in keys}
    ours = {key: _sent(key, part) for key, part in parts.items() if key != "ptx" or part}
    for step in dict.fromkeys((0, cfg.num_steps - 1)):
        inputs = _made_for(cfg, objective.needs_reference, step)
        _try_loss(ours["loss"], ours["penalties"], ours["off_policy"], inputs)
    counts = np.array([*LENGTHS, 0])
    allowed = "token counts [S] -> weights [S]"
    guarded = named_failure("aggregation", name_of(ours["aggregation"]), RAISES, allowed)
    with guarded, np.errstate(divide="ignore", invalid="ignore"):
        checked_aggregation(ours["aggregation"], counts)
    if "ptx" in ours:
        _try_ptx(ours["ptx"])
    return [f"warning: loss: {name_of(ours['loss'])}: {each}" for each in _doubts(cfg, ours)]


def _doubts(cfg: Settings, ours: dict[str, Any]) -> list[str]:
    """Return warnings about the loss; test stale tokens only if the run leaves some uncorrected."""
    loss, penalties = ours["loss"], ours["penalties"]
    with named_failure("loss", name_of(loss), RAISES, "a LossInputs -> losses [N]"):
        inputs = _made_for(cfg, True, 0)
        if getattr(loss, "needs_proximal", False):
            inputs = replace(inputs, proximal_logprobs=inputs.trainer_logprobs.detach())
        doubts = [*doubts_about_sign(loss)]
        doubts += doubts_about_micro_batches(loss, penalties, inputs)
        several = not cfg.is_synchronous or cfg.ppo_epochs * cfg.updates_per_batch > 1
        if several and isinstance(ours["off_policy"], NoCorrection):
            doubts += doubts_about_loss(loss)
    return doubts


def _try_loss(loss: Any, penalties: Penalties, off_policy: Any, inputs: LossInputs) -> None:
    name, correction_name = name_of(loss), name_of(off_policy)
    allowed = "a LossInputs -> losses [N], metrics [N] by name"
    start = inputs.trainer_logprobs.detach()
    log_ratios = start - inputs.generator_logprobs
    if getattr(loss, "needs_proximal", False) or getattr(off_policy, "anchors_at_proximal", False):
        inputs = replace(inputs, proximal_logprobs=start)
    weights = None
    if not isinstance(off_policy, NoCorrection):
        weighs = "log ratios [N], response of each token [N] -> weights [N]"
        with named_failure("off_policy", correction_name, RAISES, weighs):
            returned = correction_weights(off_policy, inputs, start)
        weights = checked_weights(correction_name, returned, log_ratios)
        check_first_weights(correction_name, weights, log_ratios)
    for applied in (None,) if weights is None else (None, weights):
        with named_failure("loss", name, RAISES, allowed):
            losses, _ = objective_losses(loss, penalties, inputs, applied, name)
            if not has_entropy_gradient(loss, penalties):
                check_entropy(name, losses, inputs)
            check_numbers(name, losses, inputs)


def _made_for(cfg: Settings, has_reference: bool, step: int) -> LossInputs:
    """Make up a micro-batch with tokens of as many policy versions as a real batch may have."""
    return made_inputs(has_reference, cfg.teacher is not None, cfg.max_staleness + 1, step)


def made_inputs(has_reference: bool, has_teacher: bool, versions: int, step: int) -> LossInputs:
    """Make a small fixed micro-batch, with staleness below `versions`."""
    numbers = torch.Generator().manual_seed(0)
    size = sum(LENGTHS)

    def between(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(size, generator=numbers)

    trainer = between(-3.0, -0.1)
    responses = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return LossInputs(
        trainer_logprobs=trainer.clone().requires_grad_(),
        generator_logprobs=trainer + between(-0.1, 0.1),
        advantages=torch.tensor([1.0, -1.0, -0.5, 0.0])[responses],
        sequence_ids=responses,
        staleness=torch.arange(size) % versions,
        step=step,
        reference_logprobs=trainer + between(-0.1, 0.1) if has_reference else None,
        entropy=between(0.1, 2.0).requires_grad_(),
        teacher_logprobs=trainer + between(-0.1, 0.1) if has_teacher else None,
    )


def _made_rewards(group_size: int) -> NDArray[np.float64]:
    """Return rewards of three groups: alternating 0 and 1, all 0, and all different."""
    numbers = np.arange(group_size)
    groups = [numbers % 2, np.zeros(group_size), numbers / group_size]
    return np.array(groups, np.float64)


def _try_ptx(ptx: Any) -> None:
    name, allowed = name_of(ptx), "what supervised_dataset makes: coeff, and batch(update)"
    with named_failure("ptx", name, RAISES, allowed):
        batch, coeff = ptx.batch(0), float(ptx.coeff)
        right = bool(batch) and all(isinstance(sample, TrainSample) for sample in batch)
        if not (right and coeff >= 0 and sum(sample.num_tokens for sample in batch)):
            fail("ptx", f"{name} gives no examples with tokens", allowed)


def _samples_of(cfg: Settings) -> Callable[..., RewardInput]:
    """Return a function that makes a reward's arguments from a prompt and a response."""
    more: Any = {}
    if environment_kind(cfg.environment) == "agents":
        given = {str(node.get("name", "reward")): 0.0 for node in cfg.rewards.values()}
        more = {"agent_reward": given, "transcript": []}
    return lambda prompt, response="": {**reward_input(prompt, response, "stop"), **more}


def _begin_rewards(cfg: Settings, dataset: Any) -> RewardTrial | None:
    """Start the trial of the rewards, with the known answers of the first rows as responses."""
    if cfg.train_from or not cfg.rewards:  # recorded groups have their rewards
        return None
    sample_of = _samples_of(cfg)
    prompts = [dataset[row] for row in range(min(len(dataset), _ROWS))]
    samples = [sample_of(prompt, str(prompt["answer"])) for prompt in prompts]
    specs = reward_specs(cast(Any, cfg.rewards))
    return RewardTrial(specs, samples, cfg.timeouts.reward_s)
