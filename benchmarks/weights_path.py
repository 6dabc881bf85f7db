"""Measure the path of weights from trainer to generator: push and pull against save and reload.

    python benchmarks/weights_path.py [--quick]
    python benchmarks/weights_path.py --sizes 100M --beside 0 1 8

The real roles run, each in a Ray actor with one thread. On a GPU (`--device cuda`) only the
trainer's gather is measured. `--beside` measures it beside processes that pull all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from measuring import in_child, machine_line, markdown_table, resident, spread

TIMEOUT_S = 600.0
PROMPTS = [[1, 2, 3 + i] for i in range(4)]
Times = dict[str, list[float]]


def _shape(vocab: int, dim: int, hidden: int, layers: int, kv_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": dim // (32 if dim < 512 else 64),
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    }


SHAPES = {
    "3M": _shape(384, 256, 1024, 3, 2),
    "100M": _shape(32_000, 768, 2048, 12, 4),
    "500M": _shape(151_936, 896, 4864, 24, 2),  # Qwen2.5-0.5B
}


def write_model(folder: Path, shape: dict[str, Any]) -> int:
    """Write a random Qwen2 in fp32 with its config; return its number of parameters."""
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape))
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder)
    return model.num_parameters()


# ---- the roles, each in its process -------------------------------------------------------------


class TrainerSide:
    """The real Trainer with one rank, and the alternative: saving the weights to a file."""

    def __init__(self, folder: str, shape: dict[str, Any], device: str) -> None:
        from torchtune.models.qwen2 import qwen2
        from train_step import build_trainer

        self._trainer = build_trainer(
            Path(folder),
            device,
            build_model=partial(
                qwen2,
                vocab_size=shape["vocab_size"],
                num_layers=shape["num_hidden_layers"],
                num_heads=shape["num_attention_heads"],
                num_kv_heads=shape["num_key_value_heads"],
                embed_dim=shape["hidden_size"],
                intermediate_dim=shape["intermediate_size"],
                max_seq_len=shape["max_position_embeddings"],
                tie_word_embeddings=True,
            ),
            dtype="fp32",
            logprob_chunk_tokens=512,
            tokens_per_micro_batch=512,
            build_optimizer=partial(torch.optim.SGD, lr=0.0),
        )
        self._export_s = 0.0
        self._before = 0, 0

    def close(self) -> None:
        """Close the trainer."""
        self._trainer.close()

    def change(self) -> None:
        """Change the weights and the version, as a training step does."""
        with torch.no_grad():
            for parameter in self._trainer._model.parameters():
                parameter.mul_(1.01)
        self._trainer.policy_version += 1

    def gather_weights(self) -> int:
        """Gather the trainer's weights; return their version."""
        return self._trainer.gather_weights()

    def export_weights(self, version: int) -> Any:
        """Export the gathered weights; `export_seconds` then returns the time that this took."""
        started = time.perf_counter()
        exported = self._trainer.export_weights(version)
        self._export_s = time.perf_counter() - started
        return exported

    def export_seconds(self) -> float:
        """Seconds of the last export, without Ray's handling of its result."""
        return self._export_s

    def save_weights(self, file: str) -> int:
        """Gather, convert and save, with no copies beyond safetensors' own; return the version."""
        from safetensors.torch import save_file

        weights: dict[str, torch.Tensor] = {}
        for tensors in self._trainer._exports[0].layers():
            weights |= {name: tensor.cpu() for name, tensor in tensors.items()}
        save_file(weights, file, metadata={"format": "pt"})
        return self._trainer.policy_version

    def sync_file(self, file: str) -> None:
        """Wait until the file is on disk."""
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def watch_memory(self) -> None:
        """Start measuring peak memory."""
        self.change()  # makes pages of the loaded file private, as a training step does
        Path("/proc/self/clear_refs").write_text("5")
        self._before = resident("VmRSS"), resident("RssShmem")

    def memory_growth(self) -> tuple[int, int]:
        """Bytes since `watch_memory`: peak increase of memory, and newly mapped object store."""
        memory, store = self._before
        return resident("VmHWM") - memory, resident("RssShmem") - store

    def push_alone(self, file: str | None) -> int:
        """Peak memory of one push, or of saving to a file, without Ray."""
        self.watch_memory()
        if file:
            self.save_weights(file)
        else:
            exported = self.export_weights(self.gather_weights())
            assert exported[0][1].nbytes  # kept alive until here, as Ray does
        return self.memory_growth()[0]

    def gather_seconds(self) -> tuple[float, float]:
        """Seconds of a gather to the host, and of a plain copy of the same bytes (GPU: pinned)."""
        self.change()
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        bucket, _ = self.export_weights(self.gather_weights())
        gathered = time.perf_counter() - started - self._export_s
        on_device = torch.empty(
            bucket[1].nbytes, dtype=torch.uint8, device="cuda" if cuda else "cpu"
        )
        target = torch.empty(bucket[1].nbytes, dtype=torch.uint8, pin_memory=cuda).fill_(1)
        started = time.perf_counter()
        target.copy_(on_device)
        return gathered, time.perf_counter() - started


