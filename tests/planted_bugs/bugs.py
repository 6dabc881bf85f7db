"""The bugs: each is a change of one function of ours, made in a museum's run only.

A bug maps the modules that it changes to functions, which get the module as soon as it is loaded:
as a `Planting`, through which only what is there can be replaced. Nothing heavy may be imported at
the top: every process of a run loads this file at its start.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

Patch = Callable[[Any], None]


class PlantingError(RuntimeError):
    """A bug cannot be planted: what it changes is not there, or stays as it was."""


class Replaced(NamedTuple):
    """What a bug put in place of what."""

    owner: Any
    name: str
    was: Any


_OF_PLANTING = {"_owner", "_title", "_replaced", "_own", "__dict__", "__class__"}


class Planting:
    """A module, or a class of it, to a bug: reads as itself; only own attributes can be replaced.

    A missing one would make the bug a change of nothing, which no alarm could name.
    """

    def __init__(self, owner: Any, title: str, replaced: list[Replaced]) -> None:
        vars(self).update(_owner=owner, _title=title, _replaced=replaced)

    def _own(self, name: str) -> Any:
        if name not in vars(self._owner):
            raise PlantingError(f"{self._title} has no attribute {name} of its own")
        return vars(self._owner)[name]

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute, a class such that what it has cannot be missed either.

        Also `__init__` and the like are the owner's, and not those of this object.
        """
        if name in _OF_PLANTING:
            return object.__getattribute__(self, name)
        self._own(name)
        value = getattr(self._owner, name)
        if not isinstance(value, type):
            return value
        return Planting(value, f"{self._title}.{name}", self._replaced)

    def __setattr__(self, name: str, value: Any) -> None:
        """Replace an attribute that there is."""
        was = self._own(name)
        self._replaced.append(Replaced(self._owner, name, was))
        setattr(self._owner, name, value)


def plant(bug: str, module: ModuleType) -> list[Replaced]:
    """Let a bug change a module that was loaded; returns what it replaced."""
    replaced: list[Replaced] = []
    title = f"museum: bug {bug} is not planted: {module.__name__}"
    BUGS[bug][module.__name__](Planting(module, title, replaced))
    if not any(vars(owner)[name] is not was for owner, name, was in replaced):
        raise PlantingError(f"{title} is as it was")
    return replaced


_ENGINE = "grpo_components.rollout.vllm_engine"
_GENERATOR = "grpo_components.rollout.generator"


def _weights_not_loaded(engine: Any) -> None:
    engine.load_into_worker = lambda worker, tensors: None


