"""A dry run says what would run: roles, model, data, steps and folder; and it writes nothing."""

from types import SimpleNamespace

import pytest
from lib.checkpoints import write_checkpoint
from lib.trajectories import trajectory

from grpo_components.objective.losses import GRPOLoss
from grpo_components.offline.partial_runs import RecordedPrompts
from grpo_components.offline.trajectory_file import group_line
from grpo_components.records.run_folder import new_identity, prepare_output_folder
from grpo_tools.memory_plan.dry_run import plan


class Prompts(list):
    max_prompt_length = 41
    note = "dataset rows.jsonl: 1000 prompts of 1002 rows; 2 filtered out"


class HeldOut(list):
    max_prompt_length = 7


@pytest.fixture
def planned(settings_with, tmp_path):
    """The sections of a plan: its heading -> its lines."""
    part = GRPOLoss()

    def planned(*, needs_reference=False, dataset=None, **changes):
        changes = {"output_dir": str(tmp_path / "run"), **changes}
        cfg = settings_with(eval_dataset__source="held_out.jsonl", **changes)
        parts = dict.fromkeys(("loss", "aggregation", "off_policy"), part)
        trained = SimpleNamespace(**parts, ptx=None, needs_reference=needs_reference)
        objective = SimpleNamespace(trained=trained, advantages=part, doubts=(), reward_scores=())
        data = Prompts(range(1000)) if dataset is None else dataset
        before = sorted(tmp_path.rglob("*"))
        sections = {}
        text, problems = plan(cfg, data, HeldOut([{}]), objective)
        assert not problems
        for line in text.splitlines():
            if heading := line[:11].strip():
                sections[heading] = []
            sections[next(reversed(sections))].append(line[11:])
        assert sorted(tmp_path.rglob("*")) == before, "nothing was written"
        return sections

    return planned


def test_a_whole_run(planned, tmp_path):
    found = planned(num_generators=2, num_trainers=3, needs_reference=True, num_steps=250)
    roles = "\n".join(found["roles"])
    for role in ("2 generators", "3 trainers", "1 reference ", "replay_buffer", "parameter_server"):
        assert role in roles
    assert "reward_model" not in roles
    assert "2,000,896 parameters" in found["model"][0]
    assert "1,000 prompts" in found["data"][0] and "41 tokens" in found["data"][0]
    assert "1 held-out" in found["data"][1] and found["data"][2:] == [Prompts.note]
    assert found["steps"][0].startswith("250 of 8 prompts x 8 responses")
    assert "2,000 prompts, 2.00 passes" in found["steps"][1]
    assert found["output"] == [str(tmp_path / "run"), "a new folder"]


TURNS = {"colocate": True, "max_staleness": 0, "pull_every_m_rollouts": 1}
WORKERS = {"generator__tensor_parallel_size": 4}


@pytest.mark.parametrize(
    ("changes", "role"),
    [
        (TURNS, "in turns with the"),
        (WORKERS, "1 generator (Generator), each on 4 processes"),
        (WORKERS | {"device": "cuda"}, "each on 4 GPUs"),
    ],
)
def test_the_place_of_generators_is_said(planned, changes, role):
    found = planned(**changes, ray__address="10.0.0.1:6379")
    assert role in found["roles"][0] and not any("reference" in line for line in found["roles"])
    cluster = "the Ray cluster at ray.address: 10.0.0.1:6379, which was not asked"
    assert found["machine"] == [cluster]


@pytest.mark.parametrize(
    ("changes", "kind", "present", "absent"),
    [
        ({"rollout_only": True}, "rollouts only", "TrajectoryWriter", "held-out"),
        ({"eval_only": True}, "evaluation only", "TrajectoryWriter", "1,000 prompts"),
        ({"max_staleness": 0}, "synchronous", "Trainer", "TrajectoryWriter"),
        ({"num_generators": 3}, "asynchronous", "3 generators", "TrajectoryWriter"),
    ],
)
def test_a_partial_run_has_other_roles(planned, changes, kind, present, absent):
    found = planned(**changes)
    text = "\n".join(line for lines in found.values() for line in lines)
    assert kind in found["kind"][0] and present in text and absent not in text
    if "eval_only" in changes or "rollout_only" in changes:
        assert found["objective"] == ["none: nothing is trained"]


def test_training_from_a_file_needs_no_rewards_and_evaluates_nothing(planned, tmp_path):
    path = tmp_path / "trajectories.jsonl"
    path.write_text(group_line([trajectory([0, 1], reward=1.0)] * 8) + "\n")
    found = planned(train_from=str(path), dataset=RecordedPrompts(str(path)))
    assert "RecordedGroups" in found["roles"][0] and "reward process" not in found["roles"][0]
    assert found["rewards"] == ["as recorded"] and len(found["data"]) == 1
    assert str(path) in found["kind"][0] and not any("evaluated" in s for s in found["steps"])


def test_an_earlier_run_in_the_folder_would_be_moved_aside(planned, settings_with, tmp_path):
    run = tmp_path / "run"
    lock, _ = prepare_output_folder(run, settings_with(output_dir=str(run)), new_identity())
    lock.close()
    (run / "receipts.jsonl").write_text('{"event": "start", "attempt": 0}\n')
    (tmp_path / "run-1").mkdir()
    assert str(tmp_path / "run-2") in planned()["output"][1]


def test_a_resume_goes_on_in_its_folder(planned, tmp_path):
    run = tmp_path / "run"
    write_checkpoint(run / "checkpoints" / "step_7", {"ledger": {"steps_done": 7}})
    (run / "checkpoints" / "latest").symlink_to("step_7")
    (run / "receipts.jsonl").write_text('{"event": "start", "attempt": 0}\n')
    found = planned(resume_from_checkpoint=True)
    assert found["output"] == [str(run), "goes on after step 7, as attempt 1"]
    assert "step_7" in found["model"][1]
