"""Transfers weights over gloo as vLLM's engines of `nccl` do: the same calls and group, on a CPU.

vLLM finds both engines under the name `gloo`, in every process that imports this module.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    VLLMWeightSyncClient,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.nccl_common import (
    NCCLWeightTransferInitInfo,
    worker_init_payload,
)
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)

GLOO = "gloo"
"""Name of the engines in vLLM's registries."""
_PART_BYTES = 64 * 2**20
"""Bytes after which received tensors are loaded."""


@dataclass(kw_only=True)
class GlooInitInfo(NCCLWeightTransferInitInfo):
    """What a worker needs to join the group."""

    timeout_s: float
    """Longest wait of one operation, in seconds."""


@dataclass(kw_only=True)
class GlooTrainerInitInfo(TrainerInitInfo):
    """What the sender needs to open the group."""

    backend: ClassVar[str] = GLOO
    master_address: str
    """IP address of this node, on which the sender listens."""
    master_port: int
    listener: int
    """Descriptor of the listening socket."""
    world_size: int
    """The sender and all workers of one engine."""
    timeout_s: float
    """Longest wait of one operation, in seconds."""


class GlooGroup:
    """The sender and the workers of one engine; rank 0 sends to all others.

    It is no part of torch's default group.
    """

    def __init__(
        self, info: GlooInitInfo | GlooTrainerInitInfo, rank: int, listener: int | None = None
    ) -> None:
        timeout = timedelta(seconds=info.timeout_s)
        assert info.master_address is not None and info.master_port is not None
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            info.master_address,
            info.master_port,
            info.world_size,
            is_master=rank == 0,
            timeout=timeout,
            master_listen_fd=listener,
        )
        self._group: Any = dist.ProcessGroupGloo(  # pyright: ignore[reportPrivateImportUsage]
            store, rank, info.world_size, timeout
        )

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor from rank 0, or receive it into a contiguous one of the same size."""
        group = self._group
        if group is None:
            raise ConnectionError("the transfer group was left")
        group.broadcast(tensor.detach().contiguous().view(-1).view(torch.uint8), 0).wait()

    def destroy(self) -> None:
        """Leave the group; the others' operations fail."""
        self._group = None


class GlooWeightTransferEngine(NCCLWeightTransferEngine):
    """Worker's side: receives the tensors one by one, and loads them in parts."""

    init_info_cls = GlooInitInfo

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Join the group."""
        rank = init_info.rank_offset + self.parallel_config.rank
        self.model_update_group = cast(Any, GlooGroup(cast(GlooInitInfo, init_info), rank))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive the announced tensors in their order, and load them."""
        group, model = cast(GlooGroup, self.model_update_group), cast(Any, self.model)
        part: list[tuple[str, Tensor]] = []
        infos = update_info.names, update_info.dtype_names, update_info.shapes
        for name, dtype, shape in zip(*infos, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            group.broadcast(tensor)
            part.append((name, tensor))
            if sum(tensor.nbytes for _, tensor in part) >= _PART_BYTES:
                model.load_weights(part)
                part = []
        model.load_weights(part)


class GlooTrainerWeightTransferEngine(NCCLTrainerWeightTransferEngine):
    """Sender's side: the order of calls is vLLM's, `send_weights` of its NCCL engine."""

    init_info_cls = cast(Any, GlooTrainerInitInfo)

    @classmethod
    def trainer_init(
        cls,
        init_info: Any,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Open the group, and let the workers join it."""
        assert source is not None and init_info.is_sender
        engine = cls(client=client, source=source, packed=False)
        workers = GlooInitInfo(
            master_address=init_info.master_address,
            master_port=init_info.master_port,
            rank_offset=1,
            world_size=init_info.world_size,
            timeout_s=init_info.timeout_s,
        )
        with ThreadPoolExecutor(max_workers=1) as thread:
            joined = thread.submit(client.init_weight_transfer_engine, worker_init_payload(workers))
            group = GlooGroup(init_info, 0, init_info.listener)
            engine.model_update_group = cast(Any, group)
            joined.result()
        return engine

    def _broadcast(self, source: WeightSource, meta: list[ParamMeta]) -> None:
        for _, tensor in self._checked_iter(source, meta):
            cast(GlooGroup, self.model_update_group).broadcast(tensor)

    def _post_send_sync(self) -> None:
        pass  # every tensor has been sent; vLLM's would open a GPU that is there


WeightTransferEngineFactory.register_engine(GLOO, GlooWeightTransferEngine)
WeightTransferTrainerFactory.register_engine(GLOO, GlooTrainerWeightTransferEngine)