def _half_loaded(engine: Any) -> None:
    load = engine.load_into_worker

    def half(worker: Any, tensors: Any) -> None:
        names = sorted(tensors)
        load(worker, {name: tensors[name] for name in names[: len(names) // 2]})

    engine.load_into_worker = half


def _half_stale(engine: Any) -> None:
    load, first = engine.load_into_worker, {}

    def half(worker: Any, tensors: Any) -> None:
        if not first:
            first.update({name: tensor.clone() for name, tensor in tensors.items()})
        names = sorted(tensors)
        stale = set(names[: len(names) // 2])
        load(worker, {name: (first if name in stale else tensors)[name] for name in names})

    engine.load_into_worker = half


def _wrong_layer(engine: Any) -> None:
    load = engine.load_into_worker
    swapped = {".layers.0.": ".layers.1.", ".layers.1.": ".layers.0."}

    def other(name: str) -> str:
        for mine, theirs in swapped.items():
            if mine in name:
                return name.replace(mine, theirs)
        return name

    def loads_other_layer(worker: Any, tensors: Any) -> None:
        load(worker, {other(name): tensor for name, tensor in tensors.items()})

    engine.load_into_worker = loads_other_layer


def _tied_head_stale(weights: Any) -> None:
    weights._repack_tied_head = lambda model: None


def _prefix_cache_stale(engine: Any) -> None:
    engine.empty_prefix_cache = lambda scheduler: None


def _swap_mislabelled(engine: Any) -> None:
    swap = engine.VLLMEngine._swap_weights

    def one_too_new(self: Any, version: int, tensors: Any) -> None:
        swap(self, version, tensors)
        self._engine.set_weight_version(str(version + 1))

    engine.VLLMEngine._swap_weights = one_too_new


def _one_push_behind(engine: Any) -> None:
    load, held = engine.load_into_worker, []

    def previous(worker: Any, tensors: Any) -> None:
        held.append({name: tensor.clone() for name, tensor in tensors.items()})
        load(worker, held[0])
        del held[:-1]

    engine.load_into_worker = previous


def _retokenised(generator: Any) -> None:
    import numpy as np

    pack, begin = generator.pack, generator.Generator.__init__
    tokenizers: list[Any] = []

    def begins(self: Any, **kwargs: Any) -> None:
        begin(self, **kwargs)
        tokenizers.append(self._tokenizer)

    def retokenised(trajectory: Any) -> Any:
        ids = trajectory.response_ids
        text = tokenizers[0].decode([token for token in ids.tolist() if token < 300])
        again = tokenizers[0].encode(text, add_bos=False, add_eos=False)
        new = ids.copy()
        again = np.array(again[: len(ids)], ids.dtype)
        new[: len(again)] = again
        return dataclasses.replace(trajectory, response_ids=new)

    generator.Generator.__init__ = begins
    generator.pack = lambda trajectories: pack([retokenised(each) for each in trajectories])


def _failure_as_zero(errors: Any) -> None:
    errors.failure_text = lambda *args, **kwargs: 0.0


def _wrong_axis(advantages: Any) -> None:
    import numpy as np

    def centred(rewards: Any) -> Any:
        valid = np.isfinite(rewards)
        count = valid.sum(axis=1, keepdims=True)
        mean = np.where(valid, rewards, 0.0).mean(axis=0, keepdims=True)
        return np.where(valid, rewards - mean, 0.0), count

    advantages._centred = centred


def _mask_shifted(trainer: Any) -> None:
    import numpy as np

    make = trainer.make_samples

    def shifted(batch: Any, advantages: Any, trained_tokens: Any, num_logged: int) -> Any:
        return make(batch, advantages, lambda each: np.roll(trained_tokens(each), 1), num_logged)

    trainer.make_samples = shifted


def _temperature_ignored(logprobs: Any) -> None:
    batch_of = logprobs.token_batch

    def at_one(trajectories: Any, *args: Any, **kwargs: Any) -> Any:
        hot = [
            each._replace(temperature=1.0)
            if hasattr(each, "_replace")
            else dataclasses.replace(each, temperature=1.0)
            for each in trajectories
        ]
        return batch_of(hot, *args, **kwargs)

    logprobs.token_batch = at_one


def _normalised_per_rank(trainer: Any) -> None:
    import torch.distributed as dist

    losses_of = trainer.Trainer._weighted_losses

    def per_rank(self: Any, members: Any, measured: Any, watch: Any, first: bool) -> Any:
        losses = losses_of(self, members, measured, watch, first)
        own = sum(sample.num_tokens for sample in members)
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, own)
        return losses * (sum(counts) / len(counts) / own)

    trainer.Trainer._weighted_losses = per_rank


def _kl_over_padding(penalties: Any) -> None:
    compute = penalties.Penalties.__call__

    def diluted(self: Any, tokens: Any) -> Any:
        terms, metrics = compute(self, tokens)
        counts = tokens.sequence_ids.bincount()
        share = float(counts.sum()) / float(len(counts) * counts.max())
        return [share * term for term in terms], {
            name: share * values for name, values in metrics.items()
        }

    penalties.Penalties.__call__ = diluted


def _cursor_pinned(stream: Any) -> None:
    state_of, pinned = stream.PromptStream.state_dict, []

    def state(self: Any) -> Any:
        if not pinned:
            pinned.append(state_of(self))
        return pinned[0]

    begin = stream.PromptStream.__init__

    def begins(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        state(self)

    stream.PromptStream.__init__ = begins
    stream.PromptStream.state_dict = state


def _trained_twice(ledger: Any) -> None:
    state_of, finish = ledger.Ledger.state_dict, ledger.Ledger.finish_step
    trained: list[Any] = []

    def finish_step(self: Any, policy_version: int) -> None:
        trained[:] = [(each.prompt, each.epoch) for each in self.in_state("in_training")]
        finish(self, policy_version)

    def state(self: Any) -> Any:
        saved = state_of(self)
        return {**saved, "reissued": [*saved["reissued"], *trained]}

    ledger.Ledger.finish_step, ledger.Ledger.state_dict = finish_step, state


def _long_ones_dropped(handles: Any) -> None:
    add, means = handles.ReplayBufferHandle.add, []

    async def drops_long(self: Any, group: Any) -> None:
        tokens = group.summary.response_tokens
        means.append(sum(tokens) / len(tokens))
        if means[-1] > 1.05 * sorted(means)[len(means) // 2]:
            return await self._ledger.drop([group.entry.group_id], "stale", reissue=True)
        await add(self, group)

    handles.ReplayBufferHandle.add = drops_long


def _moving_evaluation(evaluation: Any) -> None:
    ask = evaluation.Evaluation._ask

    async def moves(self: Any, generator: Any, rows: Any, step: int) -> Any:
        results = await ask(self, generator, rows, step)
        for result in results[len(results) // 2 :]:  # answered after a pull in between
            for name in ("oldest_version", "newest_version"):
                result[name] += 1
        return results

    async def try_once(self: Any, *args: Any) -> Any:
        step, _, generators, pull, pinned = args
        await evaluation._none_lost(pull(each, f"evaluation {step}") for each in generators)
        pinned.set()
        rows = range(len(self._held_out))
        shares = [
            await self._ask(each, rows[i :: len(generators)], step)
            for i, each in enumerate(generators)
        ]
        return list(itertools.chain(*shares))

    evaluation.Evaluation._ask, evaluation.Evaluation._try = moves, try_once


def _stale_logprob(trainer: Any) -> None:
    make, count = trainer.make_samples, itertools.count()

    def with_some_far_off(*args: Any) -> Any:
        samples = make(*args)
        if next(count) != 2:  # its tokens are those of older policies
            return samples
        for sample in samples[:8]:
            logprobs = sample.trajectory.generator_logprobs.copy()
            logprobs[sample.mask.argmax()] = -150.0
            sample.trajectory.generator_logprobs = logprobs
        return samples

    trainer.make_samples = with_some_far_off


def _seeds_reused(generator: Any) -> None:
    count = itertools.count()

    def of_this_generator(seed: int, *numbers: int) -> int:
        return (seed * 1_000_003 + next(count)) % 2**31

    generator.sampling_seed = of_this_generator


BUGS: dict[str, dict[str, Patch]] = {
    "weights_not_loaded": {_ENGINE: _weights_not_loaded},
    "half_loaded": {_ENGINE: _half_loaded},
    "half_stale": {_ENGINE: _half_stale},
    "wrong_layer": {_ENGINE: _wrong_layer},
    "tied_head_stale": {"grpo_components.rollout.vllm_weights": _tied_head_stale},
    "prefix_cache_stale": {_ENGINE: _prefix_cache_stale},
    "swap_mislabelled": {_ENGINE: _swap_mislabelled},
    "one_push_behind": {_ENGINE: _one_push_behind},
    "retokenised": {_GENERATOR: _retokenised},
    "failure_as_zero": {"grpo_components.objective.component_errors": _failure_as_zero},
    "wrong_axis": {"grpo_components.objective.advantages": _wrong_axis},
    "mask_shifted": {"grpo_components.training.trainer": _mask_shifted},
    "temperature_ignored": {"grpo_components.models.logprobs": _temperature_ignored},
    "normalised_per_rank": {"grpo_components.training.trainer": _normalised_per_rank},
    "kl_over_padding": {"grpo_components.objective.penalties": _kl_over_padding},
    "cursor_pinned": {"grpo_components.data.prompt_stream": _cursor_pinned},
    "trained_twice": {"grpo_components.exchange.ledger": _trained_twice},
    "long_ones_dropped": {"grpo_components.cluster.handles": _long_ones_dropped},
    "moving_evaluation": {"grpo_components.evaluation.evaluation": _moving_evaluation},
    "nan_by_multiplication": {"grpo_components.training.trainer": _stale_logprob},
    "seeds_reused": {_GENERATOR: _seeds_reused},
}
"""Name of a bug -> the modules that it changes, and how."""
