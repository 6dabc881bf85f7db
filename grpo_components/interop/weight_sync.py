"""Loads the weights of a `VLLMParameterServer` into the policy of a torchrl collector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.weight_update import WeightSyncScheme

from grpo_components.exchange.weight_deltas import DeltaBucket, RebuiltWeights
from grpo_components.exchange.weights import (
    StateDict,
    check_names_and_shapes,
    checkpoint_shapes,
    shapes_of,
    unpack_buckets,
)

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class ParameterServerScheme(WeightSyncScheme):
    """A torchrl weight sync scheme that pulls from a parameter server.

    Give it to a collector, `weight_sync_schemes={"policy": scheme}`; then each
    `collector.update_policy_weights_()` loads the newest weights into its policy, unless it has
    them already. Without a collector, `init_on_receiver`, `connect` and `receive` do the same.

    Args:
        newest: function of the version whose bytes the caller keeps; returns what
            `VLLMParameterServer.newest` does.
        fetch: function from the references among its results to their values, such as `ray.get`.
        load: function of the policy and the tensors by Hugging Face name, which loads them:
            `load_into_module`, or `load_into_vllm`.
    """

    def __init__(
        self,
        newest: Callable[[int], tuple[int, Sequence[Any], Sequence[Any]]],
        fetch: Callable[[Sequence[Any]], Sequence[Any]],
        load: Callable[[Any, StateDict], None],
    ) -> None:
        super().__init__(strategy="tensordict")  # not used: `load` knows the policy
        self._newest, self._fetch, self._load = newest, fetch, load
        self._rebuilt, self._held = RebuiltWeights(), -1
        self._policy: Any = None
        self.version = -1
        """Version of the policy's weights; -1 before the first pull."""

    def pull(self) -> StateDict | None:
        """Load the newest weights.

        Returns:
            The tensors by name, of bytes that the next pull may change; None if the policy has
            them already.

        Raises:
            ValueError: a tensor is damaged, missing, unknown or of another shape; it is named, and
                the policy keeps its weights.
            LookupError: nothing was pushed yet.
        """
        version, references, _ = self._newest(self._held)
        if version == self.version:
            return None
        buckets = list(self._fetch(references))
        deltas = [bucket for bucket in buckets if isinstance(bucket, DeltaBucket)]
        self._held = -1  # a rebuild that fails keeps nothing
        rebuilt = self._rebuilt.rebuild(version, deltas) if deltas else []
        tensors = unpack_buckets(rebuilt or buckets)
        self._load(self._policy_now(), tensors)
        if rebuilt:
            self._rebuilt.keep(rebuilt)
            self._held = version
        self.version = version
        return tensors

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Load the newest weights into the collector's policy.

        Args:
            weights: None: they come from the server.
            worker_ids: None: the policy is in this process.
        """
        if weights is not None or worker_ids is not None:
            raise ValueError("weights: given, and the scheme pulls them; allowed: none")
        self.pull()

    def receive(self, timeout: float | None = None) -> TensorDict | None:
        """Load the newest weights; return them, or None if the policy has them already.

        Args:
            timeout: not used: nothing is waited for.
        """
        tensors = self.pull()
        return None if tensors is None else TensorDict(dict(tensors))

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Do nothing: the server needs no connection, and the first pull brings all weights."""
        self.synchronized_on_sender = self.initialized_on_sender
        self.synchronized_on_receiver = self.initialized_on_receiver

    def create_transport(self, **kwargs: Any) -> Any:
        """Refuse: the weights travel as the server's references do."""
        raise NotImplementedError("a parameter server needs no transport of torchrl")

    def _init_on_sender_impl(
        self, model_id: str = "policy", context: Any = None, model: Any = None, **_: Any
    ) -> None:
        self.model_id, self.context, self._policy = model_id, context, model

    def _init_on_receiver_impl(
        self, model_id: str = "policy", context: Any = None, model: Any = None, **_: Any
    ) -> None:
        self._init_on_sender_impl(model_id, context, model)

    def _policy_now(self) -> Any:
        if self._policy is not None:
            return self._policy
        if self.context is None:
            raise RuntimeError("the scheme has no policy: the collector has ended")
        return self.context.policy


def load_into_module(policy: nn.Module, tensors: StateDict) -> None:
    """Copy weights into a module whose state dict has their names, or into its `model`.

    Args:
        policy: a model of transformers, or a wrapper of torchrl that has one as `model`.
        tensors: tensors by Hugging Face name.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape; nothing is copied then.
    """
    inner = getattr(policy, "model", policy)
    module = policy if _HEAD in policy.state_dict() or not isinstance(inner, nn.Module) else inner
    own = module.state_dict()
    embedding = own.get(_EMBEDDING)
    if embedding is not None and _HEAD in own and own[_HEAD].data_ptr() == embedding.data_ptr():
        own.pop(_HEAD)  # tied: it is the embedding, and is not sent
    check_names_and_shapes(shapes_of(tensors), shapes_of(own))
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def load_into_vllm(policy: Any, tensors: StateDict) -> None:
    """Load weights into a vLLM engine in this process, or into the one of torchrl's `vLLMWrapper`.

    The engine needs one worker in this process: `VLLM_ENABLE_V1_MULTIPROCESSING=0`.
    """
    from grpo_components.rollout.vllm_weights import load_into_worker  # imports vLLM

    engine = policy if hasattr(policy, "collective_rpc") else policy.model
    folder = Path(engine.llm_engine.model_config.model)
    if folder.is_dir():  # not a name on the hub
        check_names_and_shapes(shapes_of(tensors), checkpoint_shapes(folder))
    engine.collective_rpc(load_into_worker, args=(tensors,))
    engine.reset_prefix_cache()
