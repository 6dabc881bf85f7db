"""Sends weights from a trainer's process to vLLM's workers, by vLLM's own engine of NCCL."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
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
from grpo_components.training.relayed_client import RelayedClient, Request


class SnapshotSource(WeightSource):
    """The tensors of a snapshot in CPU memory, copied to the device one by one as they are sent."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: list[tuple[TensorEntry, Tensor]] = []

    def fill(self, buckets: Sequence[tuple[Manifest, NDArray[np.uint8]]]) -> None:
        """Take the buckets of a snapshot; of none, to keep no memory."""
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


@dataclass
class _Link:
    """Connection to one process of a receiver."""

    incarnation: int
    source: SnapshotSource
    number: int = -1
    """Number of the last transfer."""
    engine: TrainerWeightTransferEngine[Any] | None = None
    closing: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        """Leave the group, which also ends a send that waits for a receiver."""
        with self.closing:
            if self.engine is not None:
                self.engine.shutdown()


class WeightSender:
    """Sends snapshots to receivers, each over a group of its own, side by side."""

    def __init__(
        self,
        device: str,
        *,
        workers: int,
        host: str,
        timeout_s: float,
        buffer_bytes: int,
    ) -> None:
        self._device, self._workers = torch.device(device), workers
        self._host, self._timeout_s, self._buffer_bytes = host, timeout_s, buffer_bytes
        self._links: dict[str, _Link] = {}
        self._clients: dict[int, RelayedClient] = {}
        """Client of each transfer that is not over, or was given up, by the transfer's number."""
        self._lock = threading.Lock()

    @property
    def calls(self) -> tuple[Callable[..., Any], ...]:
        """What a role offers the driver: `send_weights`, `next_request` and `abandon_send`."""
        return self.send_weights, self.next_request, self.abandon_send

    def send_weights(
        self,
        number: int,
        receiver: str,
        incarnation: int,
        *buckets: tuple[Manifest, NDArray[np.uint8]],
    ) -> None:
        """Send a snapshot to one receiver, which takes it at the same time."""
        client, link = self._client(number, receiver), self._link(receiver, incarnation)
        if client.abandoned:
            raise ConnectionError(client.abandoned)
        link.number = number
        try:
            link.source.fill(buckets)
            if link.engine is None:
                link.engine = WeightTransferTrainerFactory.trainer_init(
                    self._init_info(), client=client, source=link.source
                )
            link.engine.client = client
            link.engine.send_weights()
        except BaseException:
            self._drop(receiver, link)
            raise
        finally:
            link.source.fill([])
            client.end()

    def next_request(self, number: int, receiver: str, answered: bool) -> Request | None:
        """Wait for the next call to relay to the receiver; see `RelayedClient.next_request`."""
        client = self._client(number, receiver)
        request = client.next_request(answered=answered)
        if request is None and not client.abandoned:
            with self._lock:
                del self._clients[number]
        return request

    def abandon_send(self, number: int, receiver: str, reason: str) -> None:
        """End a transfer whose receiver failed, and leave the group."""
        self._client(number, receiver).abandon(reason)
        with self._lock:
            link = self._links.get(receiver)
        if link is not None and link.number <= number:  # else a later transfer has it
            self._drop(receiver, link)

    def _client(self, number: int, receiver: str) -> RelayedClient:
        with self._lock:
            return self._clients.setdefault(number, RelayedClient(receiver, self._timeout_s))

    def _link(self, receiver: str, incarnation: int) -> _Link:
        with self._lock:
            old = self._links.get(receiver)
            if old is not None and old.incarnation == incarnation:
                return old
            link = _Link(incarnation, SnapshotSource(self._device))
            self._links[receiver] = link
        if old is not None:
            old.close()
        return link

    def _drop(self, receiver: str, link: _Link) -> None:
        with self._lock:
            if self._links.get(receiver) is link:
                del self._links[receiver]
        link.close()

    def _init_info(self) -> NCCLTrainerInitInfo:
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
