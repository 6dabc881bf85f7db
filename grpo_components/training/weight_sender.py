"""Sends weights from a trainer's process to vLLM's workers, by vLLM's own engine of NCCL."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerWeightTransferEngine,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from grpo_components.exchange.weights import Manifest, TensorEntry
from grpo_components.rendezvous import open_rendezvous


class SnapshotSource(WeightSource):
    """The tensors of a snapshot in CPU memory, copied to the device one by one as they are sent."""

    def __init__(
        self, device: torch.device, buckets: Sequence[tuple[Manifest, NDArray[np.uint8]]]
    ) -> None:
        self._device = device
        self._tensors = [
            (entry, _view(entry, bucket)) for manifest, bucket in buckets for entry in manifest
        ]

    def metadata(self) -> list[ParamMeta]:
        """Return name, dtype and shape of each tensor."""
        return [
            ParamMeta(entry.name, getattr(torch, entry.dtype), entry.shape)
            for entry, _ in self._tensors
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for entry, tensor in self._tensors:
            yield entry.name, tensor.to(self._device)


class _NobodyToAsk:
    """Has the methods of vLLM's `VLLMWeightSyncClient`; the receiver knows what it has to do."""

    def init_weight_transfer_engine(self, init_info: Any) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: Any) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


@dataclass
class _Link:
    """Connection to one process of a receiver."""

    incarnation: int
    group: NCCLTrainerInitInfo
    engine: TrainerWeightTransferEngine[Any] | None = None
    closed: bool = False
    closing: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        """Leave the group, which also ends a send that waits for a receiver."""
        with self.closing:
            self.closed = True
            if self.engine is not None:
                self.engine.shutdown()


class WeightSender:
    """Sends snapshots to receivers, each over a group of its own, side by side."""

    def __init__(self, device: str, *, workers: int, host: str, buffer_bytes: int) -> None:
        self._device, self._workers = torch.device(device), workers
        self._host, self._buffer_bytes = host, buffer_bytes
        self._links: dict[str, _Link] = {}
        self._lock = threading.Lock()

    def transfer_group(self, receiver: str, incarnation: int) -> dict[str, Any]:
        """Return how a receiver's process joins the group that it shares with this one."""
        with self._lock:
            link = old = self._links.get(receiver)
            if old is None or old.closed or old.incarnation != incarnation:
                link = self._links[receiver] = _Link(incarnation, self._new_group())
        assert link is not None
        if old is not None and old is not link:
            old.close()
        group = link.group
        return {
            "master_address": group.master_address,
            "master_port": group.master_port,
            "world_size": group.world_size,
            "rank_offset": 1,
            "packed": group.packed,
            "packed_buffer_size_bytes": group.packed_buffer_size_bytes,
            "packed_num_buffers": group.packed_num_buffers,
        }

    def send_weights(self, receiver: str, *buckets: tuple[Manifest, NDArray[np.uint8]]) -> None:
        """Send a snapshot to one receiver, which takes it at the same time."""
        link = self._links[receiver]
        source = SnapshotSource(self._device, buckets)
        try:
            if link.engine is None and not link.closed:
                link.engine = WeightTransferTrainerFactory.trainer_init(
                    link.group, client=_NobodyToAsk(), source=source
                )
            if link.closed or link.engine is None:
                raise ConnectionError(f"the sending of weights to {receiver} was given up")
            link.engine.source = source
            link.engine.send_weights()
        except BaseException:
            link.close()
            raise
        finally:
            if link.engine is not None:
                link.engine.source = None  # else it would keep the snapshot

    def abandon_send(self, receiver: str, incarnation: int) -> None:
        """End a transfer whose receiver failed, and leave the group."""
        link = self._links[receiver]
        if link.incarnation == incarnation:
            link.close()

    def _new_group(self) -> NCCLTrainerInitInfo:
        rendezvous = open_rendezvous(self._host)
        assert rendezvous.listener is not None
        os.close(rendezvous.listener)  # vLLM opens the port itself
        return NCCLTrainerInitInfo(
            rank=0,
            master_address=rendezvous.host,
            master_port=rendezvous.port,
            world_size=1 + self._workers,
            packed_buffer_size_bytes=self._buffer_bytes,
        )


def _view(entry: TensorEntry, bucket: NDArray[np.uint8]) -> Tensor:
    raw = bucket[entry.offset : entry.offset + entry.nbytes]
    return torch.frombuffer(raw, dtype=getattr(torch, entry.dtype), count=-1).view(entry.shape)