class GeneratorSide:
    """The real Generator, instrumented to measure how long its engine pauses."""

    def __init__(self, folder: str) -> None:
        from grpo_components.rollout import generator

        self._generator = generator.Generator(
            build_tokenizer=lambda: None,  # nothing is decoded here
            settings=generator.GeneratorSettings(
                backend="vllm",
                max_response_tokens=64,
                temperature=1.0,
                max_model_len=128,
                max_num_seqs=8,
                kv_cache_gib=1,
            ),
            engine=generator.EngineOptions(
                model_path=folder, device="cpu", dtype="fp32", recompute_kv_after_pull=False
            ),
            group_size=1,
            seed=0,
            environment=generator.EnvironmentOptions(
                build_environment=lambda **_: None,  # pyright: ignore[reportArgumentType]
                timeout_s=60.0,
            ),
            open_rewards=partial(generator.RewardPool, {}, num_workers=1, timeout_s=1.0),
            rollouts_in_flight=1,
        )
        self._unpack = generator.unpack_buckets
        generator.unpack_buckets = self._timed_unpack
        self._engine = self._generator._engine
        backend: Any = self._engine._backend
        self._llm = llm = backend._engine
        self._step, self._swap = llm.step, self._engine._swap_weights
        llm.step = self._timed_step
        vars(self._engine)["_swap_weights"] = self._timed_swap
        self._steps, self._stopped, self._swapped = 0, 0.0, False
        self._pause_s = self._check_s = 0.0

    def _timed_step(self) -> Any:
        if self._swapped:
            self._pause_s, self._swapped = time.perf_counter() - self._stopped, False
        outputs = self._step()
        self._stopped, self._steps = time.perf_counter(), self._steps + 1
        return outputs

    def _timed_swap(self, version: int, source: Any) -> None:
        """Swap weights between two steps: our way from tensors, or vLLM's way from a folder."""
        assert self._engine._running, "the engine is idle, so there is no pause to measure"
        if isinstance(source, Path):
            llm = self._llm
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(source)})
            llm.collective_rpc(_repack)  # otherwise the output head would keep the old weights
            llm.set_weight_version(str(version))
            llm.reset_prefix_cache()
        else:
            self._swap(version, source)
        self._swapped = True

    def _timed_unpack(self, *args: Any) -> Any:
        started = time.perf_counter()
        tensors = self._unpack(*args)
        self._check_s = time.perf_counter() - started
        return tensors

    async def _while_generating(self, load: Callable[[], Awaitable[Any]]) -> dict[str, float]:
        """Load weights while requests run; return seconds of the engine's pause and of the load."""
        loaded = False

        async def requests(number: int) -> None:
            while not loaded:
                await self._ask(number, max_tokens=9 + 4 * number)

        streams = [asyncio.create_task(requests(number)) for number in range(len(PROMPTS))]
        steps = self._steps
        while self._steps < steps + 2:
            await asyncio.sleep(0.002)
        started = time.perf_counter()
        await load()
        whole = time.perf_counter() - started
        while self._swapped:
            await asyncio.sleep(0.002)
        loaded = True
        await asyncio.gather(*streams)
        return {"pause": self._pause_s, "whole": whole}

    def _ask(self, number: int, max_tokens: int) -> Awaitable[Any]:
        request = self._engine.submit(
            PROMPTS[number], max_tokens=max_tokens, temperature=1.0, seed=number, stop_token_ids=[]
        )
        return asyncio.wrap_future(request)

    async def pull(self, version: int, *buckets: Any) -> dict[str, float]:
        """Load weights with the generator's `load_weights`."""
        load = partial(self._generator.load_weights, version, *buckets)
        return await self._while_generating(load) | {"check": self._check_s}

    async def load_from_memory(self, version: int, *buckets: Any) -> dict[str, float]:
        """Time the engine's part of a pull, and a plain copy of the same bytes."""
        tensors = {name: tensor.clone() for name, tensor in self._unpack(buckets).items()}

        async def load() -> None:
            await asyncio.wrap_future(self._engine.load_weights(version, tensors))

        loading = await self._while_generating(load)
        target = np.ones_like(buckets[0][1])
        started = time.perf_counter()
        np.copyto(target, buckets[0][1])
        return loading | {"copy": time.perf_counter() - started}

    async def reload(self, version: int, folder: str) -> dict[str, float]:
        """Reload from safetensors with vLLM's `reload_weights`."""

        async def load() -> None:
            source = (version, Path(folder))
            await asyncio.wrap_future(self._engine._command("from disk", "weights", source))

        return await self._while_generating(load)

    async def answers(self) -> list[Any]:
        """Logprobs of completions of fixed prompts with the current weights."""
        return [(await self._ask(i, max_tokens=8)).logprobs for i in range(len(PROMPTS))]

    def close(self) -> None:
        """Close the generator."""
        self._generator.close()


