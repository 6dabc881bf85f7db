"""The real trainer over gloo: however a batch is cut up, it is the one update written down here.

Rank processes stay alive over the tests of this file and build a fresh Trainer for each of them.
Updates are by SGD, whose steps are the gradients: Adam would blow round-off up to whole steps.
"""

import copy
import gzip
import json
import math
import multiprocessing
import pickle
import re
import runpy
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torchtune.models.qwen2 import qwen2
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune, qwen2_tune_to_hf
from torchtune.training import FullModelHFCheckpointer, setup_torch_profiler

from grpo_components.exchange.staleness import StalenessContract
from grpo_components.exchange.weights import checkpoint_shapes, unpack_bucket
from grpo_components.models.meshes import Sharding
from grpo_components.objective.aggregation import ConstantLength, SequenceMean, TokenMean
from grpo_components.objective.component_errors import ComponentError
from grpo_components.objective.losses import DecoupledPPOLoss, GRPOLoss, GSPOLoss, LossInputs
from grpo_components.objective.off_policy import (
    MaskedIS,
    NoCorrection,
    OffPolicySequenceMask,
    SequenceTIS,
    TokenTIS,
    correction_weights,
    mismatch_summary,
)
from grpo_components.objective.schedules import Schedule
from grpo_components.objective.token_advantages import TokenNormalizedAdvantages
from grpo_components.training.skipped_steps import load_batch
from grpo_components.training.step_result import StepResult
from grpo_components.training.supervised import SupervisedExamples
from grpo_components.trajectory import Trajectory, batch_hash, pack

VOCABULARY, TEMPERATURE, LEARNING_RATE = 64, 0.8, 0.5
HEADS = {"num_heads": 4, "num_kv_heads": 2}
build_model = partial(
    qwen2,
    vocab_size=VOCABULARY,
    num_layers=2,
    embed_dim=32,
    intermediate_dim=48,
    max_seq_len=64,
    tie_word_embeddings=True,
    **HEADS,
)
WHOLE, SMALL = 10_000, 24
"""Token budgets: all in one forward pass; about two trajectories in each."""
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
"""Of float32 sums in another order; the updates compared are a thousand times as large."""


# ---- the processes ------------------------------------------------------------------------------


class SquaredLogprobs:
    """A loss of a user that measures next to nothing."""

    def __call__(self, inputs):
        gap = inputs.trainer_logprobs - inputs.generator_logprobs
        return inputs.advantages * gap**2, {}


class TruncatedImportance:
    """The loss that CONTRIBUTING.md prints."""

    def __call__(self, inputs):
        ratio = (inputs.trainer_logprobs - inputs.generator_logprobs).exp().detach()
        losses = -ratio.clamp(max=2.0) * inputs.advantages * inputs.trainer_logprobs
        return losses, {"ratio/mean": ratio, "ratio/max": ratio}


class Mean:
    """A loss that ends as TRL's do."""

    def __call__(self, inputs):
        return (-inputs.trainer_logprobs * inputs.advantages).mean(), {}


class Blind:
    """A loss that gives no number for any token."""

    def __call__(self, inputs):
        return inputs.trainer_logprobs * math.nan, {}


class Ends:
    """A loss that ends its process without a word."""

    def __call__(self, inputs):
        raise SystemExit(0)


class Steep:
    """A loss of ordinary numbers whose gradient is infinite."""

    def __call__(self, inputs):
        return (inputs.trainer_logprobs * 0).sqrt(), {}


class HalfBlind:
    """A loss whose value is no number in one response, and whose gradient is."""

    def __call__(self, inputs):
        losses = -inputs.trainer_logprobs * inputs.advantages
        unknown = torch.where(inputs.advantages == 0.5, math.nan, 0.0)
        return losses + unknown, {}


def flat(result):
    """A step's result as one mapping of all its numbers."""
    if not isinstance(result, StepResult):
        return result
    return {**result.metrics, **{k: v for k, v in vars(result).items() if k != "metrics"}}


def serve(connection):
    """One rank: build the Trainer that is described, make the calls, send what they returned."""
    from grpo_components.training.trainer import Trainer

    torch.set_num_threads(1)
    while (job := connection.recv()) is not None:
        arguments, calls = job
        if isinstance(arguments["loss"], str):  # the pickle would name this module
            arguments["loss"] = globals()[arguments["loss"]]()
        trainer = None
        try:
            trainer = Trainer(**arguments)
            connection.send([flat(getattr(trainer, method)(*args)) for method, *args in calls])
        except Exception as error:  # the test that asked shows it
            connection.send(error)
        finally:
            if trainer is not None:
                trainer.close()
            elif dist.is_initialized():
                dist.destroy_process_group()


