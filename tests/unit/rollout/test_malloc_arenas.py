"""Memory that was freed goes back to the system, where glibc would keep it."""

import psutil

from grpo_components.rollout.malloc_arenas import give_back_freed


def test_freed_memory_below_what_is_in_use_is_given_back():
    blocks = [bytes(60_000) for _ in range(4000)]  # small enough for malloc's heap
    kept = blocks[::100]  # what lies above a freed block keeps glibc from giving it back
    del blocks
    before = psutil.Process().memory_info().rss
    give_back_freed()
    given_back = before - psutil.Process().memory_info().rss
    assert len(kept) == 40 and given_back > 100 * 2**20
