"""Runs that are repeated to the same bits: of agents, colocated, with adapters, up to some step."""

import re

from lib.whole_runs import (
    AGENTS,
    LORA,
    SYNCHRONOUS,
    assert_audited,
    assert_same_run,
    batch_hashes,
    finish,
    metrics,
    records,
    rescore,
    succeed,
    transformers_policy,
)

STREAMING = """
import asyncio

import openai


async def run(task):
    async with openai.AsyncOpenAI(max_retries=0) as client:

        async def answer(text, seed=None):
            asked = {"max_tokens": 6, "stop": ["8", "\\n"], "stream": True}
            asked["messages"] = [{"role": "user", "content": text}]
            if seed is not None:  # equal requests at the same time: which is which?
                asked["seed"] = seed
            pieces = [
                event.choices[0].delta.content or ""
                async for event in await client.chat.completions.create(model="m", **asked)
            ]
            return "".join(pieces)

        text = task["prompt_text"]
        first = await asyncio.gather(*(answer(text, seed) for seed in range(3)))
        last = await answer(text + first[0] + SAID)
        return float(len(last) % 2)


SAID = "And? "
"""


def test_sessions_that_stream_and_a_curriculum_are_replayed_to_the_same_bits(tune, tmp_path):
    """And an agent that differs ends the replay with the sample and the call at which it does."""
    agent = tmp_path / "my_agent.py"
    agent.write_text(STREAMING)
    knobs = (
        *("num_steps=4", "groups_per_step=2", "group_size=3", "eval_dataset.num_rows=2"),
        *("pull_every_m_rollouts=1", "generator.max_response_tokens=48", "dataset.num_rows=64"),
        *("curriculum.low=0.2", "eval_every_n_steps=4", "rollouts_logged_per_step=2", *AGENTS),
    )
    _, original = succeed(tune, *knobs)
    assert_audited(original)
    _, replay = succeed(tune, *knobs, f"replay_events={original}")
    assert_same_run(original, replay, num_steps=4)
    drawn, again = (
        [e["groups"] for e in records(folder / "receipts.jsonl") if e["event"] == "sample"]
        for folder in (original, replay)
    )
    assert drawn == again
    assert all("curriculum/in_band" in record for record in metrics(replay)[1:])
    agent.write_text(STREAMING.replace("And? ", "And! "))
    process, _ = tune(*knobs, f"replay_events={original}")
    code, output = finish(process)
    assert code == 1, output
    differs = r"sample \d: the agent differs at call 4: the recorded run had no "
    assert re.search(differs, output), output  # whichever sample comes first


def test_a_run_with_adapters_whose_generator_was_killed_is_scored_again_by_its_checkpoints(
    lora_run, tune, tiny_policy
):
    kept = (f"replay_events={lora_run.folder}", "save_every_n_steps=1", "keep_last_n=null")
    output, replay = succeed(tune, *LORA, *transformers_policy(tiny_policy), *kept)
    assert "events in the recorded order" in output
    code, table = rescore(replay)
    assert code == 0, table
    assert_same_run(lora_run.folder, replay, num_steps=4)


def test_a_colocated_run_is_its_replay(tune, colocated_run):
    again = ("colocate=true", f"replay_events={colocated_run.folder}")
    output, replay = succeed(tune, *SYNCHRONOUS, *again)
    assert "events in the recorded order" in output
    assert_same_run(colocated_run.folder, replay, 4)
    assert_audited(replay)


ALONE = (
    *("num_steps=4", "groups_per_step=2", "group_size=4", "eval_dataset.num_rows=2"),
    *("max_staleness=0", "pull_every_m_rollouts=1", "eval_every_n_steps=9"),
)


def checksums(folder):
    """Policy version -> checksum of its weights, as generators loaded them."""
    pulls = [e for e in records(folder / "receipts.jsonl") if e["event"] == "load"]
    return {pull["version"]: pull["checksum"] for pull in pulls}


def test_another_learning_rate_from_a_step_on_differs_first_in_that_step(tune):
    _, original = succeed(tune, *ALONE)
    output, folder = succeed(tune, *ALONE, f"replay_events={original}", "replay_until=2")
    assert "steps 1 to 2 repeated" in output
    assert [*batch_hashes(folder)] == [1, 2]
    resume = (f"output_dir={folder}", "resume_from_checkpoint=true", "optimizer.lr=0.01")
    succeed(tune, *ALONE, *resume)
    hashes = batch_hashes(original), batch_hashes(folder)
    assert [hashes[1][step] for step in (1, 2, 3)] == [hashes[0][step] for step in (1, 2, 3)]
    assert hashes[1][4] != hashes[0][4]
    sums = checksums(original), checksums(folder)
    equal = {version for version in sums[0] if sums[0][version] == sums[1].get(version)}
    assert equal == {version for version in sums[0] if version <= 2} < sums[0].keys()
    assert_audited(folder)