def _repack(worker: Any) -> None:
    from grpo_components.rollout.vllm_weights import _repack_tied_head

    _repack_tied_head(worker.model_runner.model)


# ---- the driver ---------------------------------------------------------------------------------


class WeightsPath:
    """Measures both paths of the weights for one model size."""

    def __init__(self, cluster: Any, folder: Path, shape: dict[str, Any]) -> None:
        from grpo_components.quiet import engine_environment

        server = "grpo_components.exchange.parameter_server.VLLMParameterServer"
        env = engine_environment("cpu", "WARNING")
        self.server = cluster.spawn("server", server)
        self.trainer = cluster.spawn(
            "trainer", "weights_path.TrainerSide", folder=str(folder), shape=shape, device="cpu"
        )
        self.generator = cluster.spawn(
            "generator", "weights_path.GeneratorSide", env=env, folder=str(folder)
        )
        self.saved = folder / "saved"  # vLLM reloads from a folder
        self.saved.mkdir()
        self.times: Times = defaultdict(list)

    async def push_and_pull(self) -> list[Any]:
        """Push and pull as the recipe does; returns the engine's completions afterwards."""
        trainer, server = self.trainer, self.server
        started = time.perf_counter()
        version = await trainer.call("gather_weights", timeout_s=TIMEOUT_S)
        bucket, manifest = trainer.submit("export_weights", version, num_returns=2, lane="export")
        await server.call("push", version, [bucket], [manifest], timeout_s=TIMEOUT_S)
        self.times["stall"].append(time.perf_counter() - started)
        await trainer.answer(manifest, "export_weights", TIMEOUT_S)
        self.times["stored"].append(time.perf_counter() - started - self.times["stall"][-1])
        exported = await trainer.call("export_seconds", timeout_s=TIMEOUT_S)
        self.times["export"].append(exported)
        version, buckets, _ = await server.call("newest", timeout_s=TIMEOUT_S)
        for method in (
            "load_from_memory",
            "pull",
        ):  # the real pull last: its completions are compared
            loading = self.generator.submit(method, version, *buckets)
            for name, seconds in (await self.generator.answer(loading, method, TIMEOUT_S)).items():
                self.times[f"{method}/{name}"].append(seconds)
        return await self.generator.call("answers", timeout_s=TIMEOUT_S)

    async def save_and_reload(self) -> list[Any]:
        """Save and reload a file; returns the engine's completions afterwards."""
        file = str(self.saved / "model.safetensors")
        Path(file).unlink(missing_ok=True)
        started = time.perf_counter()
        version = await self.trainer.call("save_weights", file, timeout_s=TIMEOUT_S)
        self.times["save"].append(time.perf_counter() - started)
        started = time.perf_counter()
        await self.trainer.call("sync_file", file, timeout_s=TIMEOUT_S)
        self.times["fsync"].append(time.perf_counter() - started)
        self.times["save+fsync"].append(self.times["save"][-1] + self.times["fsync"][-1])
        folder = str(self.saved)
        times = await self.generator.call("reload", version, folder, timeout_s=TIMEOUT_S)
        self.times["reload/pause"].append(times["pause"])
        return await self.generator.call("answers", timeout_s=TIMEOUT_S)

    async def measure(self, repeats: int) -> tuple[int, int]:
        """Time both paths alternately; return `memory_growth` of an untimed first push."""
        await self.trainer.call("watch_memory", timeout_s=TIMEOUT_S)
        before = await self.push_and_pull()
        first_push = await self.trainer.call("memory_growth", timeout_s=TIMEOUT_S)
        await self.save_and_reload()
        self.times.clear()
        for number in range(repeats):
            await self.trainer.call("change", timeout_s=TIMEOUT_S)
            ways = [self.push_and_pull, self.save_and_reload]
            answers = [await way() for way in (ways if number % 2 else ways[::-1])]
            if not same(*answers) or same(before, answers[0]):
                raise RuntimeError(
                    "the engine's weights differ between the two paths, or did not change"
                )
            before = answers[0]
        return first_push


