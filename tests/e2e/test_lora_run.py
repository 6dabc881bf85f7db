"""A run with adapters by the real `tune`: a killed role, what is trained, its size."""

import re

import torch
from lib.whole_runs import assert_audited, metrics, records
from safetensors.torch import load_file


def test_its_generator_was_killed_and_its_audit_holds(lora_run):
    assert re.search(r"^generator_0 is back", lora_run.output, re.MULTILINE), lora_run.output
    assert_audited(lora_run.folder)
    loads = [e for e in records(lora_run.folder / "receipts.jsonl") if e["event"] == "load"]
    assert max(event["version"] for event in loads) >= 3


def test_the_reference_is_the_policy_without_its_adapter(lora_run):
    assert "reference" not in lora_run.output.split("step 1/")[0], "no process of its own"
    steps = metrics(lora_run.folder)[1:]
    assert [record["policy_version"] for record in steps] == [1, 2, 3, 4]
    assert steps[-1]["loss/kl_reference"] > 0
    assert abs(steps[0]["mismatch/fresh_kl"]) < 1e-6


def test_pushes_have_the_adapter_only_and_the_merged_weights_change_where_it_is(
    lora_run, tiny_policy
):
    base = tiny_policy / "model.safetensors"
    sizes = [record["push/bytes"] for record in metrics(lora_run.folder)[1:]]
    assert 0 < max(filter(None, sizes)) < 0.05 * base.stat().st_size
    latest = lora_run.folder / "checkpoints" / "latest"
    adapter = load_file(latest / "adapter" / "adapter_model.safetensors")
    before, merged = load_file(base), load_file(latest / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], merged[name])}
    prefix = "base_model.model."
    assert changed == {
        name.removeprefix(prefix).replace("lora_A.weight", "weight")
        for name in adapter
        if "lora_A" in name
    }
