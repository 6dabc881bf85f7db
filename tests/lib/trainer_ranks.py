"""Trainer ranks in processes of their own, batches for them, and the update that is expected."""

import math
import shutil
import tempfile
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torchtune.models.qwen2 import qwen2
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune, qwen2_tune_to_hf
from torchtune.training import FullModelHFCheckpointer

from grpo_components.exchange.staleness import StalenessContract
from grpo_components.exchange.weights import unpack_buckets
from grpo_components.models.meshes import Sharding
from grpo_components.objective.aggregation import TokenMean
from grpo_components.objective.composition import Penalties
from grpo_components.objective.losses import GRPOLoss
from grpo_components.objective.objective import TrainedObjective
from grpo_components.objective.off_policy import (
    NoCorrection,
    correction_weights,
    mismatch_summary,
    mismatch_sums,
)
from grpo_components.rendezvous import local_rendezvous
from grpo_components.training.step_result import StepResult
from grpo_components.training.trainer import Trainer
from grpo_components.training.trainer_options import TrainerOptions
from grpo_components.trajectory import pack
from lib.logprobs import whole_logprobs
from lib.loss_inputs import loss_inputs
from lib.policies import SIZES
from lib.role_process import RoleProcess
from lib.trajectories import trajectory as record

TEMPERATURE, LEARNING_RATE = 0.8, 0.5
build_model = partial(qwen2, **SIZES, tie_word_embeddings=True)
_NAMED = {"num_heads": 4, "num_kv_heads": 2, "dim": 32, "tie_word_embeddings": True}
to_tune, to_hf = (partial(f, **_NAMED) for f in (qwen2_hf_to_tune, qwen2_tune_to_hf))
WHOLE, SMALL = 10_000, 24
"""Token budgets: all in one forward pass; about two trajectories in each."""
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
"""Tolerances of float32 sums in another order; compared updates are a thousand times as large."""


# ---- losses -------------------------------------------------------------------------------------


class SquaredLogprobs:
    """A user's loss that returns no metrics."""

    def __call__(self, inputs):
        gap = inputs.trainer_logprobs - inputs.generator_logprobs
        return inputs.advantages * gap**2, {}


class Mean:
    """A loss that returns one mean, as TRL's losses do, in place of a loss per token."""

    def __call__(self, inputs):
        return (-inputs.trainer_logprobs * inputs.advantages).mean(), {}


class Ends:
    """A loss that ends its process without an error message."""

    def __call__(self, inputs):
        raise SystemExit(0)


class Steep:
    """A loss of ordinary numbers whose gradient is infinite."""

    def __call__(self, inputs):
        return (inputs.trainer_logprobs * 0).sqrt(), {}


class HalfBlind:
    """A loss that is NaN in one response, and whose gradient is finite everywhere."""

    def __call__(self, inputs):
        losses = -inputs.trainer_logprobs * inputs.advantages
        unknown = torch.where(inputs.advantages == 0.5, math.nan, 0.0)
        return losses + unknown, {}


# ---- the processes ------------------------------------------------------------------------------


def flat(result):
    if not isinstance(result, StepResult):
        return result
    # Whole runs compare the probe with the generators'.
    others = {k: v for k, v in vars(result).items() if k not in ("metrics", "probe_logprobs")}
    return {**result.metrics, **others}


class FreshTrainers:
    """Builds a new trainer rank for every job, so that jobs share no state."""

    def run(self, arguments, calls):
        trainer = None
        try:
            trainer = Trainer(**arguments)
            return [flat(getattr(trainer, method)(*args)) for method, *args in calls]
        finally:
            if trainer is not None:
                trainer.close()  # writes the last traces of a profile
            elif dist.is_initialized():
                dist.destroy_process_group()


def checkpointer_of(base, folder, model_type="QWEN2"):
    return partial(
        FullModelHFCheckpointer,
        checkpoint_dir=str(base),
        checkpoint_files=["model.safetensors"],
        model_type=model_type,
        output_dir=str(folder),
    )


def trainer_arguments(base, rank, num_ranks, rendezvous, folder, **changes):
    """Return arguments of Trainer; `changes` gives fields of its `options` or its `objective`."""
    values = {
        **{"num_ranks": num_ranks, "sharding": Sharding(), "collective_timeout_s": 60},
        **{"build_model": build_model, "base_model_path": str(base), "model_type": "QWEN2"},
        "build_checkpointer": checkpointer_of(base, folder, changes.get("model_type", "QWEN2")),
        **{"dtype": "fp32", "logprob_chunk_tokens": 7, "tokens_per_micro_batch": WHOLE},
        "contract": StalenessContract(9, 1),
        "build_optimizer": partial(torch.optim.SGD, lr=LEARNING_RATE),
        **{"loss": GRPOLoss(), "aggregation": TokenMean(), "off_policy": NoCorrection()},
        "penalties": Penalties(kl_coeff=0.0 if "loss" in changes else 0.1),
        **changes,
    }
    known = {field.name for field in fields(TrainerOptions)}
    records = {
        "options": TrainerOptions(**{name: values[name] for name in values.keys() & known}),
        "objective": TrainedObjective(**{name: values[name] for name in values.keys() - known}),
    }
    return {"rank": rank, "device": "cpu", "seed": 0, "rendezvous": rendezvous, **records}


