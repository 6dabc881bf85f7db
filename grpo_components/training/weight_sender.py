"""Sends weights from a trainer's process to vLLM's workers, by vLLM's NCCL transfer engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_components.exchange.weights import Manifest, TensorEntry
from grpo_components.rendezvous import local_rendezvous

BUFFER_BYTES = 256 * 2**20
"""Bytes of one buffer on the GPU, which is filled before it is sent."""


class SnapshotSource:
    """Implements vLLM's `WeightSource` for weights in CPU memory; copies each to the device."""

    def __init__(
        self, device: torch.device, buckets: Sequence[tuple[Manifest, NDArray[np.uint8]]]
    ) -> None:
        self._device = device
        self._tensors = [
            (entry, _view(entry, bucket)) for manifest, bucket in buckets for entry in manifest
        ]

    def metadata(self) -> list[Any]:
        """Return name, dtype and shape of each tensor."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [
            ParamMeta(entry.name, getattr(torch, entry.dtype), entry.shape)
            for entry, _ in self._tensors
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for entry, tensor in self._tensors:
            yield entry.name, tensor.to(self._device)


class _NobodyToAsk:
    """Implements vLLM's `VLLMWeightSyncClient` with empty methods: the receiver needs no calls."""

    def init_weight_transfer_engine(self, init_info: Any) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: Any) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


@dataclass
class _Link:
    """Connection to a receiver's process; a restarted receiver (next incarnation) gets another."""

    incarnation: int
    group: Any
    """vLLM's `NCCLTrainerInitInfo`."""
    engine: Any = None
    closed: bool = False
    closing: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        """Leave the NCCL group, which also ends a send that waits for a receiver."""
        with self.closing:
            self.closed = True
            if self.engine is not None:
                self.engine.shutdown()


class WeightSender:
    """Sends weights to receivers, one at a time, each over its own NCCL group."""

    def __init__(self, device: str, *, workers: int, host: str) -> None:
        # Imported here: vLLM takes seconds, and the driver imports this module.
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        self._device, self._host = torch.device(device), host
        size = {"world_size": 1 + workers, "packed_buffer_size_bytes": BUFFER_BYTES}
        self._describe: Any = partial(NCCLTrainerInitInfo, rank=0, **size)
        self._join: Any = WeightTransferTrainerFactory.trainer_init
        self._links: dict[str, _Link] = {}
        self._lock = threading.Lock()

    def transfer_group(self, receiver: str, incarnation: int) -> dict[str, Any]:
        """Return the arguments with which a receiver joins an NCCL group with this process."""
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
        """Send weights to one receiver, which must be receiving at the same time."""
        link: Any = self._links[receiver]
        source: Any = SnapshotSource(self._device, buckets)
        try:
            if link.engine is None and not link.closed:
                link.engine = self._join(link.group, client=_NobodyToAsk(), source=source)
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

    def _new_group(self) -> Any:
        rendezvous = local_rendezvous(self._host)  # vLLM opens the port itself
        return self._describe(master_address=rendezvous.host, master_port=rendezvous.port)


def _view(entry: TensorEntry, bucket: NDArray[np.uint8]) -> Tensor:
    raw = bucket[entry.offset : entry.offset + entry.nbytes]
    return torch.frombuffer(raw, dtype=getattr(torch, entry.dtype), count=-1).view(entry.shape)
