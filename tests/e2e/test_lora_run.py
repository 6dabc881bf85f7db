"""Runs with adapters by the real `tune`: killed roles, a replay to the same bits, their size."""

import re
from pathlib import Path

import pytest
import torch
from lib.chaos import Fault, forked_recipe
from lib.whole_runs import assert_same_run, audit, metrics, records, rescore, succeed
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # a busy machine may take long

KNOBS = (
    *("num_steps=4", "groups_per_step=4", "group_size=4", "eval_dataset.num_rows=4"),
    *("lora.rank=4", "lora.alpha=8", "lora.save_merged=true", "optimizer.lr=1e-2"),
    *("pull_every_m_rollouts=1", "rollouts_in_flight=4", "loss.kl_coeff=0.01", "max_staleness=1"),
    "push=delta",
)
SIZES = "vocab_size num_layers num_heads num_kv_heads embed_dim intermediate_dim max_seq_len"
TRANSFORMERS = (
    *("checkpointer=null", "model._component_=grpo_components.models.hugging_face"),
    "model.path=/tmp/torchtune-async-grpo/tiny_policy",
    *(f"~model.{key}" for key in f"{SIZES} norm_eps tie_word_embeddings".split()),
)


def test_a_run_with_adapters_survives_a_killed_generator_and_is_replayed(tune, tmp_path):
    """On a policy of transformers; the ladder has the adapters of torchtune's decoders.

    In the replay, the new generator gets its adapter from the files of `keep_policy_versions`.
    """
    recipe, environment = forked_recipe(tmp_path, [Fault("generator_0", "load_weights", 2)])
    output, original = succeed(tune, *KNOBS, *TRANSFORMERS, recipe=recipe, env=environment)
    assert re.search(r"^generator_0 is back", output, re.MULTILINE), output
    assert "reference" not in output.split("step 1/")[0]  # no process of its own
    code, table = audit(original)
    assert code == 0, table
    steps = metrics(original)[1:]
    assert [record["policy_version"] for record in steps] == [1, 2, 3, 4]
    assert steps[-1]["loss/kl_reference"] > 0
    assert all(abs(record["mismatch/fresh_kl"]) < 1e-6 for record in steps[:1])
    base = Path("/tmp/torchtune-async-grpo/tiny_policy/model.safetensors")
    sizes = [record["push/bytes"] for record in steps if record["push/bytes"]]
    assert 0 < max(sizes) < 0.05 * base.stat().st_size
    kept = (f"replay_events={original}", "keep_policy_versions=true")
    output, replay = succeed(tune, *KNOBS, *TRANSFORMERS, *kept)
    assert "events in the recorded order" in output
    code, table = rescore(replay)
    assert code == 0, table
    merged = assert_same_run(original, replay, num_steps=4)
    adapter = load_file(replay / "checkpoints/latest/adapter/adapter_model.safetensors")
    before = load_file(base)
    changed = {name for name in before if not torch.equal(before[name], merged[name])}
    prefix = "base_model.model."
    assert changed == {
        name.removeprefix(prefix).replace("lora_A.weight", "weight")
        for name in adapter
        if "lora_A" in name
    }
    loads = [e for e in records(original / "logs" / "events.jsonl") if e["event"] == "load"]
    assert max(event["version"] for event in loads) >= 3
