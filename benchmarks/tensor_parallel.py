"""Measure what a weight swap sends to two tensor-parallel workers, and what memory it takes.

    python benchmarks/tensor_parallel.py

One real engine on the CPU takes the same weights in two ways, in turns: as vLLM's `collective_rpc`
would send them, pickled, and as the generator does, through shared memory part by part.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import machine_line
from weights_path import SHAPES, seconds, table, write_model

WAYS = "pickled", "shared memory"
SAMPLE_EVERY_S = 0.01


def private_mib(pid: int) -> float:
    """Memory of a process that no other process uses, in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


@contextlib.contextmanager
def peak_growth(pids: list[int]) -> Iterator[list[float]]:
    """Context manager: give a list that gets the largest growth of each process, in MiB."""
    before, peak, ended = [private_mib(pid) for pid in pids], [0.0] * len(pids), threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_EVERY_S):
            for number, pid in enumerate(pids):
                peak[number] = max(peak[number], private_mib(pid) - before[number])

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield peak
    finally:
        ended.set()
        watching.join()


def count_bytes(queue: Any) -> list[int]:
    """Count what vLLM sends to all workers; return a list that has the sum as its one item."""
    import pickle

    sent, enqueue = [0], queue.enqueue

    def counted(message: Any, *args: Any, **kwargs: Any) -> None:
        sent[0] += len(pickle.dumps(message))
        enqueue(message, *args, **kwargs)

    queue.enqueue = counted
    return sent


def measure(size: str, repeats: int, folder: Path) -> str:
    """Measure one model size; return the table."""
    import psutil
    import torch
    from safetensors.torch import load_file

    from grpo_components.exchange.weights import pack_bucket, unpack_bucket
    from grpo_components.rollout import vllm_engine, vllm_weights
    from grpo_components.rollout.generator_options import EngineOptions

    torch.set_num_threads(1)
    mib = 4 * write_model(folder, SHAPES[size]) / 2**20
    engine = vllm_engine.VLLMEngine(
        EngineOptions(
            model_path=str(folder),
            device="cpu",
            dtype="fp32",
            max_model_len=64,
            max_num_seqs=8,
            gpu_memory_utilization=0.5,
            kv_cache_gib=0.0625,
            enforce_eager=True,
            recompute_kv_after_pull=False,
            tensor_parallel_size=2,
        ),
        seed=0,
    )
    workers = [each.pid for each in psutil.Process().children() if "Worker" in each.name()]
    executor: Any = engine._core.model_executor
    sent = count_bytes(executor.rpc_broadcast_mq)
    bucket = pack_bucket(list(load_file(folder / "model.safetensors").items()))
    tensors, ours = unpack_bucket(*bucket), vllm_engine.load_into_workers

    def pickled(executor: Any, given: Any) -> None:
        executor.collective_rpc(vllm_weights.load_into_worker, args=(given,))

    times: dict[str, list[float]] = {way: [] for way in WAYS}
    grown: dict[str, list[float]] = {way: [] for way in WAYS}
    sizes: dict[str, int] = {}
    for turn in range(2 * (repeats + 1)):
        way = WAYS[turn % 2]
        vllm_engine.load_into_workers = ours if way == "shared memory" else pickled
        sent[0] = 0
        with peak_growth(workers) as growth:
            began = time.perf_counter()
            engine.load_weights(turn + 1, tensors).result()
            took = time.perf_counter() - began
        sizes[way] = sent[0]
        if turn >= 2:  # the first of each way takes memory that stays
            times[way].append(took)
            grown[way].append(max(growth))
    engine.close()
    rows = [
        [way, f"{sizes[way] / 2**20:.2f}", f"{statistics.median(grown[way]):.0f}", seconds(took)]
        for way, took in times.items()
    ]
    header = "way | sent, MiB | a worker's growth, MiB | swap"
    return f"{size}, {mib:.0f} MiB, 2 workers\n\n" + table(header, rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=list(SHAPES), default="100M")
    parser.add_argument("--repeats", type=int, default=5, help="timed swaps of each way")
    given = parser.parse_args()
    from grpo_components.rollout.engine_environment import engine_environment

    os.environ.update(engine_environment("cpu", "ERROR"), OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        text = measure(given.size, given.repeats, Path(folder))
    sys.stdout.write(f"{machine_line()}\n\n{text}")


if __name__ == "__main__":
    main()
