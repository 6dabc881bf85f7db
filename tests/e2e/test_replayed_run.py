"""A finished run of every kind of role is replayed to the same bits, by the real `tune`."""

import random
import re
from pathlib import Path

import pytest
import torch
from lib.chaos import Fault, forked_recipe
from lib.classifier import random_classifier
from lib.judge_server import judge_server
from lib.whole_runs import assert_same_run, audit, metrics, records, rescore, succeed
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # a busy machine may take long

BASE = Path("/tmp/torchtune-async-grpo/tiny_policy")
TALKATIVE = """
from grpo_components.rollout.multi_turn import Reply


class Talkative:
    def __call__(self, prompt, seed):
        left = 20 if prompt["prompt_index"] in (6, 7) else 0

        def respond(text):
            nonlocal left
            left -= 1
            return Reply("And? ", done=left < 0, rewards={"odd": len(text) % 2})

        return respond
"""


@pytest.fixture
def judge():
    """A judge whose grades are random, so that a replay that asks it differs."""
    with judge_server() as judge:
        judge.default = lambda _: f"Score: {random.random():.3f}"
        yield judge


def test_a_finished_run_is_replayed_to_the_same_bits(tune, tmp_path, judge):
    """With new weights within responses; later a generator and the buffer are killed.

    The original pushes deltas, which the new generator gets from the last whole push on; the replay
    pushes whole, its weights come over gloo, and it compares every checksum. It keeps its policy
    versions, by which all its tokens are scored again.

    Groups 6 and 7 start after the first step and have 21 turns, all others have one. Steps 2 and 3
    have their groups in the buffer already. The rollouts that start after them are on the same
    generators, and pull. Step 4 must train groups 6 and 7, before they are too old; only then is
    the generator killed that gets the next group, so that no long response begins again.

    Reference and teacher have the base model's weights, one in torchtune's decoder and one in that
    of transformers: they measure the same KL.
    """
    (tmp_path / "my_worlds.py").write_text(TALKATIVE)
    faults = [
        Fault("generator_*", "generate_group", after_step=4, awaited=True),
        Fault("replay_buffer", "add", 9, awaited=True),
    ]
    recipe, environment = forked_recipe(tmp_path, faults)
    knobs = (
        *("num_steps=8", "groups_per_step=2", "group_size=2", "eval_dataset.num_rows=2"),
        *("num_generators=2", "rollouts_in_flight=3", "pull_every_m_rollouts=1", "shuffle=false"),
        *("generator.max_response_tokens=400", "generator.temperature=2", "eval_every_n_steps=5"),
        *("stale_groups=wait", "loss.kl_coeff=0.01", "reward_model.weight=0.5"),
        f"reward_model.path={random_classifier(tmp_path / 'classifier')}",
        "environment._component_=grpo_components.rollout.multi_turn.MultiTurnEnvironment",
        "environment.max_turns=21",
        "environment.world._component_=my_worlds.Talkative",
        *("rollouts_logged_per_step=2", f"teacher.path={BASE}", "teacher.coeff=0.05"),
        "rewards.judge._component_=grpo_components.rewards.judge.LLMJudge",
        *("rewards.judge.weight=0.1", "rewards.judge.model=random", "rewards.judge.wall_s=50"),
        *(f"rewards.judge.base_url={judge.url}", "timeouts.reward_s=60"),
        *("rewards.judge.rubric='{{ prompt }} {{ response }}'", "rewards.judge.request_s=50"),
        "rewards.judge.prices.completion=1000000",
    )
    output, original = succeed(tune, *knobs, "push=delta", recipe=recipe, env=environment)
    back = re.findall(r"^(\w+) is back", output, re.MULTILINE)
    assert len(back) == 2 and back[0] == "replay_buffer", output
    code, table = audit(original)
    assert code == 0, table
    asked = len(judge.requests)
    kept = ("weights=gloo", "keep_policy_versions=true")
    again = (f"replay_events={original}", "replay_until=4")  # a what-if that changes nothing
    output, replay = succeed(tune, *knobs, *kept, *again)
    assert len(judge.requests) == asked > 0, "a replay asks no judge"
    assert "events in the recorded order" in output
    assert "what-if: no key differs" in output
    assert re.findall(r"^(\w+) is back", output, re.MULTILINE) == back[1:], output
    code, table = rescore(replay)
    assert code == 0, table
    over_swaps = re.search(r"(\d+) responses over a swap", table)
    assert over_swaps and int(over_swaps[1]) > 0, table
    groups = records(original / "logs" / "rollouts.jsonl")
    responses = [response for group in groups for response in group["responses"]]
    assert any(oldest < newest for oldest, newest in (r["versions"] for r in responses))
    assert all({"reward_model", "judge"} < r["reward_terms"].keys() for r in responses)
    steps = metrics(original)[1:]
    # What was used by a process that was killed is not counted, nor before the run starts.
    costs = [record.get("reward_use/judge_cost", 0.0) for record in steps]
    assert 0 < sum(costs) <= 2 * asked
    whole = max(record["push/bytes"] for record in steps)
    assert 0 < min(record["push/bytes"] for record in steps[1:]) < 0.9 * whole
    assert max(record["staleness/max"] for record in steps) > 0
    assert max(record["loss/kl_reference"] for record in steps) > 0
    for record in steps:
        assert record["teacher/kl_k3"] == pytest.approx(record["loss/kl_reference"], abs=1e-6)
    after = assert_same_run(original, replay, num_steps=8)
    base = load_file(BASE / "model.safetensors")
    assert any(not torch.equal(base[name], after[name]) for name in base), "nothing was trained"
