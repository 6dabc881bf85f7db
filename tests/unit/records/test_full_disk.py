"""A disk that is full: one error that names the file, and nothing lost of what was written."""

import asyncio
import contextlib
import errno
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lib.role import stand_in_role

from grpo_components.cluster.handles import ReplayBufferHandle, TrainersHandle
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.files import cut_torn_line
from grpo_components.records.checkpoint_folder import latest
from grpo_components.records.checkpoints import Checkpoints
from grpo_components.records.metrics import MetricLog
from grpo_components.records.receipts import Receipts
from grpo_components.records.run_identity import new_identity
from grpo_components.state_files import read_state, write_state

MIB = 2**20


class Disk:
    """A folder that `fill` leaves no room in."""

    def __init__(self, folder):
        self.folder = folder

    def fill(self):
        """Write until nothing more goes in; `free` makes room again."""
        with (self.folder / "filler").open("ab", buffering=0) as file:
            with contextlib.suppress(OSError):
                while file.write(bytes(MIB)):
                    pass
            with contextlib.suppress(OSError):
                while file.write(b"0"):
                    pass

    def free(self):
        (self.folder / "filler").unlink()


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    yield Disk(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Silent:
    """A metric logger that writes nothing."""

    def log_dict(self, payload, step):
        pass

    def close(self):
        pass


def test_metrics_on_a_full_disk_are_an_error_with_the_file_and_whole_lines_stay(disk):
    log = MetricLog(str(disk.folder), Silent(), log_every_n_steps=1)
    log.log(1, {"loss": 1.0})
    disk.fill()
    step = 1
    with pytest.raises(OSError, match=r"cannot be written.*metrics\.jsonl") as failed:
        while step < 10_000:
            step += 1
            log.log(step, {"loss": 1.0})
    assert failed.value.errno == errno.ENOSPC
    log.close()
    disk.free()
    path = disk.folder / "logs" / "metrics.jsonl"
    cut_torn_line(path)  # as a resumed run does
    assert [record["step"] for record in lines(path)] == list(range(1, step))


def test_receipts_on_a_full_disk_are_an_error_and_closing_them_hides_no_other(disk):
    ledgers = [Ledger(StalenessContract(1, 1), 3, iter(())) for _ in range(2)]
    path = disk.folder / "receipts.jsonl"
    failing, closed = (Receipts(path, ledger, 0, {}) for ledger in ledgers)
    disk.fill()
    with pytest.raises(OSError, match=r"cannot be written.*receipts\.jsonl"):
        for version in range(1, 100_000):
            ledgers[0].events.note("publish", version=version)
    failing.close()
    closed.close()  # the run has failed by something else: that is told, not this
    disk.free()
    cut_torn_line(path)
    assert [event["event"] for event in lines(path)][:2] == ["start", "start"]


class Writer:
    """A trainer or buffer: writes a file as large as it is told."""

    def __init__(self, name):
        self.name, self.size = name, MIB // 2

    def hold_state(self, in_background):
        pass

    def write_state(self, folder, *parts):
        try:
            write_state(Path(folder), self.name, {})
            with Path(folder, f"{self.name}.bin").open("wb") as file:
                file.write(bytes(self.size))
        except OSError as error:
            return str(error)


class Account:
    """Stands for ledger and prompts."""

    def __init__(self):
        self.state = {"steps_done": 0, "policy_version": 0, "living": []}

    def state_dict(self):
        return dict(self.state)

    def stored(self):
        return []


class Log:
    """Keeps the notes and the steps of saved checkpoints."""

    def __init__(self):
        self.notes, self.saved = [], []
        self.note = self.notes.append

    def checkpoint(self, step, folder):
        self.saved.append(step)


def handles(trainer, buffer, account):
    roles = [stand_in_role(each.name, each, max_restarts=0) for each in (trainer, buffer)]
    trainers = TrainersHandle(roles[:1], account, 10, 10)
    return trainers, ReplayBufferHandle(roles[1], account, 10, 10, wait_for_stale=False)


def make_checkpoints(folder, failure, account):
    log = Log()
    checkpoints = Checkpoints(
        folder,
        cast(Any, SimpleNamespace(model_dump=lambda: {"seed": 1})),
        account,
        account,
        writes=True,
        keep_last_n=1,
        keep_best=None,
        failure=failure,
        in_background=False,
        run_log=log,
        identity=new_identity(),
        verify=lambda: None,
    )
    return checkpoints, log.notes, log.saved


@pytest.mark.parametrize("failure", ["error", "warn"])
@pytest.mark.parametrize("full", ["from the start", "in the middle"])
def test_a_checkpoint_that_finds_no_room_leaves_the_last_one_as_it_was(disk, failure, full):
    account, folder = Account(), disk.folder / "checkpoints"
    trainer, buffer = Writer("trainer"), Writer("buffer")
    checkpoints, notes, saved = make_checkpoints(folder, failure, account)

    async def save(step):
        account.state["steps_done"] = step
        checkpoints.hold()
        await checkpoints.save(step, *handles(trainer, buffer, account), None)

    asyncio.run(save(1))
    if full == "from the start":
        disk.fill()
    else:
        trainer.size = 4 * MIB
    if failure == "error":
        with pytest.raises(OSError, match=r"checkpoint of step 2 .*No space left.*step_1"):
            asyncio.run(save(2))
    else:
        asyncio.run(save(2))
        assert "No space left" in notes[0] and "step_1" in notes[0]
    assert saved == [1] and latest(folder) == folder / "step_1"
    assert read_state(folder / "step_1" / "state", "driver")["ledger"]["steps_done"] == 1
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_1"]
    if full == "from the start":
        disk.free()
    trainer.size = MIB // 2
    asyncio.run(save(3))
    assert latest(folder) == folder / "step_3"


@pytest.fixture
def unprivileged():
    """A folder of an ordinary user, who also runs the rest of the test: root may write anywhere."""
    folder, nobody = Path(tempfile.mkdtemp(dir="/tmp")), 65534
    as_root = os.geteuid() == 0
    if as_root:
        os.chown(folder, nobody, nobody)
        os.seteuid(nobody)
    yield folder
    if as_root:
        os.seteuid(0)
    folder.chmod(0o700)
    shutil.rmtree(folder)


@pytest.mark.parametrize("failure", ["error", "warn"])
@pytest.mark.parametrize("lost", ["a file lies there", "no permission"])
def test_a_checkpoint_folder_that_cannot_be_written_to_is_told(unprivileged, failure, lost):
    account, folder = Account(), unprivileged / "checkpoints"
    if lost == "no permission":
        unprivileged.chmod(0o500)
    else:
        folder.touch()
    checkpoints, notes, saved = make_checkpoints(folder, failure, account)

    async def save():
        checkpoints.hold()
        await checkpoints.save(1, *handles(Writer("trainer"), Writer("buffer"), account), None)

    if failure == "error":
        with pytest.raises(
            OSError, match=r"checkpoint of step 1 could not be .*the last one is no"
        ):
            asyncio.run(save())
    else:
        asyncio.run(save())
        assert str(unprivileged) in notes[0]
    assert not saved
