"""A loader always finds a whole checkpoint, wherever the writing was interrupted."""

import asyncio
import json
import math
import os
import shutil
import sys
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import ANY, AsyncMock

import numpy as np
import pytest
import torch
from lib.one_rank import one_rank
from lib.role import limits, stand_in_role
from lib.trajectories import response
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from grpo_components.cluster.handles import ReplayBufferHandle, TrainersHandle
from grpo_components.data.prompt_stream import PromptStream
from grpo_components.errors import ConfigError
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.replay_buffer import ReplayBuffer
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.records.checkpoint_folder import earlier, latest, point_latest
from grpo_components.records.journal import Journal
from grpo_components.records.resume import damage
from grpo_components.records.run_folder import new_identity
from grpo_components.settings import EvalSettings, GeneratorSettings, Settings
from grpo_components.state_files import read_state
from grpo_components.training.checkpoint import TrainerState, save_hf_weights
from grpo_components.trajectory import pack, summarize

pytestmark = pytest.mark.anyio


SAMPLING = GeneratorSettings(temperature=1.0, max_response_tokens=16)
PROMPTS = OmegaConf.create({"_component_": "gsm8k", "source": "test.jsonl"})


FULL = OSError(28, "No space left on device")


class Killed(BaseException):
    """The end of the process."""


class Disk:
    """Counts changes of files below a folder, and can kill the process before any of them."""

    def __init__(self):
        self.folder, self.left, self.failure = "", sys.maxsize, Killed
        sys.addaudithook(self._see)  # for the rest of the process: it cannot be removed

    def watch(self, folder, operations=sys.maxsize, failure=Killed):
        self.folder, self.left, self.failure = str(folder), operations, failure

    def _see(self, event, args):
        writes = event in ("os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir") or (
            event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if self.folder and writes and self.folder in f"{args}{self._parent(event, args)}":
            self.spend()

    @staticmethod
    def _parent(event, args):
        """Within a folder that is being removed, files are named relative to it."""
        relative = event in ("os.remove", "os.rmdir") and args[1] != -1
        return os.readlink(f"/proc/self/fd/{args[1]}") if relative else ""

    def spend(self):
        self.left -= 1
        if self.left < 0:
            if self.failure is FULL:
                self.folder = ""  # one failure only, so that the clean-up works
            raise self.failure


@pytest.fixture(scope="module")
def hook():
    return Disk()


@pytest.fixture
def disk(hook, monkeypatch):
    def counted(descriptor):  # without a real sync: the machine does not fail here
        if hook.folder and hook.folder in os.readlink(f"/proc/self/fd/{descriptor}"):
            hook.spend()

    monkeypatch.setattr(os, "fsync", counted)
    yield hook
    hook.watch("")


@pytest.fixture(scope="module", autouse=True)
def rank():
    with one_rank():
        yield


class Policy:
    """The real state of a trainer rank; all weights of the policy are one number."""

    def __init__(self, base):
        self.model = nn.Linear(3, 2, bias=False)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (1,)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.9)
        self.state = TrainerState(self.model, self.optimizer, None, base, 0, 1, torch.device("cpu"))
        self.version = 0

    def train(self, value):
        with torch.no_grad():
            self.model.weight.to_local().fill_(value)
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.param_groups[0]["lr"] = 0.0  # only its momentum changes
        self.optimizer.step()
        self.version = value

    @property
    def weights(self):
        return self.model.weight.to_local().detach()

    def hold_state(self, copy):
        self.state.hold(self.version, [{"model.weight": self.weights}], copy=copy)

    def write_state(self, folder):
        return self.state.write(Path(folder))

    def load_state(self, folder):
        self.version = self.state.load(Path(folder))


