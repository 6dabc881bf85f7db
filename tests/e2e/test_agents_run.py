"""Agents with the OpenAI client are trained by the real `tune`, while weights change under them."""

from lib.chaos import Fault, forked_recipe
from lib.whole_runs import AGENTS, assert_audited, metrics, receipts, records, succeed

AGENT = """
import subprocess
import time
from pathlib import Path

import openai

BEGUN = Path(__file__).with_name("begun")
client_options = {"max_retries": 0}


def run(task):
    subprocess.Popen(["sleep", "1000"], start_new_session=True)  # left behind
    create = openai.OpenAI(**client_options).chat.completions.create

    def ask(text, **options):
        messages = [{"role": "user", "content": text}]
        return create(model="m", messages=messages, **options).choices[0].message.content

    text, number = task["prompt_text"], task["prompt_index"]
    empty, turns = 0, 25 if number in (6, 7) else 1
    for turn in range(turns):
        answer = ask(text, max_tokens=4, stop=["\\n"])
        empty += turn + 1 < turns and not answer
        text += answer + "And? "
        time.sleep(0.1 * (number in (6, 7)))  # else a long session may fit between two pulls
        if number == 6:
            BEGUN.touch()
    while number in (4, 5) and not BEGUN.exists():  # else their step may come before session 6
        time.sleep(0.01)
    ask(text.replace("?", "!"), max_tokens=2)  # history rewritten
    if number % 4 == 1 and task["seed"] % 2:
        raise RuntimeError("an odd seed")
    return {"reward": len(answer) % 3 == 0, "length": len(text), "empty": empty}
"""


def test_sessions_are_trained_once_while_weights_change_and_a_generator_is_killed(tune, tmp_path):
    """Groups 6 and 7 have long sessions, during which later groups pull new weights."""
    (tmp_path / "my_agent.py").write_text(AGENT)
    fault = Fault("generator_*", "generate_group", after_step=4, awaited=True)
    recipe, environment = forked_recipe(tmp_path, [fault])
    _, output_dir = succeed(
        tune,
        *("num_steps=6", "groups_per_step=2", "group_size=2", "eval_dataset.num_rows=2"),
        *("rollouts_in_flight=3", "pull_every_m_rollouts=1", "shuffle=false"),
        *("generator.max_response_tokens=300", "generator.max_model_len=380"),
        *("stale_groups=wait", "rollouts_logged_per_step=2", "eval_every_n_steps=6"),
        *(*AGENTS, "rewards.empty._component_=grpo_components.agents.rewards.AgentReward"),
        *("rewards.empty.name=empty", "rewards.empty.weight=0", "rewards.empty.max_reward=25"),
        recipe=recipe,
        env=environment,
    )
    assert_audited(output_dir)
    groups = records(output_dir / "logs" / "rollouts.jsonl")
    responses = [response for group in groups for response in group["responses"]]
    ended = [r for r in responses if r["error"] is None]
    assert len(responses) == 6 * 2 * 2
    # One until the history is rewritten, and one after it; nothing continues an empty answer.
    assert all(r["session"]["trajectories"] == 2 + r["reward_terms"]["empty"] for r in ended)
    swapped = [record["token_versions"] for record in receipts(output_dir)]
    assert any(len(versions) > 1 for versions in swapped)
    failed = [r["error"] for r in responses if r["error"] is not None]
    assert all("an odd seed" in error for error in failed)
    # What a stop cut off was sampled and not trained; all else was trained, once.
    for record, logged in zip(receipts(output_dir), metrics(output_dir)[1:], strict=True):
        trained = sum(record["token_versions"].values())
        sampled = logged["rollout/response_tokens_mean"] * 4
        assert 0 < trained <= sampled + 1e-6
    for record in receipts(output_dir):
        assert record["sessions"]["count"] == 4
        assert record["sessions"]["trajectories"] > 4  # some forked
        assert record["trained_from"] - min(map(int, record["token_versions"])) <= 2