class Ranks:
    """Calls a Trainer of one or more ranks, each in a process of its own."""

    def __init__(self, preload=()):
        self._processes, self._preload = [], preload

    def run(self, base, num_ranks, calls, *, raises=False, **changes):
        folder, rendezvous = tempfile.mkdtemp(prefix="ranks-"), local_rendezvous()
        arguments = [
            trainer_arguments(base, rank, num_ranks, rendezvous, folder, **changes)
            for rank in range(num_ranks)
        ]
        results = self.run_with(arguments, calls)
        shutil.rmtree(folder, ignore_errors=True)
        for result in results:
            if isinstance(result, Exception) and not raises:
                raise result
        return results

    def run_with(self, arguments, calls):
        """Make the calls on each rank; return by rank what they returned, or the error raised."""
        while len(self._processes) < len(arguments):
            process = RoleProcess("lib.trainer_ranks.FreshTrainers", preload=self._preload)
            self._processes.append(process)
        processes = self._processes[: len(arguments)]
        for process, own in zip(processes, arguments, strict=True):
            process.submit("run", own, calls)
        return [_outcome(process) for process in processes]

    def step(self, base, num_ranks, trajectories, advantages, **changes):
        """Return, by rank, what one training step and the export of its weights returned."""
        return self.run(base, num_ranks, [step(trajectories, advantages), *export(1)], **changes)

    def close(self):
        for process in self._processes:
            process.close()


def _outcome(process):
    try:
        return process.result()
    except Exception as error:  # the test raises or checks it
        return error


