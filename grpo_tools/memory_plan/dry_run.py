"""Says what a run would do, for `dry_run: true`: roles, model, data, steps and where it writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from grpo_components.config.components import build
from grpo_components.config.data import left_out
from grpo_components.config.replayed import available_cpus, run_folder
from grpo_components.config.start_roles import (
    GENERATOR,
    PARAMETER_SERVER,
    REFERENCE,
    REPLAY_BUFFER,
    REWARD_MODEL,
    TRAINER,
)
from grpo_components.objective.component_errors import name_of
from grpo_components.objective.objective import Objective
from grpo_components.offline.partial_runs import TRAJECTORIES, roles_of
from grpo_components.records.resume import find_checkpoint, last_attempt, run_of
from grpo_components.records.run_folder import free_name, is_used, real_path
from grpo_components.settings import Settings, processes_of
from grpo_components.state_files import read_state
from grpo_tools.memory_plan.plan import plan_run
from grpo_tools.memory_plan.role_memory import GIB, GPU_GIB

_DONE = "the config is right and its components were called; nothing was started or written"


def plan(cfg: Settings, dataset: Any, held_out: Any, objective: Objective) -> tuple[str, list[str]]:
    """Return a text that says what the run would do, and the problems, e.g. too little memory."""
    held_out = held_out if cfg.evaluates else ()
    gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    memory, problems = plan_run(
        cfg,
        max(each.max_prompt_length for each in (dataset, held_out) if len(each)),
        needs_reference=objective.trained.needs_reference,
        num_gpus=len(gpus) or None,
        gpu_gib=gpus[0].total_memory / GIB if gpus else GPU_GIB,
    )
    sections = {
        "dry run": [_DONE],
        "kind": [_kind(cfg)],
        "roles": list(_roles(cfg, objective)),
        "machine": [_machine(cfg)],
        "model": list(_model(cfg)),
        "memory": memory,
        "data": list(_data(cfg, dataset, held_out)),
        "rewards": [*_rewards(cfg), *objective.reward_scores],
        "objective": list(_objective(cfg, objective)),
        "steps": list(_steps(cfg, dataset)),
        "output": list(_output(cfg)),
        "doubts": list(objective.doubts),
    }
    width = max(map(len, sections)) + 2
    lines = [
        f"{'' if number else heading:<{width}}{text}"
        for heading, texts in sections.items()
        for number, text in enumerate(texts)
    ]
    return "\n".join(lines), problems


def _counted(number: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{number} {what}{'' if number == 1 else plural}"


def _kind(cfg: Settings) -> str:
    if cfg.replay_events:
        until = f" up to step {cfg.replay_until}" if cfg.replay_until else ""
        return f"a replay of {run_folder(cfg.replay_events)}{until}"
    if cfg.eval_only:
        return f"an evaluation only, of {_weights(cfg)}"
    if cfg.rollout_only:
        return f"rollouts only: no training, groups go to {TRAJECTORIES}"
    if cfg.train_from:
        return f"training only, on the groups of {cfg.train_from}"
    return f"training, {'synchronous' if cfg.is_synchronous else 'asynchronous'}"


def _roles(cfg: Settings, objective: Objective) -> Iterator[str]:
    """Yield a line for each kind of role that the run would start: number, class and device."""
    trainer, generator = roles_of(cfg, TRAINER, GENERATOR)
    has_rewards = generator == GENERATOR
    more = f", each with room for {_counted(cfg.rollouts_in_flight, 'group')}"
    if has_rewards:
        more += f", and with {_counted(cfg.reward_workers, 'reward process')}"
    counts = {"replay_buffer": 1, "parameter_server": 1}
    counts |= processes_of(cfg, objective.trained.needs_reference)
    paths = {"generator": generator, "trainer": trainer, "reference": REFERENCE}
    paths |= {"teacher": REFERENCE, "reward_model": REWARD_MODEL}
    paths |= {"replay_buffer": REPLAY_BUFFER, "parameter_server": PARAMETER_SERVER}
    for role, path in paths.items():
        computes = path in (GENERATOR, TRAINER, REFERENCE, REWARD_MODEL)  # stand-ins do not
        share = getattr(cfg, f"gpus_per_{role}", 1.0)
        device = f"each {share:g} of a GPU" if computes and cfg.device == "cuda" else "cpu"
        if path == GENERATOR and (workers := cfg.generator.tensor_parallel_size) > 1:
            place = "GPUs" if cfg.device == "cuda" else "processes on the CPU"
            device = f"each on {workers} {place}"
        if cfg.colocate and role == "generator":
            device += ", in turns with the trainers"
        if counts[role]:
            name, details = path.rpartition(".")[2], more if role == "generator" else ""
            yield f"{_counted(counts[role], role)} ({name}), {device}{details}"


def _machine(cfg: Settings) -> str:
    if cfg.ray.address is not None:
        return f"the Ray cluster at ray.address: {cfg.ray.address}, which was not asked"
    cpus = f"{available_cpus(cfg)} CPU cores"
    return f"{cpus}, {torch.cuda.device_count()} GPUs" if cfg.device == "cuda" else cpus


def _weights(cfg: Settings) -> str:
    return cfg.eval_only if isinstance(cfg.eval_only, str) else cfg.base_model_path


def _model(cfg: Settings) -> Iterator[str]:
    with torch.device("meta"):
        model = build("model", cfg.model)
    count = sum(parameter.numel() for parameter in model.parameters())
    yield f"{cfg.model._component_}, {count:,} parameters, computed in {cfg.dtype}"
    checkpoint = find_checkpoint(cfg.resume_from_checkpoint, real_path(cfg.output_dir))
    yield f"weights of {checkpoint or _weights(cfg)}"


def _data(cfg: Settings, dataset: Any, held_out: Any) -> Iterator[str]:
    if not cfg.eval_only:
        source = cfg.train_from or cfg.dataset.get("source", cfg.dataset._component_)
        longest = f"the longest has {dataset.max_prompt_length} tokens"
        yield f"{len(dataset):,} prompts of {source}, {longest}"
    if cfg.eval_dataset is not None and len(held_out):
        source = cfg.eval_dataset.get("source", cfg.eval_dataset._component_)
        longest = f"the longest has {held_out.max_prompt_length} tokens"
        yield f"{len(held_out):,} held-out prompts of {source}, {longest}"
    yield from left_out(dataset, held_out)


def _rewards(cfg: Settings) -> Iterator[str]:
    if cfg.train_from:
        yield "as recorded"
        return
    for name, node in cfg.rewards.items():
        success = ", decides on success" if node.is_success else ""
        yield f"{name}: {node._component_}, weight {node.weight:g}{success}"
    if cfg.reward_model.path:
        yield f"reward_model: {cfg.reward_model.path}, weight {cfg.reward_model.weight:g}"
    yield f"in {cfg.environment._component_}"


def _objective(cfg: Settings, objective: Objective) -> Iterator[str]:
    if not cfg.trains:
        yield "none: nothing is trained"
        return
    trained = objective.trained
    parts = {"loss": trained.loss, "advantages": objective.advantages}
    parts |= {"aggregation": trained.aggregation, "off_policy": trained.off_policy}
    for key, part in parts.items():
        yield f"{key}: {name_of(part)}"
    if cfg.teacher:
        yield f"teacher: {cfg.teacher.path}, weight {cfg.teacher.coeff:g} in the advantages"
    if trained.ptx is not None:
        yield f"ptx: {name_of(trained.ptx)}"


def _steps(cfg: Settings, dataset: Any) -> Iterator[str]:
    if cfg.eval_only:
        yield f"none; one evaluation, {_counted(cfg.eval.samples_per_prompt, 'response')} a prompt"
        return
    prompts = cfg.num_steps * cfg.groups_per_step
    size = f"{cfg.groups_per_step} prompts x {cfg.group_size} responses"
    longest = "" if cfg.train_from else f" of up to {cfg.generator.max_response_tokens} tokens"
    yield f"{cfg.num_steps:,} of {size}{longest}"
    yield f"{prompts:,} prompts, {prompts / len(dataset):.2f} passes over the data"
    if cfg.evaluates:
        answers = _counted(cfg.eval.samples_per_prompt, "response")
        when = f"before the first, every {cfg.eval_every_n_steps} and after the last"
        yield f"evaluated {when}, {answers} a prompt"
    if not cfg.rollout_only:
        yield f"saved every {cfg.save_every_n_steps} and after the last"


def _output(cfg: Settings) -> Iterator[str]:
    folder = real_path(cfg.output_dir)
    checkpoint = find_checkpoint(cfg.resume_from_checkpoint, folder)
    yield str(folder)
    if checkpoint is not None:
        done = read_state(checkpoint / "state", "driver")["ledger"]["steps_done"]
        yield f"goes on after step {done}, as attempt {last_attempt(run_of(checkpoint)) + 1}"
        if run_of(checkpoint) == folder:
            return
    if is_used(folder):
        yield f"the earlier run there would be moved to {free_name(folder)}"
    elif not folder.exists():
        yield "a new folder"
