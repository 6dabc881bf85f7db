"""Defines the predicted memory of a role's process, and the device that it must fit on."""

from __future__ import annotations

from dataclasses import dataclass, field

GIB = 2**30


@dataclass
class RoleMemory:
    """Memory of one process of a role; all processes of a role are alike."""

    role: str
    """trainer, reference, teacher, generator or reward_model."""
    count: int
    """Number of processes; for generators, number of workers of all generators together."""
    share: float
    """Share of a GPU that a process asks for."""
    total: int = 0
    """Peak bytes: on its GPU, or of its tensors on a CPU."""
    parts: dict[str, int] = field(default_factory=dict)
    """Purpose -> bytes on the device; they need not be in use at the same time."""
    host: dict[str, int] = field(default_factory=dict)
    """Purpose -> bytes in CPU memory, of a process on a GPU."""
    notes: list[str] = field(default_factory=list)
    """One-line explanations."""
    resting: int = 0
    """If trainers and generators share GPUs: bytes that this role keeps while the other works."""
    smaller: str = ""
    """Advice on what to change if it does not fit: `key: problem; allowed: ...`."""


@dataclass(frozen=True)
class Device:
    """The device on which a process runs, and its memory."""

    is_gpu: bool
    gib: float
    """GiB of one GPU, or of the machine."""

    @property
    def nbytes(self) -> int:
        """Bytes of one GPU, or of the machine."""
        return int(self.gib * GIB)


GPU_GIB = 80.0
"""Default memory of one GPU, in GiB: an A100's or H100's."""
GPU_PROCESS_BYTES = GIB
"""CUDA's context, cuBLAS' workspace and NCCL's buffers of one process; not measured by us."""
FRAGMENTATION = 0.05
"""Share of a trainer's or reference's peak that PyTorch's allocator may waste; not measured."""


def gib(nbytes: float) -> str:
    """Return bytes as GiB, with as many digits as a reader needs."""
    value = nbytes / GIB
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 0.1 else f"{value:.3f}"
