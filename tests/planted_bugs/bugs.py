"""The bugs: each is a fault in one function of ours, planted only into a run of the museum.

A fault gets the function that it replaces, then that function's own arguments. Nothing heavy may be
imported at the top: every process of a run loads this file at its start.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple


class PlantingError(RuntimeError):
    """A bug cannot be planted: what it changes is not there."""


class Bug(NamedTuple):
    module: str
    where: str
    """Name of a function, or of a class and its own method."""
    published: str
    """A public thread about it: repository#issue, or repository#p and the pull request."""
    fault: Callable[..., Any]
    """Its docstring says what the published bug did."""


BUGS: dict[str, Bug] = {}
"""The bugs by their names, which are those of the functions below."""


def plant(name: str, module: ModuleType) -> Any:
    """Put a bug into its module, which is loaded; return the function that the bug replaces."""
    bug, owner = BUGS[name], module
    *outer, method = bug.where.split(".")
    for each in outer:
        owner = vars(owner).get(each)
    original = vars(owner).get(method) if owner is not None else None
    if original is None:
        title = f"museum: bug {name} is not planted: {module.__name__}"
        raise PlantingError(f"{title} has no {bug.where} of its own")

    @wraps(original)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        return bug.fault(original, *args, **kwargs)

    setattr(owner, method, faulty)
    return original


def _replaces(module: str, where: str, published: str) -> Callable[[Any], Any]:
    def register(fault: Callable[..., Any]) -> Callable[..., Any]:
        BUGS[fault.__name__] = Bug(f"grpo_components.{module}", where, published, fault)
        return fault

    return register


_FIRST: dict[str, Any] = {}
_HELD: list[dict[str, Any]] = []
_COUNT = itertools.count()


