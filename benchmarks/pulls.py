"""Measure what generators that pull cost the trainer, from 1 to 8 of them.

    python benchmarks/pulls.py

The real trainer pushes; stand-ins for generators pull: they map the snapshot and check all its
checksums, as a generator does, but run no engine, for which this machine has neither memory nor
cores. Each push comes while all stand-ins pull the push before it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import machine_line
from weights_path import SHAPES, TIMEOUT_S, seconds, table, write_model

GENERATORS = 1, 2, 4, 8


class StandIn:
    """Pulls as a generator does, up to the engine."""

    def pull(self, version: int, *buckets: Any) -> int:
        """Check all tensors of a snapshot; return its version."""
        from grpo_components.exchange.weights import unpack_buckets

        unpack_buckets(buckets)
        return version


async def pauses(trainer: Any, server: Any, stand_ins: list[Any], repeats: int) -> list[float]:
    """Seconds that training stands still for each push, while the stand-ins pull the one before."""
    stalls: list[float] = []
    pulls: list[Any] = []
    for _ in range(repeats + 1):
        await trainer.call("change", timeout_s=TIMEOUT_S)
        began = time.perf_counter()
        version = await trainer.call("gather_weights", timeout_s=TIMEOUT_S)
        bucket, manifest = trainer.submit("export_weights", version, num_returns=2, lane="export")
        await server.call("push", version, [bucket], [manifest], timeout_s=TIMEOUT_S)
        stalls.append(time.perf_counter() - began)
        for role, pull in pulls:
            await role.result(pull, "pull", TIMEOUT_S)
        version, buckets, _ = await server.call("newest", timeout_s=TIMEOUT_S)
        pulls = [(role, role.submit("pull", version, *buckets)) for role in stand_ins]
    for role, pull in pulls:
        await role.result(pull, "pull", TIMEOUT_S)
    return stalls[1:]  # nobody pulled during the first


async def measure(size: str, repeats: int, folder: Path) -> str:
    """Measure one model size with each number of stand-ins; return the table."""
    from grpo_components.cluster.cluster import Cluster

    shape = SHAPES[size]
    mib = 4 * write_model(folder / "model", shape) / 2**20
    (folder / "logs").mkdir()
    cluster = Cluster(folder, "WARNING", attempt=0)
    try:
        cluster.start()
        given = {"folder": str(folder / "model"), "shape": shape, "device": "cpu"}
        trainer = cluster.spawn("trainer", "weights_path.TrainerSide", **given)
        server_class = "grpo_components.exchange.parameter_server.VLLMParameterServer"
        server = cluster.spawn("server", server_class)
        roles = [cluster.spawn(f"generator_{i}", "pulls.StandIn") for i in range(max(GENERATORS))]
        await cluster.ready(TIMEOUT_S)
        times: dict[int, list[float]] = {count: [] for count in GENERATORS}
        for turn in range(2):  # forth and back, so that a temporary load affects all
            for count in GENERATORS[:: -1 if turn else 1]:
                times[count] += await pauses(trainer, server, roles[:count], repeats)
        await cluster.close_roles(TIMEOUT_S)
    finally:
        cluster.stop()
    first = statistics.median(times[GENERATORS[0]])
    rows = [
        [str(count), seconds(each), f"{statistics.median(each) / first:.2f}"]
        for count, each in times.items()
    ]
    return f"{size}, {mib:.0f} MiB\n\n" + table("generators | pause of a push | beside one", rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=list(SHAPES), default="100M")
    parser.add_argument("--repeats", type=int, default=10, help="timed pushes of each case")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = asyncio.run(measure(given.size, given.repeats, Path(folder)))
    sys.stdout.write(f"{machine_line()}\n\n{text}")


if __name__ == "__main__":
    main()