class Run:
    """The driver of a run with one trainer and a buffer."""

    def __init__(self, tmp_path, **options):
        base = tmp_path / "base"
        base.mkdir(exist_ok=True)
        for name in ("generation_config.json", "model.safetensors", "old.bin"):
            (base / name).write_text(name)
        if not (base / "config.json").exists():
            (base / "config.json").write_text('{"dtype": "bfloat16", "layers": 2}')
        self.folder = tmp_path / "run" / "checkpoints"
        self.prompts = PromptStream([{"prompt_index": 0}], shuffle=False, seed=1)
        self.ledger = Ledger(StalenessContract(9, 1), 20, self.prompts)
        self.policy = Policy(base)
        self.shown = []
        """Step and folder of each saved checkpoint, and lines."""
        self.buffer = ReplayBuffer(contract=StalenessContract(9, 1), timeout_s=5.0)
        self.identity = new_identity()
        self.configure(**options)

    def configure(self, checkpoint=None, **options):
        note = self.shown.append
        log = SimpleNamespace(checkpoint=lambda *saved: note(saved), note=note)
        start = SimpleNamespace(identity=self.identity, checkpoint=checkpoint, attempt=0)
        cfg = {"output_dir": str(self.folder.parent), "async_checkpoint": False, "seed": 7}
        cfg |= {"eval_dataset": PROMPTS, "eval": EvalSettings(temperature=1.0)}
        cfg |= {"generator": SAMPLING, "environment": None, "rewards": {}}
        settings = Settings.model_construct(**cfg | options)
        self.options = options
        self.journal = Journal(settings, start, self.ledger, self.prompts, None, log)

    @property
    def names(self):
        return sorted(path.name for path in self.folder.iterdir())

    async def stepped(self, number=1):
        """Train and save some steps."""
        for _ in range(number):
            await self.step()
            await self.save()
        return self

    async def step(self):
        """Train the group of the step before, and leave one in the buffer (at first number 0)."""
        ledger, number = self.ledger, self.ledger.steps_done + 1
        self.policy.train(number)
        await ledger.take([entry.group_id for entry in ledger.in_state("buffered")])
        ledger.finish_step(number)
        entry = await ledger.admit("generator_0", 1)
        packed = pack([response(entry.group_id, [0] * number)])
        entry.parts = (packed, summarize(packed))
        await self.buffer.add(*entry.parts)
        await ledger.finish_generation(entry.group_id, [number])
        await ledger.enter_buffer(entry.group_id)
        self.journal.hold()

    def roles(self):
        trainer = stand_in_role("trainer_0", self.policy, max_restarts=0)
        trainers = TrainersHandle([trainer], self.ledger, limits(60))
        role = stand_in_role("replay_buffer", self.buffer, max_restarts=0)
        buffer = ReplayBufferHandle(role, self.ledger, limits(60), wait_for_stale=False)
        return SimpleNamespace(trainers=trainers, buffer=buffer)

    async def save(self, step=None):
        await self.journal.save(step or self.ledger.steps_done, self.roles(), None)

    async def restore(self, folder):
        self.ledger.load_state_dict(read_state(folder / "state", "driver")["ledger"])
        self.configure(folder, **self.options)
        await self.journal.restore(self.roles(), AsyncMock())


MOMENTA = tuple(accumulate(map(np.float32, (1, 2, 3)), lambda m, g: np.float32(0.9 * m + g)))
"""Momentum after each step; gradients add up, as nothing sets them to zero here."""


async def state_of(folder, tmp_path):
    """The step of a checkpoint; fails if its parts are of different steps."""
    run = Run(tmp_path)
    await run.restore(folder)
    step = run.ledger.steps_done
    whole = torch.full((2, 3), float(step))
    assert torch.equal(load_file(folder / "model.safetensors")["model.weight"], whole)
    assert torch.equal(run.policy.weights, whole)
    assert run.policy.version == step
    (momentum,) = (s["momentum_buffer"] for s in run.policy.optimizer.state.values())
    assert torch.equal(momentum.to_local(), torch.full((2, 3), float(MOMENTA[step - 1])))
    _, taken = await run.buffer.take(1, 0)
    assert [group.group_id for group in taken.groups] == [step - 1]
    assert OmegaConf.load(folder / "state" / "config.yaml").seed == 7
    config = json.loads((folder / "config.json").read_text())
    assert config == {"dtype": "float32", "layers": 2}
    assert (folder / "generation_config.json").read_text() == "generation_config.json"
    assert not (folder / "old.bin").exists()
    return step


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
async def test_all_parts_are_of_one_step_latest_points_at_it_and_the_umask_is_kept(
    tmp_path, umask, mode
):
    before, run = os.umask(umask), Run(tmp_path)
    (tmp_path / "base" / "config.json").chmod(0o400)
    try:
        await run.stepped()
    finally:
        os.umask(before)
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {mode}
    assert run.shown == [(1, str(run.folder / "step_1"))]
    assert latest(run.folder) == run.folder / "step_1"
    assert await state_of(run.folder / "latest", tmp_path) == 1
    assert run.names == ["latest", "step_1"]


