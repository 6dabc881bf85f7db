"""A process group of one rank in the tests' own process."""

from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


@contextmanager
def one_rank():
    """Context manager: open a process group of one rank, and leave nothing of it behind."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    # DTensor's cache keeps the group alive. A fork from another thread, as at a start of Ray,
    # destroys it in the child, which then waits for gloo's threads for ever.
    _clear_sharding_prop_cache()