def same(left: list[Any], right: list[Any]) -> bool:
    """Whether two lists of logprobs come from the same weights."""
    return all(map(partial(np.allclose, atol=1e-4), left, right))


def peak_alone(folder: Path, shape: dict[str, Any], file: str | None) -> int:
    """Peak memory (bytes) of a push or save to a file, without Ray; call it in a fresh process."""
    side = TrainerSide(folder=str(folder), shape=shape, device="cpu")
    try:
        return side.push_alone(file)
    finally:
        side.close()


def _pull_again_and_again(bucket: tuple[Any, Any], begun: Any) -> None:
    from grpo_components.exchange.weights import unpack_buckets

    torch.set_num_threads(1)
    weights = {name: tensor.clone() for name, tensor in unpack_buckets([bucket]).items()}
    begun.release()
    while True:
        for name, tensor in unpack_buckets([bucket]).items():
            weights[name].copy_(tensor)


def gathers_beside(
    folder: Path, shape: dict[str, Any], pulling: int, repeats: int
) -> list[tuple[float, float]]:
    """Seconds of gathers and plain copies while processes pull; call it in a fresh process."""
    torch.set_num_threads(1)
    side = TrainerSide(folder=str(folder), shape=shape, device="cpu")
    bucket, _ = side.export_weights(side.gather_weights())
    context = multiprocessing.get_context("fork")  # the bucket is shared, as in the object store
    begun, source, target = context.Semaphore(0), bucket[1], bucket[1].copy()
    pull = partial(context.Process, target=_pull_again_and_again, args=(bucket, begun), daemon=True)
    processes = [pull() for _ in range(pulling)]
    for process in processes:
        process.start()
    for _ in processes:
        begun.acquire()
    found = []
    for _ in range(repeats):
        side.change()
        started = time.perf_counter()
        version = side.gather_weights()
        gathered = time.perf_counter() - started
        side.export_weights(version)
        started = time.perf_counter()
        np.copyto(target, source)
        found.append((gathered, time.perf_counter() - started))
    for process in processes:
        process.kill()
    side.close()
    return found


def on_cpu_beside(sizes: list[str], repeats: dict[str, int], beside: list[int], to: Path) -> str:
    """Measure the trainer's pause beside processes that pull; returns the table."""
    rows = []
    for size in sizes:
        num_bytes = 4 * write_model(to / size, SHAPES[size])
        for pulling in beside:
            found = in_child(gathers_beside, to / size, SHAPES[size], pulling, 3 * repeats[size])
            gather, copy = map(list, zip(*found[1:], strict=True))
            name = f"{size}, {num_bytes / 2**20:.0f} MiB"
            rows.append([name, str(pulling), seconds(gather), seconds(copy), ratio(gather, copy)])
    header = ["model", "processes that pull", "gather_weights", "memcpy", "ratio"]
    return markdown_table(header, rows)


def seconds(times: list[float]) -> str:
    """Median (minimum..maximum) in ms."""
    return spread([1e3 * each for each in times], " ms")


def ratio(above: list[float], below: list[float]) -> str:
    """Ratio of the medians."""
    return f"{median(above) / median(below):.2f}"