class Ranks:
    """Calls a Trainer of one or more ranks, each in a process of its own."""

    def __init__(self):
        self._connections, self._processes = [], []
        self._start(2)

    def _start(self, num_ranks):
        context = multiprocessing.get_context("spawn")
        while len(self._processes) < num_ranks:
            ours, theirs = context.Pipe()
            # By path: a test module has no name that another process could import.
            process = context.Process(
                target=runpy.run_path,
                args=(__file__, {"connection": theirs}, "trainer_rank"),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, base, num_ranks, calls, *, raises=False, **changes):
        """What every call returned, by rank; with `raises`, what each rank raised."""
        self._start(num_ranks)
        folder = tempfile.mkdtemp(prefix="rendezvous-")
        for rank, connection in enumerate(self._connections[:num_ranks]):
            arguments = {
                "rank": rank,
                "num_ranks": num_ranks,
                "rendezvous": f"{folder}/file",
                "device": "cpu",
                "dtype": "fp32",
                "sharding": Sharding(),
                "seed": 0,
                "build_model": build_model,
                "build_checkpointer": partial(
                    FullModelHFCheckpointer,
                    checkpoint_dir=str(base),
                    checkpoint_files=["model.safetensors"],
                    model_type=changes.get("model_type", "QWEN2"),
                    output_dir=folder,
                ),
                "build_optimizer": partial(torch.optim.SGD, lr=LEARNING_RATE),
                "build_lr_scheduler": None,
                "loss": GRPOLoss(kl_coeff=0.1),
                "aggregation": TokenMean(),
                "off_policy": NoCorrection(),
                "learning_rate": None,
                "contract": StalenessContract(9, 1),
                "mask_overlong": False,
                "model_type": "QWEN2",
                "base_model_path": str(base),
                "ppo_epochs": 1,
                "updates_per_batch": 1,
                "tokens_per_micro_batch": WHOLE,
                "packing": False,
                "logprob_chunk_tokens": 7,
                "clip_grad_norm": None,
                "enable_activation_checkpointing": False,
                "compile_model": False,
                "log_peak_memory_stats": False,
                "build_profiler": None,
                "skipped_folder": f"{folder}/skipped",
                "collective_timeout_s": 60,
                "logged_responses": 0,
                "token_advantages": None,
                "ptx": None,
            }
            assert not changes.keys() - arguments.keys()
            connection.send((arguments | changes, calls))
        results = [connection.recv() for connection in self._connections[:num_ranks]]
        shutil.rmtree(folder, ignore_errors=True)
        for result in results:
            if isinstance(result, Exception) and not raises:
                raise result
        return results

    def close(self):
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.send(None)
            process.join()


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A small random policy as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    model = build_model()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    to_hf = partial(qwen2_tune_to_hf, dim=32, tie_word_embeddings=True, **HEADS)
    state_dict = {name: t.contiguous() for name, t in to_hf(model.state_dict()).items()}
    save_file(state_dict, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "qwen2",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- batches, and what their update is ----------------------------------------------------------


def make(number, prompt_length, mask, finish_reason="stop"):
    rng = np.random.default_rng(number)
    size = len(mask)
    return Trajectory(
        prompt_ids=rng.integers(0, VOCABULARY, prompt_length),
        response_ids=rng.integers(0, VOCABULARY, size),
        response_mask=np.array(mask, bool),
        generator_logprobs=rng.normal(-4.2, 0.5, size).astype(np.float32),
        token_versions=np.zeros(size, np.int32),
        prompt_index=0,
        epoch=0,
        group_id=number // 2,
        attempt=0,
        finish_reason=finish_reason,
        temperature=TEMPERATURE,
        reference_logprobs=rng.normal(-4.2, 0.5, size).astype(np.float32),
    )


SHAPES = [(3, 5), (8, 2), (1, 9), (4, 4), (2, 1), (6, 7), (5, 3)]
RAGGED = [make(i, prompt, [True] * response) for i, (prompt, response) in enumerate(SHAPES)]
RAGGED[1] = make(1, 2, [True, False, False, True, True])  # the environment spoke in between
ADVANTAGES = np.array([1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.25], np.float32)

# The first half of the batch fits into one forward pass, the second half does not.
LOPSIDED = [make(i, 1, [True]) for i in range(4)] + [make(i, 9, [True] * 9) for i in range(4, 8)]


def hf_weights(base):
    return load_file(base / "model.safetensors")


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
    """Weights and metrics after one step, from whole logits of one sequence at a time."""
    loss, off_policy = loss or GRPOLoss(kl_coeff=0.1), off_policy or NoCorrection()
    model = build_model()
    to_tune = partial(qwen2_hf_to_tune, dim=32, tie_word_embeddings=True, **HEADS)
    model.load_state_dict(to_tune(hf_weights(base)))
    parts, counts = [], [int(t.response_mask.sum()) for t in trajectories]
    for number, (t, advantage) in enumerate(zip(trajectories, advantages.tolist(), strict=True)):
        ids = torch.tensor(np.concatenate([t.prompt_ids, t.response_ids]))
        logprobs = torch.log_softmax(model(ids[None])[0] / t.temperature, dim=-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)[len(t.prompt_ids) - 1 : -1]
        taken = logprobs[torch.arange(len(ids) - 1), ids[1:]][len(t.prompt_ids) - 1 :]
        mask = torch.tensor(t.response_mask)
        generator = torch.tensor(t.generator_logprobs)[mask]
        reference = torch.tensor(t.reference_logprobs)[mask]
        own = taken[mask]
        advantage = torch.full_like(own, advantage)
        if token_advantages is not None:
            advantage = torch.tensor(token_advantages[number])
        parts.append((own, generator, advantage, reference, entropy[mask]))
    trainer, generator, advantage, reference, entropy = (
        torch.cat(part) for part in zip(*parts, strict=True)
    )
    sequence_ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    start = trainer.detach()
    inputs = LossInputs(
        trainer_logprobs=trainer,
        generator_logprobs=generator,
        advantages=advantage,
        sequence_ids=sequence_ids,
        staleness=torch.zeros_like(sequence_ids),
        step=0,
        reference_logprobs=reference,
        proximal_logprobs=start if off_policy.anchors_at_proximal else None,
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
    losses, measured = loss(replace(inputs, **neutral, kept=kept))
    penalty = measured.get("loss/penalty", 0.0)
    losses = correction * (losses - penalty) + penalty
    measured["loss/policy"] = (losses - penalty).detach()
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
    metrics |= mismatch_summary((start - generator).numpy(), correction.numpy())
    metrics["mismatch/fresh_kl"] = metrics["mismatch/generator_kl"]  # all are of version 0
    metrics["mismatch/fresh_tokens"] = len(losses)
    metrics |= {
        "loss/total": total.item(),
        "entropy": entropy.mean().item(),
        "grad_norm": grad_norm.item(),
        "token_versions": {0: len(losses)},
        "token_logprobs": {},
        "lr": LEARNING_RATE,
        "policy_version": 1,
        "skipped_steps": 0,
        "trained_tokens": float(len(losses)),
    }
    to_hf = partial(qwen2_tune_to_hf, dim=32, tie_word_embeddings=True, **HEADS)
    return to_hf(model.state_dict()), metrics


def step(trajectories, advantages, number=0):
    return ("train_step", pack(trajectories), np.asarray(advantages, np.float32), number)


def export(version):
    """The two calls that bring the weights of a version out of the trainer."""
    return [("gather_weights",), ("export_weights", version)]


def exported(results, call):
    """What all ranks together exported in one call; no tensor may come twice."""
    weights = {}
    for rank_results in results:
        bucket, manifest = rank_results[call]
        assert bucket[0] == manifest
        part = unpack_bucket(*bucket)
        assert not weights.keys() & part.keys()
        weights |= part
    return weights


def untimed(metrics):
    return {key: value for key, value in metrics.items() if not key.startswith("time/")}


def assert_metrics_close(actual, expected):
    actual, expected = untimed(actual), untimed(expected)
    assert actual.pop("skipped_because", "") == expected.pop("skipped_because", "") == ""
    assert actual.keys() == expected.keys()
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


# ---- one update ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("budget", [WHOLE, SMALL, 1])
@pytest.mark.parametrize("batch", ["ragged", "lopsided", "fewer than ranks"])
def test_a_step_is_the_plain_update_whatever_the_ranks_and_micro_batches(
    ranks, base, num_ranks, budget, batch
):
    trajectories = {"ragged": RAGGED, "lopsided": LOPSIDED, "fewer than ranks": RAGGED[:1]}[batch]
    advantages = np.resize(ADVANTAGES, len(trajectories))
    weights, metrics = expected_update(base, trajectories, advantages)
    assert largest_change(hf_weights(base), weights) > 1e-2, "else this test sees nothing"
    results = ranks.run(
        base,
        num_ranks,
        [step(trajectories, advantages), *export(1)],
        tokens_per_micro_batch=budget,
    )
    for measured, *_ in results:
        assert_metrics_close(measured, metrics)
        assert untimed(measured) == untimed(results[0][0]), "the same on every rank"
    assert_weights_close(exported(results, 2), weights)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("budget", [200, SMALL])
def test_packed_rows_make_the_same_update(ranks, base, num_ranks, budget):
    """On a CPU through a dense mask, which flex attention's is tested to be."""
    weights, metrics = expected_update(base, RAGGED, ADVANTAGES)
    long = partial(build_model, max_seq_len=256)  # a row is one sequence to torchtune
    results = ranks.run(
        base,
        num_ranks,
        [step(RAGGED, ADVANTAGES), *export(1)],
        tokens_per_micro_batch=budget,
        packing=True,
        build_model=long,
    )
    assert_metrics_close(results[0][0], metrics)
    assert_weights_close(exported(results, 2), weights)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_activation_checkpointing_changes_nothing(ranks, base, num_ranks):
    weights, metrics = expected_update(base, RAGGED, ADVANTAGES)
    results = ranks.run(
        base,
        num_ranks,
        [step(RAGGED, ADVANTAGES), *export(1)],
        enable_activation_checkpointing=True,
    )
    assert_metrics_close(results[0][0], metrics)
    assert_weights_close(exported(results, 2), weights)


EXAMPLES = [([5, 9, 2], [7, 7, 1]), ([11], [3, 30, 4, 8, 21]), ([1, 2, 3, 4, 5, 6], [40])]


def examples(coeff, per_update=3):
    return SupervisedExamples(EXAMPLES, coeff=coeff, examples_per_update=per_update, seed=0)


def supervised_gradient(base):
    """Mean over all tokens of the examples, and its gradient by parameter, one at a time."""
    model = build_model()
    to_tune = partial(qwen2_hf_to_tune, dim=32, tie_word_embeddings=True, **HEADS)
    model.load_state_dict(to_tune(hf_weights(base)))
    losses = []
    for prompt, response in EXAMPLES:
        logits = model(torch.tensor([prompt + response]))[0, len(prompt) - 1 : -1]
        losses.append(
            torch.nn.functional.cross_entropy(logits, torch.tensor(response)) * len(response)
        )
    loss = sum(losses) / sum(len(response) for _, response in EXAMPLES)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    to_hf = partial(qwen2_tune_to_hf, dim=32, tie_word_embeddings=True, **HEADS)
    return loss.item(), to_hf(gradients)


@pytest.mark.parametrize(("num_ranks", "budget"), [(1, WHOLE), (2, 8)])
def test_the_supervised_loss_adds_its_own_gradient_whatever_the_ranks(
    ranks, base, num_ranks, budget
):
    alone, metrics = expected_update(base, RAGGED, ADVANTAGES)
    loss, gradients = supervised_gradient(base)
    results = ranks.run(
        base,
        num_ranks,
        [step(RAGGED, ADVANTAGES), *export(1)],
        tokens_per_micro_batch=budget,
        ptx=examples(0.5),
    )
    weights = {name: alone[name] - LEARNING_RATE * 0.5 * gradients[name] for name in alone}
    assert largest_change(alone, weights) > 1e-2, "else this test sees nothing"
    assert_weights_close(exported(results, 2), weights)
    for measured, *_ in results:
        assert measured["loss/ptx"] == pytest.approx(loss, rel=1e-4)
        assert measured["loss/total"] == pytest.approx(metrics["loss/total"] + 0.5 * loss, rel=1e-4)
        assert measured["loss/policy"] == pytest.approx(metrics["loss/policy"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_without_weight_the_supervised_loss_changes_no_bit(ranks, base, num_ranks):
    calls = [step(RAGGED, ADVANTAGES), *export(1)]
    without = ranks.run(base, num_ranks, calls, tokens_per_micro_batch=SMALL)
    weightless = ranks.run(base, num_ranks, calls, tokens_per_micro_batch=SMALL, ptx=examples(0.0))
    assert_weights_equal(exported(weightless, 2), exported(without, 2))
    assert_metrics_close(weightless[0][0], without[0][0])


def test_the_supervised_loss_goes_down_beside_the_policys(ranks, base):
    steps = [step(RAGGED, ADVANTAGES * 1e-3, number) for number in range(6)]
    results = ranks.run(base, 1, steps, ptx=examples(0.5), updates_per_batch=2)
    losses = [measured["loss/ptx"] for measured in results[0]]
    assert all(after < before for before, after in pairwise(losses)), losses
    assert losses[-1] < losses[0] - 0.5, losses


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_update_is_clipped_and_the_norm_before_it_is_logged(ranks, base, num_ranks):
    weights, metrics = expected_update(base, RAGGED, ADVANTAGES, max_grad_norm=0.01)
    assert metrics["grad_norm"] > 0.1
    results = ranks.run(
        base, num_ranks, [step(RAGGED, ADVANTAGES), *export(1)], clip_grad_norm=0.01
    )
    assert_metrics_close(results[0][0], metrics)
    after, before = exported(results, 2), hf_weights(base)
    assert_weights_close(after, weights)
    moved = math.sqrt(sum(((after[n] - before[n]) ** 2).sum().item() for n in before))
    assert moved == pytest.approx(0.01 * LEARNING_RATE, rel=1e-3)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_failed_samples_have_no_influence(ranks, base, num_ranks):
    weights, metrics = expected_update(base, RAGGED, ADVANTAGES)
    failed = [make(20 + i, 3, [True] * 6, finish_reason="error") for i in range(3)]
    failed[0].generator_logprobs[:] = -1e4  # would overflow the ratio
    batch = [failed[0], *RAGGED[:3], failed[1], *RAGGED[3:], failed[2]]
    advantages = np.concatenate(
        [[7.0], ADVANTAGES[:3], [math.nan], ADVANTAGES[3:], [0.0]], dtype=np.float32
    )
    results = ranks.run(
        base, num_ranks, [step(batch, advantages), *export(1)], tokens_per_micro_batch=SMALL
    )
    measured = dict(results[0][0])
    measured["trained_tokens"] = metrics["trained_tokens"]
    assert_metrics_close(measured, metrics)
    assert_weights_close(exported(results, 2), weights)


def test_what_the_environment_said_is_read_and_not_learned(ranks, base):
    """Whatever stands beside its tokens, which have no version; their ids are context."""
    weights, metrics = expected_update(base, RAGGED, ADVANTAGES)
    batch = copy.deepcopy(RAGGED)
    for trajectory in batch:
        said = ~trajectory.response_mask
        trajectory.generator_logprobs[said] = math.nan
        assert trajectory.reference_logprobs is not None
        trajectory.reference_logprobs[said] = math.nan
        trajectory.token_versions[said] = -1
    changes = {"tokens_per_micro_batch": SMALL, "contract": StalenessContract(0, 1)}
    results = ranks.run(base, 2, [step(batch, ADVANTAGES), *export(1)], **changes)
    assert_metrics_close(results[0][0], metrics)
    assert_weights_close(exported(results, 2), weights)
    batch[1].response_ids[1] += 1  # one token that the environment said
    results = ranks.run(base, 2, [step(batch, ADVANTAGES), *export(1)], **changes)
    assert largest_change(exported(results, 2), weights) > 1e-5


# ---- what else the objective is made of ----------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("aggregation", [SequenceMean(), ConstantLength(length=9)])
def test_an_aggregation_is_never_diluted_by_ranks_micro_batches_or_padding(
    ranks, base, num_ranks, aggregation
):
    weights, metrics = expected_update(base, RAGGED, ADVANTAGES, aggregation=aggregation)
    results = ranks.run(
        base,
        num_ranks,
        [step(RAGGED, ADVANTAGES), *export(1)],
        aggregation=aggregation,
        tokens_per_micro_batch=SMALL,
    )
    assert_metrics_close(results[0][0], metrics)
    assert_weights_close(exported(results, 2), weights)


def untrained():
    """Four responses of which no token is trained, each for another reason."""
    cut_off = make(40, 4, [True] * 6, finish_reason="length")
    failed = make(41, 3, [True] * 6, finish_reason="error")
    silent = make(42, 2, [False] * 3)
    stale = make(43, 5, [True] * 4)
    stale.token_versions[:] = -9  # of a trainer at version 0 with a bound of 2
    return [cut_off, failed, silent, stale]


@pytest.mark.parametrize(("num_ranks", "budget"), [(1, WHOLE), (2, SMALL)])
@pytest.mark.parametrize("aggregation", [SequenceMean(), ConstantLength(length=9)])
def test_s_counts_the_responses_without_a_trained_token(
    ranks, base, num_ranks, budget, aggregation
):
    """As in the papers: the sum over what is trained, by the number of all responses."""
    size = len(RAGGED) + 4

    def over_all(counts):
        return 1 / (size * (counts if isinstance(aggregation, SequenceMean) else counts * 0 + 9.0))

    weights, metrics = expected_update(base, RAGGED, ADVANTAGES, aggregation=over_all)
    none = untrained()
    batch = [none[0], *RAGGED[:3], none[1], none[2], *RAGGED[3:], none[3]]
    advantages = np.concatenate(
        [[5.0], ADVANTAGES[:3], [math.nan, 1.0], ADVANTAGES[3:], [3.0]], dtype=np.float32
    )
    options = {
        "aggregation": aggregation,
        "contract": StalenessContract(2, 1),
        "mask_overlong": True,
    }
    results = ranks.run(
        base,
        num_ranks,
        [step(batch, advantages), *export(1)],
        tokens_per_micro_batch=budget,
        **options,
    )
    assert_metrics_close(results[0][0], metrics)
    assert_weights_close(exported(results, 2), weights)


@pytest.mark.parametrize("aggregation", [SequenceMean(), ConstantLength(length=9)])
def test_s_is_the_number_of_responses_of_each_update(ranks, base, aggregation):
    """Two updates of five responses and four: the second has one that is trained."""
    none = untrained()
    batch = [*RAGGED[:4], none[0], RAGGED[4], *none[1:]]
    advantages = np.array([1.0, -1.0, 0.5, -0.5, 9.0, 2.0, 9.0, 9.0, 9.0], np.float32)
    options = {
        "aggregation": aggregation,
        "contract": StalenessContract(9, 1),
        "mask_overlong": True,
        "updates_per_batch": 2,
    }
    none[3].token_versions[:] = -20
    results = ranks.run(base, 1, [step(batch, advantages), *export(1)], **options)
    parts = []
    for part, values, size in ((batch[:4], advantages[:4], 5), (batch[5:6], advantages[5:6], 4)):
        for _ in range(size - len(part)):  # in the place of those that are not trained
            part, values = [*part, make(50, 1, [False])], np.append(values, np.float32(0))
        parts.append(step(part, values))
    singly = ranks.run(base, 1, [*parts, *export(2)], aggregation=aggregation)
    assert_weights_close(exported(results, 2), exported(singly, 3))
    alone = step(batch[5:6], advantages[5:6])
    fewer = ranks.run(base, 1, [parts[0], alone, *export(2)], aggregation=aggregation)
    assert largest_change(exported(fewer, 3), exported(results, 2)) > 1e-3


@pytest.mark.parametrize(("num_ranks", "budget"), [(1, WHOLE), (2, SMALL)])
def test_token_advantages_are_those_of_the_whole_batch_whatever_the_ranks(
    ranks, base, num_ranks, budget
):
    component = TokenNormalizedAdvantages(kl_coeff=0.2)
    rewards = np.array([1.0, 0.0, 0.5, 0.0, 1.0, 0.0, 0.25], np.float32)
    batch = copy.deepcopy(RAGGED)
    for trajectory, reward in zip(batch, rewards.tolist(), strict=True):
        trajectory.advantage = reward
    made = component.per_token(batch, [t.response_mask for t in batch], 0)
    weights, metrics = expected_update(base, RAGGED, rewards, token_advantages=made)
    results = ranks.run(
        base,
        num_ranks,
        [step(RAGGED, rewards), *export(1)],
        token_advantages=component.per_token,
        tokens_per_micro_batch=budget,
    )
    assert_metrics_close(results[0][0], metrics)
    assert_weights_close(exported(results, 2), weights)


@pytest.mark.parametrize(
    ("loss", "off_policy"),
    [
        (GSPOLoss(clip_low=0.5, clip_high=0.5), NoCorrection()),
        (GRPOLoss(), SequenceTIS(cap=5.0)),
        (GRPOLoss(), MaskedIS(low=0.0, high=3.0, level="sequence")),
    ],
)
def test_the_ratio_of_a_partly_stale_response_is_that_of_its_trained_tokens(
    ranks, base, loss, off_policy
):
    """T is their number: the update is that of a response whose first tokens were only read."""
    size = 6
    partly = [make(i, 3, [True] * size) for i in range(4)]
    read = [make(i, 3, [False, False] + [True] * (size - 2)) for i in range(4)]
    for trajectory in partly:
        trajectory.generator_logprobs[:2] = -60.0  # would change every sum and mean
        trajectory.token_versions[:2] = -3
    advantages = ADVANTAGES[:4]
    weights, metrics = expected_update(base, read, advantages, loss=loss, off_policy=off_policy)
    assert largest_change(hf_weights(base), weights) > 1e-3, "else this test sees nothing"
    results = ranks.run(
        base,
        1,
        [step(partly, advantages), *export(1)],
        **{"loss": loss, "off_policy": off_policy, "contract": StalenessContract(2, 1)},
    )
    metrics |= {"mismatch/fresh_kl": math.nan, "mismatch/fresh_tokens": math.nan}  # none is new
    assert_metrics_close(results[0][0], metrics)
    assert_weights_close(exported(results, 2), weights)


def test_the_mask_of_bad_responses_follows_the_updates_of_a_step(ranks, base):
    """The second epoch masks what the first has pushed down far enough: it changes nothing."""
    bad = np.full(len(RAGGED), -1.0, np.float32)
    calls = [step(RAGGED, bad), *export(1)]
    options = {"loss": GRPOLoss(), "build_optimizer": partial(torch.optim.SGD, lr=20.0)}
    once = ranks.run(base, 1, calls, **options)
    twice = ranks.run(base, 1, calls, ppo_epochs=2, **options)
    assert largest_change(exported(once, 2), exported(twice, 2)) > 1e-3
    mask = OffPolicySequenceMask(threshold=2.0)
    masked = ranks.run(base, 1, calls, ppo_epochs=2, off_policy=mask, **options)
    assert masked[0][0]["off_policy/masked_fraction"] == 0, "at the start of the step"
    assert_weights_equal(exported(masked, 2), exported(once, 2))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "off_policy", [TokenTIS(cap=1.2), MaskedIS(low=0.8, high=1.25), OffPolicySequenceMask(0.2)]
)
def test_a_correction_weighs_tokens_by_the_policy_that_the_step_starts_from(
    ranks, base, num_ranks, off_policy
):
    weights, metrics = expected_update(base, RAGGED, ADVANTAGES, off_policy=off_policy)
    assert 0 < metrics["off_policy/correction_mass"] < 1.2
    results = ranks.run(
        base,
        num_ranks,
        [step(RAGGED, ADVANTAGES), *export(1)],
        off_policy=off_policy,
        tokens_per_micro_batch=SMALL,
    )
    assert_metrics_close(results[0][0], metrics)
    assert_weights_close(exported(results, 2), weights)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("off_policy", [TokenTIS(cap=1.2), MaskedIS(low=0.8, high=1.25)])
def test_a_loss_of_the_users_own_is_corrected_like_ours(ranks, base, num_ranks, off_policy):
    loss = TruncatedImportance()
    weights, metrics = expected_update(base, RAGGED, ADVANTAGES, off_policy=off_policy, loss=loss)
    changes = {"loss": "TruncatedImportance", "tokens_per_micro_batch": SMALL}
    calls = [step(RAGGED, ADVANTAGES), *export(1)]
    results = ranks.run(base, num_ranks, calls, off_policy=off_policy, **changes)
    for key in ("loss/total", "loss/policy", "grad_norm", "off_policy/correction_mass"):
        assert results[0][0][key] == pytest.approx(metrics[key], rel=1e-4), key
    assert_weights_close(exported(results, 2), weights)
    plain = ranks.run(base, num_ranks, calls, **changes)
    assert largest_change(exported(plain, 2), weights) > 1e-5
    assert plain[0][0]["off_policy/correction_mass"] == 1


@pytest.mark.parametrize(
    ("loss", "what"),
    [("Mean", r"shape \(\)"), ("Blind", "no finite number"), ("Ends", "SystemExit")],
)
def test_a_loss_that_is_none_is_no_skipped_step_but_an_error_by_its_name(ranks, base, loss, what):
    results = ranks.run(base, 2, [step(RAGGED, ADVANTAGES)], loss=loss, raises=True)
    for error in results:
        assert isinstance(error, ComponentError)
        assert re.match(rf"loss: \S*{loss} .*{what}", str(error)), error


def test_advantages_of_another_shape_are_an_error_by_that_name(ranks, base):
    (error,) = ranks.run(base, 1, [step(RAGGED, ADVANTAGES[1:])], raises=True)
    assert isinstance(error, ComponentError) and str(error).startswith("advantages: shape")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_skipped_step_tells_the_first_token_or_parameter_that_is_no_number(
    ranks, base, num_ranks
):
    spoiled = ADVANTAGES.copy()
    spoiled[[4, 2]] = math.nan
    skipped = RAGGED[2]
    number = sum(t.group_id == skipped.group_id for t in RAGGED[:2])
    position = int(np.flatnonzero(skipped.response_mask)[0])
    place = f"group {skipped.group_id}, response {number}, token {position} (advantage nan)"
    calls = [step(RAGGED, spoiled), step(RAGGED, ADVANTAGES, 1)]
    for first, second in ranks.run(base, num_ranks, calls, tokens_per_micro_batch=SMALL):
        assert first["skipped_because"] == f"the loss is nan at {place}"
        assert second["skipped_because"] == ""
    for (steep,) in ranks.run(base, num_ranks, calls[1:], loss="Steep"):
        why = steep["skipped_because"]
        assert why.startswith("the loss is finite, and the gradient of "), why
        assert re.search(r"gradient of (tok_embeddings|layers\.0)\S*weight has (nan|-?inf)$", why)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_proximal_logprobs_are_those_of_the_start_of_the_step_in_every_update(
    ranks, base, num_ranks
):
    """A correction that was made anew after an update would weigh by the moved policy."""
    loss = DecoupledPPOLoss(max_weight=2.0)
    calls = [step(RAGGED, ADVANTAGES), *export(1)]
    options = {"loss": loss, "ppo_epochs": 3, "tokens_per_micro_batch": SMALL}
    slow = partial(torch.optim.SGD, lr=0.05)
    results = ranks.run(base, num_ranks, calls, build_optimizer=slow, **options)
    no_learning = partial(torch.optim.SGD, lr=0.0)
    still = ranks.run(base, num_ranks, calls[:1], build_optimizer=no_learning, **options)
    moved, unmoved = results[0][0], still[0][0]
    assert moved["mismatch/generator_kl"] == pytest.approx(unmoved["mismatch/generator_kl"])
    assert moved["ratio/max"] != pytest.approx(unmoved["ratio/max"])
    assert_metrics_close(
        {k: v for k, v in moved.items() if k.startswith(("mismatch", "off_policy"))},
        {k: v for k, v in unmoved.items() if k.startswith(("mismatch", "off_policy"))},
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tokens_over_the_bound_and_responses_cut_off_train_nothing(ranks, base, num_ranks):
    """The update is that of the batch in which the policy never sampled them."""
    trained = [make(i, prompt, [True] * response) for i, (prompt, response) in enumerate(SHAPES)]
    kept = [make(i, prompt, [True] * response) for i, (prompt, response) in enumerate(SHAPES)]
    for trajectory in trained:
        trajectory.token_versions[:] = 1  # of a trainer at version 3 with a bound of 2
    for trajectory, without in zip(trained[:3], kept[:3], strict=True):
        trajectory.token_versions[0] = 0
        without.response_mask[0] = False
    cut_off = make(30, 4, [True] * 6, finish_reason="length")
    warm_up = [step(RAGGED, np.zeros(len(RAGGED)), number) for number in range(3)]
    loss = GRPOLoss()
    calls = [
        *warm_up,
        step([*trained, cut_off], [*ADVANTAGES, 5.0], 3),
        *export(4),
    ]
    options = {"loss": loss, "contract": StalenessContract(2, 1), "mask_overlong": True}
    results = ranks.run(base, num_ranks, calls, **options)
    fresh = [t for t in kept if t.response_mask.any()]
    advantages = [a for t, a in zip(kept, ADVANTAGES, strict=True) if t.response_mask.any()]
    plain = ranks.run(base, num_ranks, [step(fresh, advantages), *export(1)], loss=loss)
    assert_weights_close(exported(results, 5), exported(plain, 2))
    assert results[0][3]["token_versions"] == {1: int(sum(t.response_mask.sum() for t in kept))}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fresh_tokens_are_those_of_responses_that_the_trainers_version_sampled(
    ranks, base, num_ranks
):
    """After a swap within a response, its tokens may rest on the KV of the older weights."""
    batch = [make(i, prompt, [True] * response) for i, (prompt, response) in enumerate(SHAPES)]
    long = [trajectory for trajectory in batch if len(trajectory.response_ids) > 1]
    long[0].token_versions[:] = long[1].token_versions[:] = 1
    long[2].token_versions[1:] = 1
    zeros = np.zeros(len(RAGGED))
    calls = [step(RAGGED, zeros), step(batch, ADVANTAGES, 1), step(RAGGED, zeros, 2)]
    results = ranks.run(
        base, num_ranks, calls, logged_responses=99, contract=StalenessContract(9, 1)
    )
    metrics, after = results[0][1:]
    told = [row for rows in metrics["token_logprobs"].values() for row in rows]
    gaps = [
        np.array(row["trainer_logprobs"]) - trajectory.generator_logprobs
        for row, trajectory in zip(told, batch, strict=True)
        if len(trajectory.response_ids) and (trajectory.token_versions == 1).all()
    ]
    assert len(gaps) == 2
    gap = np.concatenate(gaps)
    assert metrics["mismatch/fresh_tokens"] == len(gap)
    kl = np.mean(np.expm1(gap) - gap)
    assert metrics["mismatch/fresh_kl"] == pytest.approx(kl, rel=1e-4, abs=1e-6)
    assert metrics["mismatch/generator_kl"] != pytest.approx(kl, rel=1e-2)
    assert math.isnan(after["mismatch/fresh_kl"])  # at version 2 nothing of RAGGED is fresh


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_logged_responses_tell_the_logprobs_that_the_update_has_used(ranks, base, num_ranks):
    """Of the first so many, on whichever rank they were; none where nothing was sampled."""
    calls = [step(RAGGED, ADVANTAGES)]
    metrics = ranks.run(base, num_ranks, calls, logged_responses=99, tokens_per_micro_batch=SMALL)
    told = [row for rows in metrics[0][0]["token_logprobs"].values() for row in rows]
    ratios = []
    for row, trajectory in zip(told, RAGGED, strict=True):
        for name in ("generator_logprobs", "reference_logprobs"):
            known = np.where(trajectory.response_mask, getattr(trajectory, name), np.nan)
            assert np.array(row[name], float) == pytest.approx(known, abs=1e-6, nan_ok=True)
        trainer = np.array(row["trainer_logprobs"], float)
        assert (np.isnan(trainer) == ~trajectory.response_mask).all()
        ratios += np.exp(trainer - trajectory.generator_logprobs)[trajectory.response_mask].tolist()
    assert np.mean(ratios) == pytest.approx(metrics[0][0]["ratio/mean"], rel=1e-5)
    assert max(ratios) == pytest.approx(metrics[0][0]["ratio/max"], rel=1e-5)
    few = ranks.run(base, num_ranks, calls, logged_responses=3)[0][0]["token_logprobs"]
    assert {group_id: len(rows) for group_id, rows in few.items()} == {0: 2, 1: 1}


def test_each_token_has_the_temperature_it_was_sampled_with(ranks, base):
    hot = [make(i, prompt, [True] * response) for i, (prompt, response) in enumerate(SHAPES)]
    for number, trajectory in enumerate(hot):
        trajectory.temperature = 0.5 + 0.2 * number
    weights, metrics = expected_update(base, hot, ADVANTAGES)
    results = ranks.run(base, 1, [step(hot, ADVANTAGES), *export(1)], tokens_per_micro_batch=SMALL)
    assert_metrics_close(results[0][0], metrics)
    assert_weights_close(exported(results, 2), weights)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_batch_without_a_token_to_train_is_a_skipped_step_with_every_key(ranks, base, num_ranks):
    cut_off = [make(i, 4, [True] * 6, finish_reason="length") for i in range(4)]
    calls = [step(cut_off, np.ones(4)), step(RAGGED, ADVANTAGES, 1)]
    skipped, trained = ranks.run(base, num_ranks, calls, mask_overlong=True)[0]
    assert "4 were cut off" in skipped["skipped_because"]
    assert skipped.keys() == trained.keys()
    assert (skipped["policy_version"], skipped["token_versions"]) == (0, {})
    assert math.isnan(skipped["off_policy/correction_mass"])
    assert trained["policy_version"] == 1


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_entropy_bonus_raises_the_entropy(ranks, base, num_ranks):
    calls = [step(RAGGED, np.zeros(len(RAGGED)), i) for i in range(2)]
    loss = GRPOLoss(entropy_coeff=0.1)
    first, second = ranks.run(base, num_ranks, calls, loss=loss, tokens_per_micro_batch=SMALL)[0]
    assert first["grad_norm"] > 1e-4
    assert second["entropy"] > first["entropy"]


# ---- steps, versions, rates ---------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_gradient_that_is_not_finite_trains_nothing_and_spoils_nothing(
    ranks, base, num_ranks, bad
):
    spoiled = ADVANTAGES.copy()
    spoiled[-1] = bad  # on one rank only
    adam = partial(torch.optim.AdamW, lr=1e-2)
    results = ranks.run(
        base,
        num_ranks,
        [step(RAGGED, spoiled), *export(0), step(RAGGED, ADVANTAGES), *export(1)],
        build_optimizer=adam,
        build_lr_scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
    )
    for skipped, version, _, trained, *_ in results:
        assert not math.isfinite(skipped["grad_norm"])
        assert skipped["policy_version"] == version == 0
        assert trained["policy_version"] == 1 and math.isfinite(trained["grad_norm"])
        assert trained["lr"] == skipped["lr"] == 1e-2, "the schedule counts trained batches"
    assert_weights_equal(exported(results, 2), hf_weights(base))
    undisturbed = ranks.run(
        base, num_ranks, [step(RAGGED, ADVANTAGES), *export(1)], build_optimizer=adam
    )
    assert_weights_equal(exported(results, 5), exported(undisturbed, 2))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_skipped_step_is_counted_and_its_batch_is_kept(ranks, base, tmp_path, num_ranks):
    spoiled = ADVANTAGES.copy()
    spoiled[2] = math.nan
    nothing = [make(1, 2, [False] * 3)] * num_ranks  # no token of which can be trained
    steps = [
        step(RAGGED, ADVANTAGES, 0),
        step(RAGGED, spoiled, 1),
        step(nothing, ADVANTAGES[: len(nothing)], 2),
        step(RAGGED, ADVANTAGES, 3),
    ]
    results = ranks.run(base, num_ranks, steps, skipped_folder=str(tmp_path))
    for measured in results:
        assert [metrics["skipped_steps"] for metrics in measured] == [0, 1, 2, 2]
        assert [metrics["policy_version"] for metrics in measured] == [1, 1, 1, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"step_2", "step_3"}
    packed, advantages, metrics = load_batch(tmp_path / "step_2")
    assert batch_hash(packed) == batch_hash(pack(RAGGED))
    np.testing.assert_array_equal(advantages, spoiled)
    assert math.isnan(metrics["grad_norm"]) and metrics["skipped_steps"] == 1
    assert str(tmp_path / "step_2") in (tmp_path / "step_2" / "README").read_text()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_loss_that_is_no_number_trains_nothing_even_if_its_gradient_is_one(
    ranks, base, num_ranks
):
    calls = [step(RAGGED, ADVANTAGES), *export(0)]
    results = ranks.run(base, num_ranks, calls, loss="HalfBlind")
    for measured, *_ in results:
        assert math.isnan(measured["loss/total"]) and math.isfinite(measured["grad_norm"])
        assert measured["policy_version"] == 0 and measured["skipped_steps"] == 1
    assert_weights_equal(exported(results, 2), hf_weights(base))


def test_a_learning_rate_schedule_follows_the_training_step(ranks, base):
    schedule = Schedule("linear", start=0.4, end=0.1, num_steps=3, warmup_steps=1)
    steps = [step(RAGGED, ADVANTAGES, number) for number in (0, 1, 2, 7)]
    results = ranks.run(base, 1, steps, learning_rate=schedule)[0]
    assert [metrics["lr"] for metrics in results] == pytest.approx([0.4, 0.4, 0.3, 0.1])


def test_a_bad_update_leaves_the_good_ones_of_its_batch(ranks, base):
    half = len(LOPSIDED) // 2
    advantages = np.resize(ADVANTAGES, half)
    weights, _ = expected_update(base, LOPSIDED[:half], advantages)
    both = np.concatenate([advantages, np.full(half, math.nan, np.float32)])
    calls = [step(LOPSIDED, both), *export(1)]
    results = ranks.run(base, 1, calls, updates_per_batch=2)
    assert results[0][0]["policy_version"] == 1
    assert_weights_close(exported(results, 2), weights)


def test_a_batch_is_one_version_and_one_step_of_the_schedule_whatever_its_updates(ranks, base):
    steps = [step(RAGGED, ADVANTAGES)] * 3
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    results = ranks.run(
        base, 1, steps, build_lr_scheduler=schedule, ppo_epochs=2, updates_per_batch=2
    )[0]
    assert [metrics["policy_version"] for metrics in results] == [1, 2, 3]
    rates = [LEARNING_RATE, LEARNING_RATE / 2, LEARNING_RATE / 4]
    assert [metrics["lr"] for metrics in results] == pytest.approx(rates)


def test_every_epoch_and_part_of_a_batch_is_an_update_of_its_own(ranks, base):
    """Two epochs of two parts are the four steps on the parts."""
    advantages = np.resize(ADVANTAGES, len(LOPSIDED))
    half = len(LOPSIDED) // 2
    parts = [step(LOPSIDED[:half], advantages[:half]), step(LOPSIDED[half:], advantages[half:])]
    singly = ranks.run(base, 1, [*parts, *parts, *export(4)])
    calls = [step(LOPSIDED, advantages), *export(1)]
    together = ranks.run(base, 1, calls, ppo_epochs=2, updates_per_batch=2)
    assert_weights_equal(exported(together, 2), exported(singly, 5))
    metrics, updates = together[0][0], singly[0][:4]
    assert metrics["ratio/max"] == max(update["ratio/max"] for update in updates)
    for key in ("loss/total", "grad_norm", "ratio/mean", "ratio/clip_fraction"):
        assert metrics[key] == pytest.approx(sum(update[key] for update in updates) / 4), key
    before_any = [update["mismatch/generator_kl"] for update in updates[:1]]
    assert metrics["mismatch/generator_kl"] == pytest.approx(before_any[0])


def test_what_a_loss_does_not_measure_is_logged_as_nan_under_the_same_keys(ranks, base):
    calls = [step(RAGGED, ADVANTAGES)]
    plain = ranks.run(base, 1, calls, loss="SquaredLogprobs")[0][0]
    full = ranks.run(base, 1, calls)[0][0]
    assert plain.keys() == full.keys()
    missing = {k for k, value in plain.items() if isinstance(value, float) and math.isnan(value)}
    assert missing == {
        "loss/penalty",
        "loss/kl_reference",
        "ratio/clip_fraction",
        "ratio/clip_fraction_low",
        "ratio/clip_fraction_high",
    }
    assert plain["ratio/max"] == full["ratio/max"] and plain["ratio/mean"] == full["ratio/mean"]


def test_the_profiler_steps_with_training_and_leaves_a_trace_per_rank(ranks, base, tmp_path):
    profiler = partial(
        setup_torch_profiler,
        enabled=True,
        cuda=False,
        xpu=False,
        output_dir=str(tmp_path),
        wait_steps=1,
        warmup_steps=0,
        active_steps=1,
        num_cycles=0,
    )
    steps = [step(RAGGED, ADVANTAGES)] * 3  # the third cycle is cut short
    plain = ranks.run(base, 2, steps)
    profiled = ranks.run(base, 2, steps, build_profiler=profiler)
    # As text: NaN, of a step without fresh tokens, is not equal to itself.
    assert [repr(untimed(m)) for m in profiled[0]] == [repr(untimed(m)) for m in plain[0]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration_2", "iteration_3"]
    traces = list((tmp_path / "iteration_2").glob("*.pt.trace.json.gz"))
    assert len(traces) == 2
    for trace in traces:
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert "aten::mm" in {event["name"] for event in events}
    assert (tmp_path / "iteration_2" / "rank1_key_averages.txt").is_file()


def test_peak_memory_is_logged_when_asked_for(ranks, base):
    calls = [step(RAGGED, ADVANTAGES)]
    metrics = ranks.run(base, 1, calls, log_peak_memory_stats=True)[0][0]
    assert 0.01 < metrics["memory/trainer_peak_gib"] < 100


# ---- weights on their way out -------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_exports_of_all_ranks_are_the_checkpoint_that_was_loaded_bit_for_bit(
    ranks, base, num_ranks
):
    results = ranks.run(base, num_ranks, export(0))
    assert [version for version, _ in results] == [0] * num_ranks
    assert all(manifest for _, (_, manifest) in results), "every rank carries a part"
    weights = exported(results, 1)
    assert {n: tuple(t.shape) for n, t in weights.items()} == checkpoint_shapes(base)
    assert_weights_equal(weights, hf_weights(base))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_two_exports_may_wait_while_training_goes_on(ranks, base, num_ranks, order):
    first, second = order
    results = ranks.run(
        base,
        num_ranks,
        [
            ("gather_weights",),
            step(RAGGED, ADVANTAGES),
            ("gather_weights",),
            step(RAGGED, ADVANTAGES),
            ("export_weights", first),
            ("export_weights", second),
        ],
    )
    weights = {first: exported(results, 4), second: exported(results, 5)}
    assert_weights_equal(weights[0], hf_weights(base))
    assert_weights_close(weights[1], expected_update(base, RAGGED, ADVANTAGES)[0])


# ---- checkpoints --------------------------------------------------------------------------------


def save_to(folder, copy=False):
    return ("hold_state", copy), ("write_state", str(folder))


def decay(optimizer):
    """A scheduler whose rate says how often it has stepped."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


ADAM = {"build_optimizer": partial(torch.optim.AdamW, lr=0.01), "build_lr_scheduler": decay}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_checkpoint_holds_the_exported_weights(ranks, base, tmp_path, num_ranks):
    calls = [step(RAGGED, ADVANTAGES), *export(1), *save_to(tmp_path / "saved")]
    results = ranks.run(base, num_ranks, calls)
    assert [rank_results[-1] for rank_results in results] == [None] * num_ranks
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert_weights_equal(saved, exported(results, 2))
    config = (tmp_path / "saved" / "config.json").read_text()
    assert config == (base / "config.json").read_text()


@pytest.mark.parametrize(("saving", "loading"), [(1, 1), (2, 2), (2, 1), (1, 2), (2, 4)])
def test_a_trainer_goes_on_from_a_checkpoint_of_any_number_of_ranks(
    ranks, base, tmp_path, saving, loading
):
    """Weights, moments, scheduler, random state: what was held, not what came after."""
    first, second = step(RAGGED, ADVANTAGES), step(RAGGED[::-1], ADVANTAGES)
    held, write = save_to(tmp_path / "saved", copy=True)
    whole = ranks.run(base, saving, [first, *export(1), held, second, write, *export(2)], **ADAM)
    assert whole[0][5] is None
    calls = [("load_state", str(tmp_path / "saved")), *export(1), second, *export(2)]
    resumed = ranks.run(base, loading, calls, **ADAM)
    assert_weights_equal(exported(resumed, 2), exported(whole, 2))
    assert resumed[0][3]["policy_version"] == 2
    assert resumed[0][3]["lr"] == whole[0][4]["lr"] == 0.005
    if saving == loading:
        assert_weights_equal(exported(resumed, 5), exported(whole, 7))
    else:
        assert_weights_close(exported(resumed, 5), exported(whole, 7))


def test_a_learning_rate_that_was_changed_takes_part_in_the_schedule(ranks, base, tmp_path):
    first, folder = step(RAGGED, ADVANTAGES), tmp_path / "saved"
    ranks.run(base, 1, [first, *save_to(folder)], **ADAM)
    faster = ADAM | {"build_optimizer": partial(torch.optim.AdamW, lr=0.04)}
    results = ranks.run(base, 1, [("load_state", str(folder)), first, first], **faster)
    assert [result["lr"] for result in results[0][1:]] == [0.02, 0.01]


def test_a_trainer_that_never_stepped_comes_back_without_moments(ranks, base, tmp_path):
    folder, first = tmp_path / "saved", step(RAGGED, ADVANTAGES)
    ranks.run(base, 1, save_to(folder), **ADAM)
    resumed = ranks.run(base, 1, [("load_state", str(folder)), first, *export(1)], **ADAM)
    fresh = ranks.run(base, 1, [first, *export(1)], **ADAM)
    assert_weights_equal(exported(resumed, 3), exported(fresh, 2))


def test_a_folder_that_cannot_be_written_is_told_by_every_rank(ranks, base, tmp_path):
    (tmp_path / "file").touch()
    results = ranks.run(base, 2, save_to(tmp_path / "file" / "saved"))
    assert all("Not a directory" in rank_results[1] for rank_results in results)


def test_pickle_builds_nothing_but_the_description_of_tensors(ranks, base, tmp_path):
    ranks.run(base, 1, save_to(tmp_path))
    (file,) = tmp_path.rglob(".metadata")
    file.write_bytes(pickle.dumps({"a": Ranks}).replace(b"Ranks", b"Rank2"))
    with pytest.raises(pickle.UnpicklingError, match=r"\.metadata must not hold .*Rank2"):
        ranks.run(base, 1, [("load_state", str(tmp_path))])


def test_bf16_compute_exports_the_rounded_float32_masters(ranks, base):
    """Rounded once: a master that took a step too small for bf16 comes back as it was."""
    tiny_steps = partial(torch.optim.SGD, lr=1e-9)
    calls = [step(RAGGED, ADVANTAGES), *export(1)]
    results = ranks.run(base, 2, calls, dtype="bf16", build_optimizer=tiny_steps)
    weights = exported(results, 2)
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
    assert_weights_equal(weights, {n: t.bfloat16() for n, t in hf_weights(base).items()})


if __name__ == "trainer_rank":
    serve(globals()["connection"])
