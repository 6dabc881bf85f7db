"""A run of agents that stream is replayed to the same bits."""

import re

import pytest
from lib.whole_runs import (
    AGENTS,
    assert_audited,
    assert_same_run,
    finish,
    metrics,
    records,
    succeed,
)

pytestmark = pytest.mark.timeout(1800)

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
