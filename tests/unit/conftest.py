"""What several rooms' tests need: a run's files, as the real ledger and receipts write them."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch

from grpo_components.data.curriculum import PromptCurriculum
from grpo_components.exchange.event_order import EventOrder
from grpo_components.exchange.group_reuse import GroupReuse
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.records.receipt_chain import ChainedFile
from grpo_components.records.receipts import Receipts
from grpo_components.settings import CurriculumSettings

GROUP_SIZE = 2


@pytest.fixture(scope="session")
def anyio_backend():
    """The event loop of tests that are coroutines."""
    return "asyncio"


@pytest.fixture(scope="module")
def one_thread():
    """Threads of tiny passes wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", name="write_run")
def _write_run():
    return write_run


@pytest.fixture(scope="session", name="write_receipts")
def _write_receipts():
    return write_receipts


RULE = CurriculumSettings(low=0.2, high=0.8, floor=0.1, decay=0.9)


def write_run(path, eta=2, num_steps=6, draws=False, reuse=False, max_uses=2):
    """Two groups a step; a skipped step, a filtered, a failed and a stale group."""
    for name in ("receipts.jsonl", "receipts.end"):
        path.with_name(name).unlink(missing_ok=True)
    logs = path.parent / "logs"
    logs.mkdir(exist_ok=True)
    config = f"max_staleness: {eta}\ngroups_per_step: 2\ngroup_size: {GROUP_SIZE}\n"
    config += f"num_steps: {num_steps}\n"
    if draws:
        config += "seed: 7\ncurriculum: {low: 0.2, high: 0.8, floor: 0.1, decay: 0.9}\n"
    if reuse:
        config += f"replay_generation: {{share: 0.5, max_uses: {max_uses}}}\n"
    (path.parent / "config.yaml").write_text(config)
    (logs / "metrics.jsonl").write_text("")

    async def run():
        prompts = (({"prompt_index": i}, 0) for i in range(10**6))
        if draws:
            prompts = PromptCurriculum([{"prompt_index": i} for i in (3, 4, 5, 9)], RULE, 7)
        ledger = Ledger(StalenessContract(eta, 2), num_steps, prompts)
        if reuse:
            ledger.reuse = GroupReuse(StalenessContract(eta, 2), 0.5, max_uses)
        ledger.events = EventOrder()
        settings = {"max_staleness": eta, "groups_per_step": 2, "group_size": GROUP_SIZE}
        settings |= ledger.reuse.describe()
        if draws:
            ledger.events.listen(prompts.follow)
            settings |= prompts.describe()
        receipts = Receipts(path, ledger, settings)

        async def buffered(reason=None, reissue=False):
            entry = await ledger.admit("test", 1)
            if reason != "failed":
                scored = [entry.prompt_index % 2 == 0, entry.epoch > 0] if draws else None
                await ledger.finish_generation(entry.group_id, [3, 4], scored)
            if reason:
                await ledger.drop([entry.group_id], reason, reissue)
            else:
                await ledger.enter_buffer(entry.group_id)

        known = {}
        for reason in ("filtered", "failed", "stale") if eta else ():
            await buffered(reason, reissue=reason != "filtered")
        for step in range(1, num_steps + 1):
            new = 2 - ledger.reuse.counts.next
            while len(ledger.living()) < new:
                await buffered()
            if step == num_steps - 1 and eta:
                await buffered()  # one lives while the step is recorded
            start = ledger.policy_version
            taken = ledger.in_state("buffered")[:new]
            for entry in taken:
                worth = {"rewards": [0.0, 1.0], "oldest_version": max(0, start - 1)}
                known[entry.group_id] = SimpleNamespace(group_id=entry.group_id, **worth)
            ids = [entry.group_id for entry in taken]
            batch = await ledger.take(ids, (), [known[number] for number in ids])
            after = start + (step != 3)
            if after > start:
                await ledger.publish(after)
            versions = {start: 10, max(0, start - eta): 4} if eta else {start: 14}
            if reuse:
                versions = {start: 10, min(known[e.group_id].oldest_version for e in batch): 4}
            mass = 1.0 if step != 3 else None
            use = "trained" if after > start else "skipped"
            few = sum(versions.values()) < 14
            masked = [{use: 4, "stale": 3}, {"stale": 7}] if few else [{use: 7}, {use: 7}]
            counts = zip(batch, masked, strict=True)
            outcome = {
                "token_versions": {str(version): n for version, n in versions.items()},
                "correction_mass": mass,
                "batch_hash": f"hash {step}",
                "tokens": {str(entry.group_id): causes for entry, causes in counts},
            }
            ledger.finish_step(after, outcome)
            with (logs / "metrics.jsonl").open("a") as metrics:
                found = {"policy_version": after, "rollout/trained_tokens": sum(versions.values())}
                metrics.write(json.dumps({"step": step, "attempt": 0, **found}) + "\n")
            if after > start:
                for name in ("generator_0", "generator_1")[: 1 + step % 2]:
                    checksums = dict.fromkeys(("checksum", "published"), f"weights {after}")
                    ledger.events.note("load", role=name, version=after, **checksums)
        receipts.close()

    asyncio.run(run())
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(record.pop("chain") for record in records)
    return records


def write_receipts(folder, records):
    folder.mkdir(exist_ok=True)
    for name in ("receipts.jsonl", "receipts.end"):
        (folder / name).unlink(missing_ok=True)
    file = ChainedFile(folder / "receipts.jsonl")
    for record in records:
        file.append(record)
    file.close()
