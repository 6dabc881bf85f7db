"""The role of test_cluster.py, in its own module so that its processes import little."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np


class GpusWhenUnpickled:
    """Argument that unpickles to the GPUs which its new process may use at that moment."""

    def __reduce__(self):
        return os.getenv, ("CUDA_VISIBLE_DEVICES",)


class Counter:
    def __init__(
        self,
        start=0,
        fails_if_there=None,
        dies_if_there=None,
        restart_count=None,
        start_after_s=0,
        first_gpus=None,
    ):
        self.incarnation, self.first_gpus = restart_count, first_gpus
        time.sleep(start_after_s)
        if start < 0:
            raise ValueError("start is below 0")
        if fails_if_there and Path(fails_if_there).exists():
            Path(fails_if_there).unlink()
            raise OSError("the node is not ready")
        if dies_if_there and Path(dies_if_there).exists():
            Path(dies_if_there).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        self.value = start
        self.hangs = threading.Event()

    def add(self, amount):
        self.value += amount
        return self.value

    def block(self, size, value):
        return np.full(size, value, np.uint8), value

    def total_of(self, block):
        return int(block.sum(dtype=np.int64))

    def split(self):
        return [self.value], self.value

    def total(self, values):
        return sum(values)

    def fail(self):
        raise KeyError("no such thing")

    def hang_once(self, mark):
        """Hang in the first process that gets the call; answer in the next."""
        if not Path(mark).exists():
            Path(mark).touch()
            self.hangs.set()
            threading.Event().wait(300)
        return self.value

    def wait_until_it_hangs(self):
        return self.hangs.wait(60)

    def incarnation_and_pid(self):
        return self.incarnation, os.getpid()

    def environment(self):
        return {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "GREETING")}

    def gpus(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def gpus_when_unpickled(self):
        return self.first_gpus