@pytest.mark.parametrize("harm", ["weight", "moment", "garbled"])
async def test_damaged_values_are_refused_by_the_trainer(tmp_path, harm):
    """The driver reads sizes only."""
    run = Run(tmp_path)
    await run.step()
    (moments,) = run.policy.optimizer.state.values()
    if harm != "garbled":
        damaged = moments["momentum_buffer"] if harm == "moment" else run.policy.model.weight.data
        damaged.to_local().fill_(torch.nan)
    await run.save()
    checkpoint = run.folder / "step_1"
    if harm == "garbled":
        trainer = checkpoint / "state" / "trainer"
        stored = FileSystemReader(trainer).read_metadata().storage_data
        (part,) = (p for index, p in stored.items() if "momentum" in index.fqn)
        with (trainer / part.relative_path).open("r+b") as file:
            file.seek(part.offset)
            file.write(b"\xff" * part.length)
    assert damage(checkpoint) is None
    with pytest.raises(ConfigError) as refused:
        Run(tmp_path).policy.load_state(checkpoint)
    assert refused.value.key == "resume_from_checkpoint"
    assert str(checkpoint) in refused.value.problem


async def test_a_checkpoint_written_in_the_background_is_of_its_own_step(tmp_path):
    run = await Run(tmp_path, async_checkpoint=True).stepped(2)  # changes the held state in place
    assert run.shown == [(1, str(run.folder / "step_1"))]
    await run.step()
    await run.journal.finish()
    assert [await state_of(run.folder / f"step_{step}", tmp_path) for step in (1, 2)] == [1, 2]


async def test_the_last_n_are_kept_and_always_the_latest(tmp_path):
    run = await Run(tmp_path, keep_last_n=2).stepped(4)
    assert run.names == ["latest", "step_3", "step_4"]
    # Another attempt resumes from step 3: step 4 of the old one is deleted first.
    point_latest(run.folder / "step_3")
    for step, kept in ((4, ["step_3", "step_4"]), (10, ["step_10", "step_4"])):
        await run.step()
        await run.save(step)
        assert run.names == ["latest", *kept]
        assert latest(run.folder) == run.folder / f"step_{step}"


async def test_only_folders_named_after_a_step_are_checkpoints_and_all_else_stays(tmp_path):
    run = await Run(tmp_path, keep_last_n=1, keep_best=SUCCESS).stepped()
    foreign = [".DS_Store", "step_1.tar", "step_1_keep", "step_3"]
    shutil.copytree(run.folder / "step_1", run.folder / "step_1_keep")
    (run.folder / "step_1_keep" / "evaluation.json").write_text(json.dumps(rating(1, 0.9)))
    for name in (".DS_Store", "step_1.tar", "step_3", ".step_9.unfinished"):
        (run.folder / name).touch()
    await saved_and_rated(run, 0.5)
    assert run.names == sorted(["best", "latest", "step_2", *foreign])
    assert best_of(run) == "step_2" and earlier(run.folder / "step_2") == []
    await saved_and_rated(run, 0.75)
    assert best_of(run) == "step_3", "in place of the file"


async def prepared(tmp_path):
    """A folder whose latest checkpoint is step 1, with a step 2 of a rolled-back attempt."""
    run = await Run(tmp_path).stepped()
    shutil.copytree(run.folder / "step_1", run.folder / "step_2")
    return run


def test_a_kill_before_any_change_of_a_file_leaves_a_whole_checkpoint(tmp_path, disk):
    run = asyncio.run(prepared(tmp_path))
    asyncio.run(run.step())
    initial = tmp_path / "initial"
    shutil.copytree(run.folder, initial, symlinks=True)
    run.configure(keep_last_n=1)
    found = []
    for operations in range(1000):
        shutil.rmtree(run.folder)
        shutil.copytree(initial, run.folder, symlinks=True)
        run.journal.hold()
        disk.watch(run.folder, operations)
        try:
            asyncio.run(run.save())  # its loop ends with it, as the process does
        except (Killed, OSError, RuntimeError):
            disk.watch("")
        else:
            break
        assert run.folder / os.readlink(run.folder / "latest") in list(run.folder.iterdir())
        for folder in run.folder.glob("step_*"):  # each is whole: a loader may take any of them
            assert len(list(folder.rglob("*"))) == len(list((initial / "step_1").rglob("*")))
        found.append(int(os.readlink(run.folder / "latest").removeprefix("step_")))
        if operations % 8 == 0 or found[-2:] == [1, 2]:
            assert asyncio.run(state_of(run.folder / "latest", tmp_path)) == found[-1]
    disk.watch("")
    assert found == sorted(found) and set(found) == {1, 2}
    assert found.count(1) > 20, "the hook sees few of the changes"
    assert found.count(2) > 5, "removing the old ones was not interrupted"
    assert asyncio.run(state_of(run.folder / "latest", tmp_path)) == 2
    assert run.names == ["latest", "step_2"]


