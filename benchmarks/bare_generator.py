"""The real generator without what answers prompts: to measure how weights reach its engine."""

from __future__ import annotations

from grpo_components.rollout import generator


def bare_generator(folder: str, weight_transfer: str | None = None) -> generator.Generator:
    """Return a generator on the CPU that has no data, environment or rewards."""
    return generator.Generator(
        build_tokenizer=lambda: None,  # nothing is decoded here
        engine=generator.EngineOptions(
            model_path=folder,
            device="cpu",
            dtype="fp32",
            max_model_len=128,
            max_num_seqs=8,
            gpu_memory_utilization=0.5,
            kv_cache_gib=1,
            enforce_eager=True,
            recompute_kv_after_pull=False,
            weight_transfer=weight_transfer,
        ),
        sampling=generator.SamplingOptions(
            group_size=1, seed=0, max_response_tokens=64, stop_token_ids=[], truncation={}
        ),
        environment=generator.EnvironmentOptions(
            build_environment=lambda **_: None,  # pyright: ignore[reportArgumentType]
            timeout_s=60.0,
        ),
        rewards=generator.RewardOptions(rewards={}, num_workers=1, timeout_s=1.0),
        rollouts_in_flight=1,
    )
