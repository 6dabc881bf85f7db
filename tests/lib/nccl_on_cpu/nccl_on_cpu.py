"""Runs vLLM's weight transfer over NCCL on a CPU: over gloo, and without CUDA streams.

With this folder on the PYTHONPATH of a run, `sitecustomize` does so in each of its processes.
"""

import sys
from contextlib import nullcontext
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

FOLDER = str(Path(__file__).parent)
_TIMEOUT = timedelta(seconds=20)


class Communicator:
    """Stands for NCCL's communicator: rank 0 sends, the workers of one engine receive."""

    broadcasts = 0

    def __init__(self, info, rank):
        import torch.distributed as dist

        where = info.master_address, info.master_port, info.world_size
        store = dist.TCPStore(*where, is_master=rank == 0, timeout=_TIMEOUT)
        self._group = dist.ProcessGroupGloo(store, rank, info.world_size, _TIMEOUT)

    def broadcast(self, tensor, src):
        if self._group is None:
            raise ConnectionError("the transfer group was left")
        assert src == 0 and tensor.is_contiguous()
        Communicator.broadcasts += 1
        self._group.broadcast(tensor, 0).wait()

    def destroy(self):
        self._group = None


def replace_communicator(nccl_engine):
    """Let vLLM's module of the `nccl` engines run without a GPU."""
    import torch
    from vllm.distributed.weight_transfer import packed_tensor

    class Torch:
        cuda = SimpleNamespace(
            stream=lambda stream: nullcontext(),
            Stream=object,
            current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
            is_available=lambda: False,
        )
        accelerator = SimpleNamespace(current_device_index=lambda: 0)

        def __getattr__(self, name):
            return getattr(torch, name)

        @staticmethod
        def empty(*args, device=None, **options):
            return torch.empty(*args, **options)

    streams = [SimpleNamespace(synchronize=lambda: None)] * 2
    nccl_engine.torch = packed_tensor.torch = Torch()
    packed_tensor._get_streams = lambda index, number: streams
    nccl_engine.open_trainer_endpoint = lambda info: Communicator(info, 0)
    nccl_engine.worker_init_process_group = lambda info, parallel: Communicator(
        info, info.rank_offset + parallel.rank
    )


def accept_nccl(settings):
    """Let a config have `weights: nccl` with `device: cpu`."""
    settings.Settings._check_transfer = lambda self: None


AFTER_IMPORT = {
    "vllm.distributed.weight_transfer.nccl_engine": replace_communicator,
    "grpo_components.settings": accept_nccl,
}


class _Finder:
    def find_spec(self, name, path=None, target=None):
        change = AFTER_IMPORT.pop(name, None)
        if change is None:
            return None
        spec = find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


def install():
    """Change the modules of this process, now or when they are imported."""
    for name in AFTER_IMPORT.keys() & sys.modules.keys():
        AFTER_IMPORT.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _Finder())