@pytest.mark.parametrize("operations", [1, 3, 9, 20])
@pytest.mark.parametrize("in_background", [False, True])
async def test_a_full_disk_is_an_error_that_names_the_last_checkpoint(
    tmp_path, disk, operations, in_background
):
    run = await prepared(tmp_path)
    await run.step()
    run.configure(async_checkpoint=in_background)
    disk.watch(run.folder, operations, failure=FULL)
    with pytest.raises(OSError, match=r"step 2 .*No space left") as failed:
        await run.save()
        await run.journal.finish()
    assert run.names == ["latest", "step_1", "step_2"], "what was half written is still there"
    assert str(failed.value).endswith(str(run.folder / "step_1"))
    assert await state_of(run.folder / "latest", tmp_path) == 1


def test_a_failure_in_the_background_ends_the_next_step(tmp_path, disk):
    async def main():  # in a loop of its own: it waits for all other tasks
        run = Run(tmp_path, async_checkpoint=True)
        await run.step()
        disk.watch(run.folder, 0, failure=FULL)
        await run.save()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
        with pytest.raises(OSError, match=r"step 1 .*No space left.*; the last one is none$"):
            await run.step()
        assert latest(run.folder) is None

    asyncio.run(main())


async def test_with_warn_training_goes_on_and_the_next_checkpoint_may_succeed(tmp_path, disk):
    run = await Run(tmp_path, checkpoint_failure="warn").stepped()
    await run.step()
    disk.watch(run.folder, 9, failure=FULL)
    await run.save()
    assert latest(run.folder) == run.folder / "step_1"
    assert "step 2" in run.shown[-1] and "No space left" in run.shown[-1]
    await run.stepped()
    assert run.shown[-1] == (3, str(run.folder / "step_3"))
    assert await state_of(run.folder / "latest", tmp_path) == 3
    assert run.names == ["latest", "step_1", "step_3"]


async def test_the_random_state_of_a_rank_is_restored(tmp_path):
    run, drawn = await Run(tmp_path).stepped(), torch.rand(3)
    torch.manual_seed(0)
    await run.restore(run.folder / "step_1")
    assert torch.equal(torch.rand(3), drawn)


SUCCESS = "eval/success_rate"


def rating(version, success):
    return {"eval/policy_version": version, SUCCESS: success, "eval/reward_mean_low": math.nan}


async def saved_and_rated(run, *successes, before=True):
    """Steps with these ratings, each known before or after its checkpoint is written."""
    for step, success in enumerate(successes, run.ledger.steps_done + 1):
        await run.step()
        if before:
            run.journal.add_evaluation(step, rating(step, success))
        await run.save()
        if not before:
            run.journal.add_evaluation(step, rating(step, success))


def best_of(run):
    link = run.folder / "best"
    return os.readlink(link) if link.is_symlink() else None


@pytest.mark.parametrize("before", [True, False])
async def test_the_best_checkpoint_is_kept(tmp_path, before):
    run = Run(tmp_path, keep_last_n=1, keep_best=SUCCESS)
    await saved_and_rated(run, 0.25, 0.75, 0.75, 0.5, math.nan, before=before)
    assert best_of(run) == "step_2", "of equal ones the first"
    assert run.names == ["best", "latest", "step_2", "step_5"]
    rated = json.loads((run.folder / "best/evaluation.json").read_text())
    assert rated == {"eval/policy_version": 2, SUCCESS: 0.75, "kind": ANY}
    assert await state_of(run.folder / "step_2", tmp_path) == 2
    assert any("step 2: best" in str(line) and "0.750" in line for line in run.shown)


async def test_a_checkpoint_is_rated_even_if_the_next_evaluation_is_there_before_it(tmp_path):
    run = await Run(tmp_path, async_checkpoint=True, keep_last_n=1, keep_best=SUCCESS).stepped()
    run.journal.add_evaluation(1, rating(1, 0.75))
    run.journal.add_evaluation(2, rating(2, 0.25))
    await run.stepped()
    await run.journal.finish()
    assert best_of(run) == "step_1" and run.names == ["best", "latest", "step_1", "step_2"]
    assert (run.folder / "step_2/evaluation.json").exists()