def _copied(tensors: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@_replaces("rollout.vllm_backend", "load_into_worker", "huggingface/trl#5312")
def weights_not_loaded(load: Any, worker: Any, tensors: Any) -> None:
    """The engine goes on with the base weights after each push."""


@_replaces("rollout.vllm_backend", "load_into_worker", "sgl-project/sglang#p9663")
def half_loaded(load: Any, worker: Any, tensors: Any) -> None:
    """A reload takes a part of the parameters, and only none at all is an error."""
    names = sorted(tensors)
    load(worker, {name: tensors[name] for name in names[: len(names) // 2]})


@_replaces("rollout.vllm_backend", "load_into_worker", "vllm-project/vllm#48312")
def half_stale(load: Any, worker: Any, tensors: Any) -> None:
    """A part of the parameters keeps what an earlier reload left there."""
    if not _FIRST:
        _FIRST.update(_copied(tensors))
    names = sorted(tensors)
    stale = set(names[: len(names) // 2])
    load(worker, {name: (_FIRST if name in stale else tensors)[name] for name in names})


@_replaces("rollout.vllm_backend", "load_into_worker", "NovaSky-AI/SkyRL#1680")
def wrong_layer(load: Any, worker: Any, tensors: Any) -> None:
    """After a weight sync, tensors are in places of others."""

    def other(name: str) -> str:
        if ".layers.0." in name:
            return name.replace(".layers.0.", ".layers.1.")
        return name.replace(".layers.1.", ".layers.0.")

    load(worker, {other(name): tensor for name, tensor in tensors.items()})


@_replaces("rollout.vllm_weights", "_repack_tied_head", "PrimeIntellect-ai/prime-rl#p2823")
def tied_head_stale(repack: Any, model: Any) -> None:
    """The embedding is updated, the tied head keeps a copy of the former one."""


@_replaces("rollout.vllm_backend", "empty_prefix_cache", "NVIDIA-NeMo/RL#p4018")
def prefix_cache_stale(empty: Any, scheduler: Any) -> None:
    """After a pull, new requests read keys and values of the former weights."""


@_replaces("rollout.vllm_backend", "VLLMBackend.load", "areal-project/AReaL#p1569")
def swap_mislabelled(swap: Any, self: Any, version: int, weights: Any) -> None:
    """Tokens get the number of weights that did not sample them."""
    swap(self, version, weights)
    self._engine.set_weight_version(str(version + 1))


@_replaces("rollout.vllm_backend", "load_into_worker", "vllm-project/vllm#32718")
def one_push_behind(load: Any, worker: Any, tensors: Any) -> None:
    """A reload returns cached weights, those of the push before."""
    _HELD.append(_copied(tensors))
    load(worker, _HELD[0])
    del _HELD[:-1]


@_replaces("rollout.generator", "Generator.__init__", "huggingface/trl#5224")
def retokenised(begin: Any, self: Any, **kwargs: Any) -> None:
    """Responses are decoded and encoded again: other tokens than those sampled are trained."""
    import numpy as np

    begin(self, **kwargs)
    module: Any = sys.modules[type(self).__module__]
    pack = module.pack

    def again(trajectory: Any) -> Any:
        ids = trajectory.response_ids
        text = self._tokenizer.decode([token for token in ids.tolist() if token < 300])
        encoded = self._tokenizer.encode(text, add_bos=False, add_eos=False)[: len(ids)]
        new = ids.copy()
        new[: len(encoded)] = np.array(encoded, ids.dtype)
        return dataclasses.replace(trajectory, response_ids=new)

    module.pack = lambda trajectories: pack([again(each) for each in trajectories])


@_replaces("objective.component_errors", "failure_text", "NVIDIA-NeMo/RL#431")
def failure_as_zero(text_of: Any, *args: Any, **kwargs: Any) -> float:
    """A reward that fails counts as reward 0."""
    return 0.0


@_replaces("objective.advantages", "_centred", "XU-YIJIE/grpo-flat#2")
def wrong_axis(centred: Any, rewards: Any) -> Any:
    """Advantages are normalised over prompts, not over the responses to one."""
    import numpy as np

    valid = np.isfinite(rewards)
    count = valid.sum(axis=1, keepdims=True)
    mean = np.where(valid, rewards, 0.0).mean(axis=0, keepdims=True)
    return np.where(valid, rewards - mean, 0.0), count


@_replaces("training.trainer", "make_samples", "modelscope/ms-swift#p8427")
def mask_shifted(
    make: Any, batch: Any, advantages: Any, trained_tokens: Any, num_logged: int
) -> Any:
    """The mask of trained tokens is shifted by one against the logprobs."""
    import numpy as np

    return make(batch, advantages, lambda each: np.roll(trained_tokens(each), 1), num_logged)


@_replaces("models.logprobs", "token_batch", "huggingface/trl#4159")
def temperature_ignored(batch_of: Any, trajectories: Any, *args: Any, **kwargs: Any) -> Any:
    """The trainer's logprobs are not divided by the sampling temperature."""
    hot = [
        each._replace(temperature=1.0)
        if hasattr(each, "_replace")
        else dataclasses.replace(each, temperature=1.0)
        for each in trajectories
    ]
    return batch_of(hot, *args, **kwargs)


@_replaces("training.trainer", "Trainer._weighted_losses", "allenai/open-instruct#p1161")
def normalised_per_rank(losses_of: Any, self: Any, members: Any, measured: Any, first: bool) -> Any:
    """Each rank divides by its own number of tokens."""
    import torch.distributed as dist

    losses = losses_of(self, members, measured, first)
    own = sum(sample.num_tokens for sample in members)
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, own)
    return losses * (sum(counts) / len(counts) / own)


@_replaces("objective.composition", "Penalties.__call__", "allenai/open-instruct#p535")
def kl_over_padding(compute: Any, self: Any, tokens: Any) -> Any:
    """The KL is a mean over padded positions: short responses dilute it."""
    terms, metrics = compute(self, tokens)
    counts = tokens.sequence_ids.bincount()
    share = float(counts.sum()) / float(len(counts) * counts.max())
    return [share * term for term in terms], {
        name: share * values for name, values in metrics.items()
    }


@_replaces("data.prompt_stream", "PromptStream.__init__", "huggingface/trl#7274")
def cursor_pinned(begin: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """The saved position stays where a group was dropped: later prompts are trained again."""
    begin(self, *args, **kwargs)
    first = self.state_dict()
    self.state_dict = lambda: first


@_replaces("exchange.ledger", "Ledger.finish_step", "hiyouga/EasyR1#57")
def trained_twice(finish: Any, self: Any, policy_version: int, outcome: Any = None) -> None:
    """A resume generates groups again that had been trained."""
    trained = [(each.prompt, each.epoch) for each in self.in_state("in_training")]
    finish(self, policy_version, outcome)

    def state() -> Any:
        saved = type(self).state_dict(self)
        return {**saved, "reissued": [*saved["reissued"], *trained]}

    self.state_dict = state


@_replaces(
    "cluster.handles", "ReplayBufferHandle.add", "thinking-machines-lab/tinker-cookbook#p822"
)
async def long_ones_dropped(add: Any, self: Any, entry: Any) -> None:
    """Groups with long responses are dropped more often, so the policy learns to be short."""
    lengths = vars(self).setdefault("lengths", [])
    lengths.append(entry.tokens)
    if lengths[-1] > 1.05 * sorted(lengths)[len(lengths) // 2]:
        return await self._ledger.drop([entry.group_id], "stale", reissue=True)
    await add(self, entry)


@_replaces("evaluation.evaluation", "Evaluation._answers", "radixark/miles#p1740")
async def moving_evaluation(ask: Any, self: Any, *args: Any) -> Any:
    """Weights change while an evaluation runs: it measures no policy."""
    results = await ask(self, *args)
    for result in results[len(results) // 2 :]:  # answered after a pull in between
        for name in ("oldest_version", "newest_version"):
            result[name] += 1
    return results


@_replaces("training.trainer", "make_samples", "PrimeIntellect-ai/prime-rl#p2084")
def nan_by_multiplication(make: Any, *args: Any) -> Any:
    """A token far off the policy is masked by a factor 0, and 0 times infinity is NaN."""
    samples = make(*args)
    if next(_COUNT) == 2:  # its tokens are those of older policies
        for sample in samples[:8]:
            logprobs = sample.trajectory.generator_logprobs.copy()
            logprobs[sample.mask.argmax()] = -150.0  # one far off the policy
            sample.trajectory.generator_logprobs = logprobs
    return samples


@_replaces("rollout.generator", "sampling_seed", "modelscope/ms-swift#p7858")
def seeds_reused(seed_of: Any, seed: int, *numbers: int) -> int:
    """All engines sample with the same seeds."""
    return (seed * 1_000_003 + next(_COUNT)) % 2**31