def random_policy(folder):
    from transformers import AutoConfig  # ranks need none of it

    torch.manual_seed(0)
    model = build_model()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    state_dict = {name: t.contiguous() for name, t in to_hf(model.state_dict()).items()}
    save_file(state_dict, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 32}
    sizes |= {"intermediate_size": 48, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    numbers = {"rope_theta": 1e6, "tie_word_embeddings": True}
    AutoConfig.for_model("qwen2", **sizes, **heads, **numbers).save_pretrained(folder)
    return folder


# ---- batches, and what their update is ----------------------------------------------------------


def make(number, prompt_length, mask, finish_reason="stop"):
    rng = np.random.default_rng(number)
    size = len(mask)
    prompt, response = (rng.integers(0, 64, count) for count in (prompt_length, size))
    logprobs = [rng.normal(-4.2, 0.5, size).astype(np.float32) for _ in range(2)]
    sampled = {"generator_logprobs": logprobs[0], "reference_logprobs": logprobs[1]}
    sampled |= {"token_versions": np.zeros(size, np.int32), "temperature": TEMPERATURE}
    own = {"prompt_ids": prompt, "group_id": number // 2, "finish_reason": finish_reason}
    return record(response, mask, **sampled, **own)


SHAPES = [(3, 5), (8, 2), (1, 9), (4, 4), (2, 1), (6, 7), (5, 3)]


def fresh():
    """Return responses of which the policy sampled every token."""
    return [make(i, prompt, [True] * response) for i, (prompt, response) in enumerate(SHAPES)]


RAGGED = fresh()
RAGGED[1] = make(1, 2, [True, False, False, True, True])  # the environment spoke in between
SIBLINGS = [  # groups of four, two and one
    replace(trajectory, prompt_ids=RAGGED[number].prompt_ids.copy())
    for trajectory, number in zip(RAGGED, (5, 5, 0, 5, 0, 5, 6), strict=True)
]
ADVANTAGES = np.array([1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.25], np.float32)

# The first half of the batch fits into one forward pass, the second half does not.
LOPSIDED = [make(i, 1, [True]) for i in range(4)] + [make(i, 9, [True] * 9) for i in range(4, 8)]


def hf_weights(base):
    return load_file(base / "model.safetensors")


def whole_model(base):
    model = build_model()
    model.load_state_dict(to_tune(hf_weights(base)))
    return model


def expected_update(
    base,
    trajectories,
    advantages,
    max_grad_norm=math.inf,
    aggregation=None,
    off_policy=None,
    loss=None,
    token_advantages=None,
):
    """Compute weights and metrics after one step, from whole logits of one sequence at a time."""
    penalties = Penalties(kl_coeff=0.1 if loss is None else 0.0)
    loss, off_policy = loss or GRPOLoss(), off_policy or NoCorrection()
    model = whole_model(base)
    parts, counts = [], [int(t.response_mask.sum()) for t in trajectories]
    for number, (t, advantage) in enumerate(zip(trajectories, advantages.tolist(), strict=True)):
        own, entropy = whole_logprobs(model, t, t.response_mask)
        generator = torch.tensor(t.generator_logprobs[t.response_mask])
        reference = torch.tensor(t.reference_logprobs[t.response_mask])
        advantage = torch.full_like(own, advantage)
        if token_advantages is not None:
            advantage = torch.tensor(token_advantages[number])
        parts.append((own, generator, advantage, reference, entropy))
    trainer, generator, advantage, reference, entropy = (
        torch.cat(part) for part in zip(*parts, strict=True)
    )
    start = trainer.detach()
    inputs = loss_inputs(
        *(trainer, generator, advantage),
        ids=np.repeat(np.arange(len(counts)), counts),
        reference_logprobs=reference,
        proximal_logprobs=start if getattr(off_policy, "anchors_at_proximal", False) else None,
        entropy=entropy,
    )
    correction = correction_weights(off_policy, inputs, start)
    # A masked token is one that is on-policy everywhere and has no advantage.
    kept = correction != 0
    neutral = {
        name: torch.where(kept, value, 0.0)
        for name in ("trainer_logprobs", "generator_logprobs", "advantages", "reference_logprobs")
        if (value := getattr(inputs, name)) is not None
    }
    if inputs.proximal_logprobs is not None:
        neutral["proximal_logprobs"] = torch.where(kept, inputs.proximal_logprobs, 0.0)
    tokens = replace(inputs, **neutral, kept=kept)
    losses, measured = loss(tokens)
    terms, added = penalties(tokens)
    losses = correction * losses
    measured = {**measured, **added, "loss/policy": losses.detach()}
    losses = sum(terms, losses)
    weights = (aggregation or TokenMean())(np.array(counts))
    total = (losses * torch.tensor(np.repeat(weights, counts))).sum()
    total.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    metrics = {
        key: (values.max() if key.endswith("max") else values.mean()).item()
        for key, values in measured.items()
    }
    metrics.setdefault("loss/penalty", math.nan)
    all_fresh = torch.ones(len(losses), dtype=torch.bool)  # all are of version 0
    sums = mismatch_sums(start - generator, correction, all_fresh)
    metrics |= mismatch_summary(*sums, tokens=len(losses))
    metrics |= {"loss/total": total.item(), "entropy": entropy.mean().item()}
    metrics |= {"grad_norm": grad_norm.item(), "lr": LEARNING_RATE, "policy_version": 1}
    metrics |= {"token_versions": {0: len(losses)}, "trained_tokens": float(len(losses))}
    metrics |= {"group_tokens": group_tokens(trajectories, kept.split(counts))}
    metrics |= {"token_logprobs": {}, "skipped_steps": 0}
    return to_hf(model.state_dict()), metrics


def group_tokens(trajectories, kept):
    """Return, for each group, its trained tokens, and those that the correction gives weight 0."""
    counts = {}
    for trajectory, of_response in zip(trajectories, kept, strict=True):
        causes = counts.setdefault(trajectory.group_id, {"trained": 0, "off_policy": 0})
        causes["trained"] += int(of_response.sum())
        causes["off_policy"] += int((~of_response).sum())
    return counts


def step(trajectories, advantages, number=0):
    return ("train_step", pack(trajectories), np.asarray(advantages, np.float32), number)


def export(version):
    """Return the two calls that bring the weights of a version out of the trainer."""
    return [("gather_weights",), ("export_weights", version)]


def exported(results, call):
    """Return the weights that all ranks exported in call number `call`; none may come twice."""
    exports = [rank_results[call] for rank_results in results]
    assert all(bucket[0] == manifest for bucket, manifest in exports)
    return unpack_buckets(bucket for bucket, _ in exports)


def untimed(metrics):
    return {key: value for key, value in metrics.items() if not key.startswith("time/")}


def assert_metrics_close(actual, expected):
    actual, expected = untimed(actual), untimed(expected)
    assert actual.pop("skipped_because", "") == expected.pop("skipped_because", "") == ""
    assert actual.keys() == expected.keys()
    uses = [  # failed samples and stale tokens have no influence, and are not expected
        {
            (group, cause): number
            for group, causes in metrics.pop("group_tokens", {}).items()
            for cause, number in causes.items()
            if number and cause in ("trained", "off_policy")
        }
        for metrics in (actual, expected)
    ]
    assert uses[0] == uses[1]
    for key, value in expected.items():
        assert actual[key] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), key


def assert_weights_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


def assert_weights_equal(actual, expected):
    assert actual.keys() == expected.keys()
    unequal = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not unequal


def largest_change(before, after):
    return max((after[name] - before[name]).abs().max().item() for name in before)


def assert_is_update(results, weights, metrics):
    for measured, *_ in results:
        assert_metrics_close(measured, metrics)
    assert_weights_close(exported(results, 2), weights)