async def test_an_attempt_forgets_evaluations_of_the_one_before(tmp_path):
    run = Run(tmp_path, keep_best=SUCCESS)
    run.journal.add_evaluation(1, rating(1, 0.75))
    await run.journal.restore(run.roles(), AsyncMock())
    await run.stepped()
    assert best_of(run) is None


async def test_a_rolled_back_run_forgets_ratings_of_later_steps(tmp_path):
    first = Run(tmp_path, keep_best=SUCCESS)
    await saved_and_rated(first, 0.5, 0.25, 0.75)
    assert best_of(first) == "step_3"
    again = Run(tmp_path, keep_best=SUCCESS)
    point_latest(first.folder / "step_2")  # as a run does that resumes from it
    await again.restore(first.folder / "step_2")
    assert best_of(again) == "step_1"
    again.journal.add_evaluation(2, rating(2, 0.625))  # as a resumed run's first evaluation
    assert best_of(again) == "step_2"
    await saved_and_rated(again, 0.5625)
    assert best_of(again) == "step_2", "step 3 of the attempt that was given up counts no more"
    rated = json.loads((again.folder / "step_3/evaluation.json").read_text())
    assert rated[SUCCESS] == 0.5625
    # A generator that restarts during an evaluation has other weights than the checkpoint.
    await again.stepped()
    again.journal.add_evaluation(4, rating(5, 0.9))
    assert best_of(again) == "step_2" and not (again.folder / "step_4/evaluation.json").exists()


@pytest.mark.parametrize(
    ("change", "best"),
    [
        ({"eval": EvalSettings(temperature=1.0, prompts_logged=3)}, "step_1"),
        ({"eval": EvalSettings(temperature=0.0)}, "step_2"),
        ({"eval": EvalSettings(temperature=1.0, samples_per_prompt=4)}, "step_2"),
        ({"eval_dataset": OmegaConf.merge(PROMPTS, {"source": "hard.jsonl"})}, "step_2"),
        ({"generator": SAMPLING.model_copy(update={"max_response_tokens": 9})}, "step_2"),
        ({"generator": SAMPLING.model_copy(update={"top_p": 0.5})}, "step_2"),
        ({"rewards": {"judge": OmegaConf.create({"scale": 2})}}, "step_2"),
        ({"environment": OmegaConf.create({"_component_": "another"})}, "step_2"),
    ],
)
async def test_the_best_is_chosen_among_evaluations_of_the_same_prompts_and_sampling(
    tmp_path, change, best
):
    first = Run(tmp_path, keep_best=SUCCESS)
    await saved_and_rated(first, 0.75, 0.5)
    again = Run(tmp_path, keep_best=SUCCESS, **change)
    await again.restore(first.folder / "step_2")
    assert best_of(again) == "step_1", "until another is rated"
    again.journal.add_evaluation(2, rating(2, 0.25))
    await saved_and_rated(again, 0.125)
    assert best_of(again) == best


async def test_a_rating_without_its_kind_counts(tmp_path):
    """Runs before 2026-11-28 wrote none."""
    first = Run(tmp_path, keep_best=SUCCESS)
    await saved_and_rated(first, 0.75, 0.5)
    for file in first.folder.glob("step_*/evaluation.json"):
        file.write_text(json.dumps({SUCCESS: json.loads(file.read_text())[SUCCESS]}))
    again = Run(tmp_path, keep_best=SUCCESS, keep_last_n=1)
    await again.restore(first.folder / "step_2")
    await saved_and_rated(again, 0.625)
    assert again.names == ["best", "latest", "step_1", "step_3"] and best_of(again) == "step_1"


@pytest.mark.parametrize(
    ("base", "saved"),
    [
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16", "dtype": "bfloat16"}),
        ({"dtype": None, "a": {"b": 1}}, {"dtype": "bfloat16", "a": {"b": 1}}),
        ({"text_config": {"dtype": "float16"}}, {"text_config": {"dtype": "bfloat16"}}),
    ],
)
def test_the_config_has_the_dtype_of_the_weights(tmp_path, base, saved):
    (tmp_path / "config.json").write_text(json.dumps(base))
    weights = {"norm": torch.ones(2), "weight": torch.ones(8, dtype=torch.bfloat16)}
    save_hf_weights(weights, tmp_path, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config == {"dtype": "bfloat16"} | saved