async def on_cpu(sizes: list[str], repeats: dict[str, int], scratch: Path) -> str:
    """Measure all sizes, each in a new cluster; returns the tables."""
    from grpo_components.cluster.cluster import Cluster
    from grpo_components.exchange.ledger import Ledger
    from grpo_components.exchange.staleness import StalenessContract
    from grpo_components.settings import Settings

    push, pull, memory = [], [], []
    for size in sizes:
        folder, shape = scratch / size, SHAPES[size]
        num_bytes = 4 * write_model(folder, shape)
        files = None, str(folder / "alone")
        peaks = [in_child(peak_alone, folder, shape, file) for file in files]
        (folder / "logs").mkdir()
        cfg = Settings.model_construct(output_dir=str(folder), log_level="WARNING", max_restarts=0)
        ledger = Ledger(StalenessContract(0, 1), 1, iter(()))
        log = logging.getLogger("cluster")
        cluster = Cluster(cfg, ledger, log.warning, log.info)
        try:
            cluster.start()
            path = WeightsPath(cluster, folder, shape)
            await cluster.ready(TIMEOUT_S)
            with_store, store = await path.measure(repeats[size])
            await cluster.close_roles(TIMEOUT_S)
        finally:
            cluster.stop()
        t = path.times
        name = f"{size}, {num_bytes / 2**20:.0f} MiB"
        stall, save, whole = t["stall"], t["save"], t["save+fsync"]
        texts = [seconds(stall), seconds(save), ratio(save, stall), seconds(whole)]
        texts += [seconds(t[key]) for key in ("load_from_memory/copy", "export", "stored")]
        push.append([name, *texts])
        ours, disk, floor = t["pull/pause"], t["reload/pause"], t["load_from_memory/pause"]
        texts = [seconds(ours), seconds(disk), ratio(disk, ours), seconds(floor)]
        texts += [ratio(ours, floor), seconds(t["pull/check"]), seconds(t["pull/whole"])]
        pull.append([name, *texts])
        peaks += [with_store, store]
        multiples = [f"{n / 2**20:.0f} MiB ({n / num_bytes:.2f}x)" for n in peaks]
        memory.append([name, *multiples])
    head = ["model", "ours", "disk", "disk / ours"]
    next_step = "during the next step"
    pushed = ["disk with fsync", "lower bound: memcpy"]
    pushed += [f"{next_step}: export", f"{next_step}: until stored"]
    pulled = ["lower bound: load from memory", "ours / lower bound"]
    pulled += ["while sampling: checks", "whole pull"]
    used = ["model", "ours: gather and export", "disk: gather and save"]
    used += ["ours with the object store", "of which in the store (shared)"]
    return "\n\n".join(
        [
            "Training pause of one push:",
            markdown_table([*head, *pushed], push),
            "Engine pause of one pull:",
            markdown_table([*head, *pulled], pull),
            "Peak additional memory of the trainer's process in one push:",
            markdown_table(used, memory),
        ]
    )


def on_cuda(sizes: list[str], repeats: dict[str, int], scratch: Path) -> str:
    """Measure the throughput of a gather from the GPU to the host; returns the table."""
    rows = []
    for size in sizes:
        gb = 4e-9 * write_model(scratch / size, SHAPES[size])
        side = TrainerSide(str(scratch / size), SHAPES[size], "cuda")
        side.gather_seconds()
        both = zip(*(side.gather_seconds() for _ in range(repeats[size])), strict=True)
        gather, plain = ([gb / s for s in times] for times in both)
        texts = [f"{median(x):.2f} GB/s ({min(x):.2f}..{max(x):.2f})" for x in (gather, plain)]
        rows.append([f"{size}, {gb:.2f} GB", *texts])
        side.close()
    return markdown_table(
        ["model", "gather_weights", "lower bound: one copy to pinned memory"], rows
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sizes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--quick", action="store_true", help="the smallest model, twice")
    parser.add_argument("--repeats", type=int, help="rounds per model size; default 15, 7 and 5")
    parser.add_argument("--beside", type=int, nargs="+", help="processes that pull meanwhile")
    options = parser.parse_args()
    sizes: list[str] = options.sizes
    repeats: dict[str, int] = {"3M": 15, "100M": 7, "500M": 5}
    if options.quick:
        sizes, repeats = ["3M"], {"3M": 2}
    if options.repeats is not None:
        if options.repeats < 1:
            parser.error(f"--repeats: {options.repeats} given; allowed: at least 1")
        repeats = dict.fromkeys(sizes, int(options.repeats))
    with tempfile.TemporaryDirectory(prefix="weights-path-") as scratch:
        if options.device == "cuda":
            if not torch.cuda.is_available():
                parser.error("--device: cuda given, but torch finds no GPU; allowed: cpu")
            tables = on_cuda(sizes, repeats, Path(scratch))
        elif options.beside is not None:
            tables = on_cpu_beside(sizes, repeats, options.beside, Path(scratch))
        else:
            tables = asyncio.run(on_cpu(sizes, repeats, Path(scratch)))
    sys.stdout.write(f"{tables}\n\n{machine_line(options.device)}, 1 thread per role\n")


if __name__ == "__main__":
    main()
