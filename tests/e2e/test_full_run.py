"""A run with every kind of role, two of which are killed, and its replay to the same bits."""

import ipaddress
import re

import pytest
import torch
from lib.whole_runs import (
    KEYS,
    assert_audited,
    assert_same_run,
    metrics,
    receipts,
    records,
    rescore,
)
from safetensors.torch import load_file


def test_every_kind_of_role_takes_part_and_what_was_killed_is_back(full_run):
    roles = {record["role"] for record in records(full_run.folder / "logs" / "roles.jsonl")}
    assert roles == {
        *("generator_0", "generator_1", "trainer_0", "reference_0", "teacher_0"),
        *("replay_buffer", "parameter_server", "reward_model"),
    }
    back = re.findall(r"^(\w+) is back", full_run.output, re.MULTILINE)
    assert len(back) == 2 and back[0] == "replay_buffer", full_run.output


def test_its_audit_holds(full_run):
    assert_audited(full_run.folder)


def test_its_metrics_are_whole_and_reference_and_teacher_measure_the_same_kl(full_run):
    steps = metrics(full_run.folder)[1:]
    for record in steps:
        assert record.keys() >= KEYS
        # A step of older responses only has no fresh token to compare.
        assert all(record[key] is not None for key in KEYS if "/fresh_" not in key)
        assert record["teacher/kl_k3"] == pytest.approx(record["loss/kl_reference"], abs=1e-6)
    assert steps[0]["loss/kl_reference"] == pytest.approx(0, abs=1e-6)  # the policy is the base
    assert max(record["loss/kl_reference"] for record in steps) > 1e-7
    # On the base weights, trainer and generator agree: fp32, < 1e-4 on every token.
    assert steps[0]["staleness/max"] == 0
    assert abs(steps[0]["ratio/max"] - 1) < 1e-4
    assert max(record["staleness/max"] for record in steps) > 0
    whole = max(record["push/bytes"] for record in steps)
    assert 0 < min(record["push/bytes"] for record in steps[1:]) < 0.9 * whole


def test_weights_change_within_responses_whose_rewards_have_all_terms(full_run):
    groups = records(full_run.folder / "logs" / "rollouts.jsonl")
    assert all(len(group["responses"]) == len(group["advantages"]) for group in groups)
    responses = [response for group in groups for response in group["responses"]]
    assert any(oldest < newest for oldest, newest in (r["versions"] for r in responses))
    assert all({"reward_model", "judge"} < r["reward_terms"].keys() for r in responses)


def test_generator_trainer_and_reference_have_the_same_logprobs_of_each_token(full_run):
    """On the base weights, in the first group."""
    group = records(full_run.folder / "logs" / "rollouts.jsonl")[0]
    for response in group["responses"]:
        trainer = response["trainer_logprobs"]
        sampled = [logprob for logprob in trainer if logprob is not None]
        assert len(trainer) == len(response["tokens"]) == response["response_tokens"] and sampled
        for who in ("generator", "reference"):
            assert response[f"{who}_logprobs"] == pytest.approx(trainer, abs=1e-4)
    assert "trainer_logprobs" in (full_run.folder / "report.html").read_text(encoding="utf-8")


def test_the_judges_tokens_are_counted(full_run):
    """What was used by a process that was killed is not counted, nor before the run starts."""
    name, records = "reward_use/judge_completion_tokens", metrics(full_run.folder)[1:]
    assert 0 < sum(record.get(name, 0.0) for record in records) <= 2 * full_run.seen["asked"]


def test_whatever_listens_in_a_run_cannot_be_reached_from_elsewhere(full_run):
    listening = full_run.seen["listening"]
    addresses = [ipaddress.ip_address(ip.removeprefix("::ffff:")) for _, ip in listening]
    assert len(addresses) > 5, "Ray, gloo and the roles listen"
    assert all(address.is_loopback for address in addresses), listening


def test_its_replay_has_the_same_bits(full_run, replayed_run, tiny_policy):
    """The recorded run pushed deltas, the replay whole weights."""
    assert "events in the recorded order" in replayed_run.output
    back = [re.findall(r"^(\w+) is back", r.output, re.M) for r in (full_run, replayed_run)]
    assert back[1] == back[0][1:]
    after = assert_same_run(full_run.folder, replayed_run.folder, num_steps=8)
    base = load_file(tiny_policy / "model.safetensors")
    assert any(not torch.equal(base[name], after[name]) for name in base), "nothing was trained"


def test_all_tokens_of_the_replay_are_scored_again_with_their_own_versions(replayed_run):
    code, table = rescore(replayed_run.folder)
    assert code == 0, table
    over_swaps = re.search(r"(\d+) responses over a swap", table)
    assert over_swaps and int(over_swaps[1]) > 0, table
    trained = sum(sum(r["token_versions"].values()) for r in receipts(replayed_run.folder))
    assert f"rescored: {trained:,} trained tokens of 8 steps" in table
