"""Tokenizes a large data set in several processes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

from tqdm import tqdm

Kept = TypeVar("Kept")
Sent = TypeVar("Sent")
Got = TypeVar("Got")
ALONE = 4096
"""Items that this process works on alone; others help where there are more."""
_CHUNK = 256
_CHUNKS_AT_ONCE = 4
_SILENT_S = 5.0
_work: Callable[[Any], Any]
"""What a forked process calls: a tokenizer need not be picklable."""


def in_processes(
    work: Callable[[Sent], Got], items: Iterable[tuple[Kept, Sent]], name: str
) -> Iterator[tuple[Kept, Got]]:
    """Yield what is kept of each item, and the result for the rest; shows progress after 5 s."""
    global _work
    left = iter(items)
    with tqdm(desc=f"tokenizing {name}", unit=" prompts", delay=_SILENT_S, mininterval=1) as shown:
        for kept, sent in itertools.islice(left, ALONE):
            yield kept, work(sent)
            shown.update()
        if not (batch := list(itertools.islice(left, 1))):
            return
        # Forked, and before Ray starts: spawned processes would have to get the tokenizer.
        _work, context = work, multiprocessing.get_context("fork")
        workers = len(os.sched_getaffinity(0))
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            while batch:
                batch += itertools.islice(left, workers * _CHUNKS_AT_ONCE * _CHUNK)
                results = pool.map(_work_here, [sent for _, sent in batch], chunksize=_CHUNK)
                for (kept, _), result in zip(batch, results, strict=True):
                    yield kept, result
                    shown.update()
                batch = list(itertools.islice(left, 1))


def _work_here(item: Any) -> Any:
    return _work(item)
