"""Measure a pull over a transfer engine (gloo on a CPU) against one from the object store.

    python benchmarks/weight_transfer.py [--quick]

The real generator and sender run, each in a Ray actor with one thread; the ways take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from measuring import machine_line
from weights_path import PROMPTS, SHAPES, TIMEOUT_S, ratio, seconds, table, write_model

WAYS = ("object_store", "gloo")


class SenderSide:
    """Stands for the first trainer rank: has the weights of a file, and the real sender."""

    def __init__(self, folder: str) -> None:
        from safetensors.torch import load_file

        from grpo_components.rollout.open_sender import open_sender

        self._weights = load_file(f"{folder}/model.safetensors")
        sender = open_sender("gloo", "cpu", workers=1, timeout_s=TIMEOUT_S, host="127.0.0.1")
        self.send_weights, self.next_request, self.abandon_send = sender.calls

    def export_weights(self, version: int) -> tuple[Any, Any]:
        """Return other weights for each version, as a bucket and its manifest."""
        from grpo_components.exchange.weights import pack_bucket

        factor = 1 + 0.01 * (version % 2)
        bucket = pack_bucket([(name, value * factor) for name, value in self._weights.items()])
        return bucket, bucket[0]


class ReceiverSide:
    """The real generator."""

    def __init__(self, folder: str) -> None:
        from bare_generator import bare_generator

        self._generator = bare_generator(folder, weight_transfer="gloo")
        self.load_weights = self._generator.load_weights
        self.receive_weights = self._generator.receive_weights
        self.answer_request = self._generator.answer_request
        self.abandon_weights = self._generator.abandon_weights

    async def paused(self) -> float:
        """Return the seconds that the engine has spent on new weights so far."""
        return self._generator._engine.use.seconds().get("loading weights", 0.0)

    async def answers(self) -> list[Any]:
        """Return logprobs of completions of fixed prompts with the current weights."""
        options = {"max_tokens": 8, "temperature": 1.0, "stop_token_ids": []}
        asked = [
            self._generator._engine.submit(ids, seed=number, **options)
            for number, ids in enumerate(PROMPTS)
        ]
        return [(await asyncio.wrap_future(future)).logprobs for future in asked]

    def close(self) -> None:
        """Close the generator."""
        self._generator.close()


async def measure(cluster: Any, folder: Path, repeats: int) -> dict[str, list[float]]:
    """Pull the same two sets of weights by both ways, in alternating order."""
    from grpo_components.cluster.weight_transfer import WeightTransfer
    from grpo_components.rollout.engine_environment import engine_environment

    env = engine_environment("cpu", "WARNING")
    sender = cluster.spawn("trainer", "weight_transfer.SenderSide", folder=str(folder), env=env)
    receiver = cluster.spawn(
        "generator", "weight_transfer.ReceiverSide", folder=str(folder), env=env
    )
    await cluster.ready(TIMEOUT_S)
    transfer, times = WeightTransfer(sender, TIMEOUT_S), defaultdict(list)
    seen: dict[int, list[Any]] = {}
    version = 0
    for number in range(2 * (repeats + 1)):
        for way in WAYS if number % 2 else WAYS[::-1]:
            version += 2
            exported = sender.submit("export_weights", version + number % 2, num_returns=2)
            bucket, manifest = exported
            await sender.result(manifest, "export_weights", TIMEOUT_S)
            before = await receiver.call("paused", timeout_s=TIMEOUT_S)
            began = time.perf_counter()
            if way == "gloo":
                await transfer.load(receiver, version, [bucket], [manifest])
            else:
                loading = receiver.submit("load_weights", version, bucket)
                await receiver.result(loading, "load_weights", TIMEOUT_S)
            whole = time.perf_counter() - began
            pause = await receiver.call("paused", timeout_s=TIMEOUT_S) - before
            answers = await receiver.call("answers", timeout_s=TIMEOUT_S)
            kept = seen.setdefault(number % 2, answers)
            if not all(map(np.array_equal, answers, kept)):
                raise RuntimeError("the engine's weights differ between the two ways")
            if number > 1:  # the first round imports, connects and maps memory
                times[way].append(whole)
                times[f"{way}/pause"].append(pause)
    if all(map(np.array_equal, seen[0], seen[1])):
        raise RuntimeError("the engine's weights did not change")
    await cluster.close_roles(TIMEOUT_S)
    return times


async def tables(sizes: list[str], repeats: dict[str, int], scratch: Path) -> str:
    """Measure all sizes, each in a new cluster; returns the table."""
    from grpo_components.cluster.cluster import Cluster

    rows = []
    for size in sizes:
        folder = scratch / size
        mib = 4 * write_model(folder, SHAPES[size]) / 2**20
        (folder / "logs").mkdir()
        cluster = Cluster(folder, "WARNING", attempt=0)
        try:
            cluster.start()
            times = await measure(cluster, folder, repeats[size])
        finally:
            cluster.stop()
        store, gloo = (times[way] for way in WAYS)
        pauses = [times[f"{way}/pause"] for way in WAYS]
        texts = [seconds(store), seconds(gloo), ratio(gloo, store)]
        texts += [seconds(pauses[0]), seconds(pauses[1]), ratio(pauses[1], pauses[0])]
        rows.append([f"{size}, {mib:.0f} MiB", *texts, "0", f"{mib:.0f} MiB"])
    return table(
        "model | pull: object store | pull: gloo | ratio | engine's pause: object store | "
        "engine's pause: gloo | ratio | bytes between the processes: object store | gloo",
        rows,
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=["3M", "100M"], default=["3M", "100M"])
    parser.add_argument("--quick", action="store_true", help="the smallest model, once")
    options = parser.parse_args()
    sizes: list[str] = ["3M"] if options.quick else options.sizes
    repeats = {"3M": 1} if options.quick else {"3M": 10, "100M": 5}
    with tempfile.TemporaryDirectory(prefix="weight-transfer-") as scratch:
        text = asyncio.run(tables(sizes, repeats, Path(scratch)))
    sys.stdout.write(f"{text}\n{machine_line('cpu')}, 1 thread per role\n")


if __name__ == "__main__":
    main()
