"""Shared by the benchmarks: machine description, tables, interleaved timing, peak memory."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path
from typing import ParamSpec, TypeVar

# Set before torch loads: spinning threads are several times slower on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import torch

from grpo_components.quiet import quiet_libraries

GIB = 2**30
TUNE = str(Path(sys.executable).with_name("tune"))
TRAIN_DEMO = (TUNE, "run", "async_grpo_full_finetune_distributed", "--config", "tiny_async_grpo")
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
quiet_libraries("WARNING")  # before torchtune is imported, because torchao logs at import


def finish(command: Iterable[object]) -> None:
    """Run a command to its end; exit with its output if it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def briefly_evaluated(num_steps: int) -> tuple[str, ...]:
    """Return overrides of the demo that set `num_steps` and make evaluations take little time."""
    return f"num_steps={num_steps}", "eval_dataset.num_rows=8", f"eval_every_n_steps={num_steps}"


def spread(values: Collection[float], unit: str = "") -> str:
    """Median of the values, with the least and the greatest one."""
    return f"{statistics.median(values):.3g}{unit} ({min(values):.3g}..{max(values):.3g})"


def interleaved(
    cases: Mapping[str, Callable[[], object]], repeats: int, device: str
) -> dict[str, list[float]]:
    """Return the seconds of each repeat; cases alternate, so that load affects all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for run in cases.values():
        run()
    for number in range(repeats):
        for name in list(cases)[:: 1 if number % 2 == 0 else -1]:
            gc.collect()
            _synchronize(device)
            started = time.perf_counter()
            cases[name]()
            _synchronize(device)
            seconds[name].append(time.perf_counter() - started)
    return seconds


def in_child(
    function: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs
) -> _Result:
    """Call a module-level function in a fresh process; return its result."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(function, *args, **kwargs).result()


def in_lean_child(
    function: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs
) -> _Result:
    """Call a module-level function in a fresh process that returns freed buffers to the system.

    By default glibc's malloc keeps freed buffers of up to 32 MiB, so that a process can hold many
    times the memory of its tensors. Here buffers from 64 KiB are returned, which is slower. Set
    `MALLOC_MMAP_THRESHOLD_=33554432` in the environment to measure with glibc's behavior.
    """
    name = "MALLOC_MMAP_THRESHOLD_"  # malloc reads it when a process starts
    if name in os.environ:
        return in_child(function, *args, **kwargs)
    os.environ[name] = str(64 * 1024)
    try:
        return in_child(function, *args, **kwargs)
    finally:
        del os.environ[name]


def peak_memory_gib(run: Callable[[], object], device: str) -> float:
    """Return the peak increase of memory in use, in GiB, while a function runs."""
    gc.collect()
    if device == "cuda":
        _synchronize(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / GIB
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    run()
    return (resident("VmHWM") - before) / GIB


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def resident(name: str) -> int:
    """Return a field of /proc/self/status, such as VmRSS, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}: peak memory is measured on Linux only")


def machine_line(device: str = "cpu") -> str:
    """Processor or GPU, PyTorch version, threads and date, in one line."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    cores = len(os.sched_getaffinity(0))
    parts = [f"{processor}, {cores} cores", f"PyTorch {torch.__version__}"]
    if device == "cuda":
        parts.insert(0, torch.cuda.get_device_name())
    parts += [f"{torch.get_num_threads()} threads", date.today().isoformat()]
    return ", ".join(parts)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first column is aligned left, the others right."""

    def line(cells: Iterable[object]) -> str:
        texts = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells]
        return f"| {' | '.join(texts)} |"

    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join([line(header), line(rule), *[line(row) for row in rows]])
