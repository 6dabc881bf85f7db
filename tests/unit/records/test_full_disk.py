"""A disk that is full: one error that names the file, and nothing lost of what was written."""

import contextlib
import errno
import json
import subprocess
from unittest.mock import MagicMock

import pytest

from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.files import cut_torn_line
from grpo_components.records.metrics import MetricLog
from grpo_components.records.receipts import Receipts


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk):
    """Write until nothing more goes in."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (2**20, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass


def after_free(disk, path):
    """Make room again, and return the records that a resumed run finds."""
    (disk / "filler").unlink()
    cut_torn_line(path)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_on_a_full_disk_are_an_error_with_the_file_and_whole_lines_stay(disk):
    log = MetricLog(str(disk), MagicMock(), log_every_n_steps=1)
    log.log(1, {"loss": 1.0})
    fill(disk)
    step = 1
    with pytest.raises(OSError, match=r"cannot be written.*metrics\.jsonl") as failed:
        while step < 10_000:
            step += 1
            log.log(step, {"loss": 1.0})
    assert failed.value.errno == errno.ENOSPC
    log.close()
    kept = after_free(disk, disk / "logs" / "metrics.jsonl")
    assert [record["step"] for record in kept] == list(range(1, step))


def test_receipts_on_a_full_disk_are_an_error_and_closing_them_hides_no_other(disk):
    ledgers = [Ledger(StalenessContract(1, 1), 3, iter(())) for _ in range(2)]
    path = disk / "receipts.jsonl"
    failing, closed = (Receipts(path, ledger, 0, {}) for ledger in ledgers)
    fill(disk)
    with pytest.raises(OSError, match=r"cannot be written.*receipts\.jsonl"):
        for version in range(1, 100_000):
            ledgers[0].events.note("publish", version=version)
    failing.close()
    closed.close()  # the run has failed by something else: that is told, not this
    assert [event["event"] for event in after_free(disk, path)][:2] == ["start", "start"]
