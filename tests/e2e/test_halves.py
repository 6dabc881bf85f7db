"""Generators alone, trainers alone on what those left, and an evaluation of the checkpoint."""

from lib.whole_runs import assert_audited, metrics, records, succeed


def test_each_half_runs_alone_and_what_they_make_is_evaluated(tune):
    small = ("num_steps=2", "groups_per_step=2", "group_size=4", "eval_dataset.num_rows=4")
    _, rollouts = succeed(tune, *small, "rollout_only=true")
    assert len(records(rollouts / "trajectories.jsonl")) == 4
    assert not (rollouts / "checkpoints").exists()
    recorded = f"train_from={rollouts / 'trajectories.jsonl'}"
    alone = (recorded, "shuffle=false", "max_staleness=1", "push=delta")
    _, trained = succeed(tune, *small, *alone)
    rewards = [sum(r["rollout/reward_mean"] for r in metrics(run)) for run in (rollouts, trained)]
    assert rewards[0] == rewards[1], "the same groups, whatever batch each came into"
    assert [record["policy_version"] for record in metrics(trained)] == [1, 2]
    for output_dir in (rollouts, trained):
        assert_audited(output_dir)
    own = (f"eval_only={trained / 'checkpoints/latest'}", "eval.samples_per_prompt=2")
    output, evaluated = succeed(tune, *small, *own)
    (record,) = metrics(evaluated)
    assert (record["eval/policy_version"], record["eval/prompts"]) == (2, 4)
    assert record["eval/success_rate"] <= record["eval/pass_at_2"]
    assert "95 % confidence" in output
    answers = records(evaluated / "logs" / "evaluation_answers.jsonl")
    assert [(line["policy_version"], len(line["responses"])) for line in answers] == [(2, 2)] * 4
    assert (evaluated / "report.html").exists()
