"""A GPU that does not exist: tensors on `gpu` have shapes only, those on the CPU are real.

PyTorch's Python back end registers the device, for the rest of the process: use `RoleProcess`.
FakeTensorMode computes shapes. An operation on tensors of both devices raises, as on CUDA; so do
most operations whose result's size depends on data. A number read from the GPU is 0, and so is all
that is copied from it to the CPU.
"""

import contextlib
import traceback
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule as Dummy
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register
from torchtune.training import set_default_dtype

from grpo_components.models import shared_prompts
from grpo_components.training import trainer
from lib.trainer_ranks import build_model, step

aten, PRODUCT = torch.ops.aten, "grpo_components/"


class _Backend(Dummy):
    """What activation checkpointing asks of a device; without it, the process ends in C++."""

    get_rng_state = staticmethod(lambda device=None: torch.zeros(1, dtype=torch.uint8))
    set_rng_state = staticmethod(lambda state, device=None: None)
    device = staticmethod(lambda device: contextlib.nullcontext())
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])


def _place():
    """Return the product's function that makes the operation: the innermost one on the stack."""
    for frame in reversed(traceback.extract_stack()):
        if PRODUCT in frame.filename and not frame.name.startswith("<"):
            return f"{frame.filename.split(PRODUCT)[-1]}:{frame.name}"
    return "none"


class Watch(TorchDispatchMode):
    """Notes in order what the host does with the GPU, and where.

    That is `kernel`, `sent` (a copy to the GPU), or `waited`: for a copy from memory that is not
    pinned, for one to the CPU, for a number, or for a size.
    """

    def __init__(self, fake):
        super().__init__()
        self.events, self._fake, self._pinned = [], fake, WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, packet = dict(kwargs or {}), func.overloadpacket
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        target = torch.device(kwargs.get("device") or "cpu").type
        if target != "gpu" and all(x.device.type != "gpu" for x in tensors):
            is_pinned = kwargs.pop("pin_memory", False)
            with unset_fake_temporarily():
                found = func(*args, **kwargs)
            if is_pinned:
                self._pinned.add(found.untyped_storage())
            return found
        if packet is aten._local_scalar_dense:
            return self._note("waited", 0)
        given = tree_map(self._faked, (args, kwargs))
        try:
            found = func(*given[0], **given[1])
        except DynamicOutputShapeException:
            if packet is not aten.index:  # x[mask]
                raise
            return self._note("waited", args[0][:0])
        source = args[packet is aten.copy_] if packet in (aten._to_copy, aten.copy_) else found
        if isinstance(found, torch.Tensor) and source.device != found.device:
            goes_on = kwargs.get("non_blocking") and source.untyped_storage() in self._pinned
            self._note("sent" if goes_on else "waited")
            if found.device.type == "cpu":
                with unset_fake_temporarily():
                    return torch.zeros(found.shape, dtype=found.dtype)
        elif func.namespace != "prim" and not func.is_view:
            self._note("kernel")
        return found

    def _note(self, what, result=None):
        self.events.append((what, _place() if what != "kernel" else ""))
        return result

    def _faked(self, x):
        is_real = isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor)
        return self._fake.from_tensor(x) if is_real else x


@contextlib.contextmanager
def fake_gpu():
    with FakeTensorMode() as fake, Watch(fake) as watch:
        yield watch


class GpuSteps:
    """Makes training steps of a single rank on the fake GPU."""

    def __init__(self):
        register("gpu", _Backend())
        shared_prompts._PINNED_FOR = ("gpu",)
        trainer.join_ranks = trainer.TrainerState = lambda *_: None
        trainer.weight_exports = lambda *_: []
        trainer.load_policy = _policy
        dist.get_world_size, dist.all_reduce = lambda: 1, lambda counts: None
        dist.all_gather_object = lambda gathered, own: gathered.__setitem__(0, own)

    def events(self, arguments, trajectories, advantages, has_flash):
        """Make a training step, and return its events."""
        shared_prompts.has_flash = lambda device: has_flash
        method, *given = step(trajectories, advantages)
        with fake_gpu() as watch:
            rank = trainer.Trainer(**arguments | {"device": "gpu"})
            watch.events = []
            assert not getattr(rank, method)(*given).skipped_because
        return watch.events

    def of(self, what):
        """Return the events of an expression of a tensor `x` on the GPU, or its error's name."""
        with fake_gpu() as watch:
            x = torch.ones(4, device="gpu")
            watch.events = []
            try:
                eval(what, {"x": x, "torch": torch})
            except Exception as error:  # of PyTorch's own types, which do not all travel
                return type(error).__name__
            return [event for event, _ in watch.events]


def _policy(*_):
    with set_default_dtype(torch.bfloat16), torch.device("gpu"):
        return build_model()
