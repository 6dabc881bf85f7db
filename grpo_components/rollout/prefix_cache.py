"""Empties vLLM's prefix cache after a weight swap: no new request may read KV of old weights."""

from __future__ import annotations

from typing import Any


def empty_prefix_cache(scheduler: Any) -> None:
    """Make every cached block unreachable for new requests, even while requests are running.

    Running requests keep the blocks they hold. vLLM's own `reset_prefix_cache` does nothing while
    any request holds a block, unless it preempts all requests.

    New blocks of a running request attend to its old KV (keys and values), so no other request may
    share them. They are therefore cached under a salt that is unique to the request: `cache_salt`
    enters the hash of a request's first block, and the hash of each block enters that of the next.
    A request that has computed nothing yet needs no salt, because all its KV will come from the new
    weights.
    """
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    manager.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
    if still_cached := len(pool.cached_block_hash_to_block):
        raise RuntimeError(f"vLLM's prefix cache still has {still_cached} blocks of old weights")
    for request in scheduler.requests.values():
        if request.num_computed_tokens:
            request.cache_salt = request.request_id
            request.block_hashes = []
            request.update_block_hashes()
