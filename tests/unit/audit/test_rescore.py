"""Every trained token is scored again; one whose label is one version off is found."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
import torch
from lib.rows import write_rows
from lib.token_engine import policy, sample

from grpo_components.exchange.weights import pack_bucket, snapshot_checksum
from grpo_components.state_files import write_state
from grpo_components.trajectory import batch_hash, pack
from grpo_tools.audit.__main__ import _rescore as rescore
from grpo_tools.audit.rescore import allowed

pytestmark = pytest.mark.usefixtures("one_thread")


class KeptRun:
    """A run of two attempts: versions 1 and 2, then a rollback to 1, and other versions 2 and 3.

    Attempt 0 trained steps 1 and 2, attempt 1 step 2 again and step 3.
    """

    def __init__(self, folder, policies, base):
        self.folder, self.policies = folder, dict(policies)
        self.config = {"base_model_path": f"{base}", "dtype": "fp32", "generator": {"top_p": 1.0}}
        self.checksums = {}
        for identity in ((0, 1), (0, 2), (1, 2)):
            manifest, _ = pack_bucket(list(self.policies[identity].state_dict().items()))
            self.checksums[identity] = snapshot_checksum([manifest])
        self.batches = {
            (0, 1): [self.response(0, 0, [0] * 5), self.response(0, 1, [0] * 9)],
            (0, 2): [self.response(0, 2, [1] * 6), self.response(0, 3, [0] * 2 + [1] * 3)],
            (1, 2): [self.response(0, 3, [0] * 2 + [1] * 3), self.response(1, 4, [1] * 4)],
            (1, 3): [self.response(1, 5, [1] * 3 + [2] * 4), self.response(1, 6, [2] * 6)],
        }

    def response(self, attempt, group, versions):
        found = self.policies
        by_number = {v: found.get((attempt, v), found.get((0, v))) for v in range(3)}
        made = sample(by_number, [3, 1, 4, group], versions, temperature=0.8)
        return dataclasses.replace(made, attempt=attempt, group_id=group)

    def write(self):
        records = []
        for attempt, begins in ((0, 0), (1, 1)):
            start = {"steps_done": begins, "policy_version": begins, "max_staleness": 2}
            records.append({"event": "start", "attempt": attempt, **start})
            for (of, step), batch in self.batches.items():
                if of != attempt:
                    continue
                packed = pack(batch)
                checkpoint = self.folder / "checkpoints" / f"step_{step}"
                write_state(checkpoint / "state", "batch", packed)
                saved = self.policies.get((attempt, step), self.policies[0, 2])
                saved.save_pretrained(checkpoint)
                counts = Counter(np.concatenate([t.token_versions for t in batch]).tolist())
                trained = {"trained_from": step - 1, "policy_version": step}
                trained["token_versions"] = {str(v): n for v, n in sorted(counts.items())}
                trained["batch_hash"] = batch_hash(packed)
                records.append({"event": "step", "attempt": attempt, "step": step, **trained})
                if published := self.checksums.get((attempt, step)):
                    records.append({"event": "load", "version": step, "published": published})
        write_rows(self.folder / "receipts.jsonl", *records)
        (self.folder / "config.yaml").write_text(json.dumps(self.config))


@pytest.fixture(scope="module", name="policies")
def _policies():
    return {(0, 0): policy(0), (0, 1): policy(1), (0, 2): policy(2), (1, 2): policy(3)}


@pytest.fixture
def kept_run(tmp_path, policies):
    base = tmp_path / "base"
    policies[0, 0].save_pretrained(base)
    return KeptRun(tmp_path, policies, base)


def test_all_tokens_that_count_are_scored_over_a_rollback(kept_run, capsys):
    kept_run.write()
    assert rescore(kept_run.folder) == 0
    output = capsys.readouterr().out
    assert output.startswith("rescored: 36 trained tokens of 3 steps under 3 policy versions; 2 ")
    assert "allowed is 1e-04 (fp32), and less for likely tokens" in output and output.endswith(
        "all agree\n"
    )


def plant(run, batch, number, **changes):
    responses = run.batches[batch]
    responses[number] = dataclasses.replace(responses[number], **changes)


def relabelled(run, batch, number, tokens, off):
    labels = run.batches[batch][number].token_versions.copy()
    labels[tokens] += off
    plant(run, batch, number, token_versions=labels)


@pytest.mark.parametrize(
    "batch, number, tokens, off, named",
    [
        ((1, 3), 1, slice(None), -1, "step 3, group 6, response 0, token "),
        ((1, 3), 1, 0, -1, "step 3, group 6, response 0, token 0, version 1 of attempt 1"),
        ((1, 3), 0, 3, -1, "step 3, group 5, response 0, token "),
        ((1, 2), 1, slice(None), -1, "step 2, group 4, response 0, token "),
        ((0, 1), 0, slice(None), 1, "step 1, group 0, response 0, token "),
    ],
)
def test_a_label_that_is_one_version_off_is_named(
    kept_run, capsys, batch, number, tokens, off, named
):
    relabelled(kept_run, batch, number, tokens, off)
    kept_run.write()
    assert rescore(kept_run.folder) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("broken: rescore: ") and f"the worst: {named}" in last


def test_other_logprobs_tokens_and_temperatures_are_found(kept_run, capsys):
    response = kept_run.batches[1, 3][0]
    changed = response.generator_logprobs.copy()
    changed[2] += 3e-4
    for changes in (
        {"generator_logprobs": changed},
        {"response_ids": response.response_ids[::-1].copy()},
        {"temperature": 0.81},
        {"generator_logprobs": np.full_like(changed, np.nan)},
    ):
        plant(kept_run, (1, 3), 0, **changes)
        kept_run.write()
        assert rescore(kept_run.folder) == 1, changes.keys()
        assert "step 3, group 5" in capsys.readouterr().out
        kept_run.batches[1, 3][0] = response


def test_less_is_allowed_for_likely_tokens_and_never_more_than_for_others():
    found = allowed(np.log([1.0, 0.99, 0.5, 1e-6]), "fp32")
    assert found == pytest.approx([2e-6, 3e-6, 5.2e-5, 1e-4], rel=1e-3)
    assert (allowed(np.log([1.0, 1e-6]), "bf16") == 0.25).all()


def test_what_is_damaged_is_named(kept_run, capsys):
    kept_run.write()
    checkpoints = kept_run.folder / "checkpoints"

    def broken():
        assert rescore(kept_run.folder) == 1
        return capsys.readouterr().out.splitlines()[-1]

    path = checkpoints / "step_2" / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert "SafetensorError" in broken()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "version 2 in " in broken()
    path.write_bytes(whole)
    batches = [checkpoints / f"step_{step}" / "state" / "batch.npz" for step in (2, 3)]
    batches[0].replace(batches[1])
    assert "step_2" in broken()


def test_receipts_that_name_other_weights_batches_or_counts_are_found(kept_run, capsys):
    kept_run.checksums[1, 2] = "0123456789abcdef"
    kept_run.write()
    path = kept_run.folder / "receipts.jsonl"
    content = batch_hash(pack(kept_run.batches[1, 3]))
    path.write_text(path.read_text().replace('"2": 10', '"2": 9').replace(content, "0" * 32))
    assert rescore(kept_run.folder) == 1
    output = capsys.readouterr().out
    assert "broken: rescore: version 2 in " in output and "published was 0123456789abcdef" in output
    assert "step 3: the batch in " in output and "step 3: the batch has" in output


def test_masked_and_failed_responses_are_not_scored(kept_run, capsys):
    kept_run.config["mask_overlong"] = True
    plant(kept_run, (1, 3), 0, finish_reason="length")
    plant(kept_run, (1, 2), 1, finish_reason="error", error="lost")
    kept_run.write()
    path = kept_run.folder / "receipts.jsonl"
    text = path.read_text().replace('{"1": 3, "2": 10}', '{"2": 6}')
    path.write_text(text.replace('{"0": 2, "1": 7}', '{"0": 2, "1": 3}'))
    assert rescore(kept_run.folder) == 0, capsys.readouterr().out
    assert capsys.readouterr().out.startswith("rescored: 25 trained tokens")


@pytest.mark.parametrize("what", ["checkpoints", "sampling", "config"])
def test_a_run_that_cannot_be_scored_says_why(kept_run, capsys, what):
    if what == "sampling":
        kept_run.config["generator"]["top_p"] = 0.9
    kept_run.write()
    if what == "checkpoints":
        (kept_run.folder / "checkpoints" / "step_1").rename(kept_run.folder / "elsewhere")
    if what == "config":
        (kept_run.folder / "config.yaml").unlink()
    assert rescore(kept_run.folder) == 2
    error = capsys.readouterr().err
    assert error.startswith("cannot rescore: ")
    named = {"checkpoints": "save_every_n_steps: 1", "sampling": "generator.top_p: 0.9 given"}
    assert named.get(what, "config.yaml") in error
    assert torch.is_grad_enabled()
