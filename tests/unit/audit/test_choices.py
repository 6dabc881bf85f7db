"""The audit repeats the draws of a curriculum and the choice of reused groups; wrong ones fail."""

import pytest
from lib.receipts import attempts, of


@pytest.fixture
def records(tmp_path, write_run):
    return write_run(tmp_path / "receipts.jsonl", draws=True)


@pytest.fixture
def reused(tmp_path, write_run):
    """Two groups a step; from the second step on, one of the two may be reused once."""
    return write_run(tmp_path / "receipts.jsonl", reuse=True)


def test_the_draws_of_a_valid_run_are_repeated(records, audit):
    assert audit(records).code == 0
    issued = [(event["prompt"], event["epoch"]) for event in of(records, "issue")]
    assert len(issued) > len({row for row, _ in issued}) and issued != sorted(issued)


def forge_a_draw(records):
    event = of(records, "issue")[-2]
    event["prompt"], event["epoch"] = next(row for row in (3, 4) if row != event["prompt"]), 50


def forge_a_result(records):
    for event in of(records, "finish")[:4]:
        event["successes"] = 0 if event["successes"] else 2


def forge_the_seed(records):
    records[0]["seed"] += 1


def forge_the_rule(records):
    records[0]["curriculum"]["decay"] = 0.1


def leave_a_row_out(records):
    records[0]["prompts"][0]["rows"] = [[3, 5]]


def give_an_impossible_result(records):
    of(records, "finish")[-1]["scored"] = 3


def leave_a_result_out(records):
    for name in ("successes", "scored"):
        del of(records, "finish")[-1][name]


def deny_the_curriculum(records):
    for name in ("seed", "curriculum", "prompts"):
        del records[0][name]


@pytest.mark.parametrize(
    "forge",
    [
        forge_a_draw,
        forge_a_result,
        forge_the_seed,
        forge_the_rule,
        leave_a_row_out,
        give_an_impossible_result,
        leave_a_result_out,
        deny_the_curriculum,
    ],
)
def test_a_forged_draw_is_found(records, audit, forge):
    forge(records)
    assert [*audit(records).broken] == ["curriculum"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("curriculum", {"low": 0.9, "high": 0.1, "floor": 0.5, "decay": 0.9}),
        ("prompts", [{"weight": 1.0, "rows": []}]),
        ("prompts", [{"weight": 0.0, "rows": [[3, 9]]}]),
    ],
)
def test_an_impossible_curriculum_is_a_violation(records, audit, name, value):
    records[0][name] = value
    assert [*audit(records).broken] == ["curriculum"]


def test_a_config_with_another_rule_or_seed_is_found(records, audit, tmp_path):
    config = tmp_path / "config.yaml"
    whole = config.read_text()
    for old, new in (("floor: 0.1", "floor: 0.2"), ("seed: 7", "seed: 8"), ("decay: 0.9", "a: b")):
        config.write_text(whole.replace(old, new))
        assert [*audit(records, folder=".").broken] == ["config"]


def test_a_resume_continues_the_draws_from_its_checkpoint(records, audit):
    resumed = attempts(records, kill_after=5, resume_after=3)
    assert "curriculum" not in audit(resumed).broken
    of(resumed, "start", attempt=1)[0]["seed"] += 1
    assert "curriculum" in audit(resumed).broken


def batch(records, number):
    return of(records, "sample", step=number)[0]


def reuses(records):
    return {
        each["step"]: [(e["group"], e["use"]) for e in each["reused"]]
        for each in of(records, "sample")
    }


def test_a_valid_run_says_each_reuse_and_passes(reused, audit):
    """Step 3 is skipped: what it reused is not reused again, and what it trained never is."""
    found = reuses(reused)
    assert [len(each) for each in found.values()] == [0, 1, 1, 1, 1, 1]
    assert {use for each in found.values() for _, use in each} == {2}
    assert audit(reused).code == 0


def again(records, number, group, use, replaces=True):
    """Let a step reuse another group."""
    found = batch(records, number)
    kept = [] if replaces else found["reused"]
    found["reused"] = [*kept, {"group": group, "use": use}]


def first_reused(records):
    return reuses(records)[2][0][0]


def use_a_group_too_often(r):
    again(r, 3, first_reused(r), 3)
    return "more than max_uses 2"


def reuse_a_group_that_is_too_old(r):
    left = batch(r, 1)["groups"][0] + 1
    again(r, 6, left, 2)
    return "4 versions old, more than 2"


def reuse_a_group_of_the_skipped_step(r):
    again(r, 5, batch(r, 3)["groups"][0], 2)
    return "but the priority chooses"


def do_not_record_a_reuse(r):
    batch(r, 2)["reused"] = []
    return "reuses the groups []"


def count_a_use_wrongly(r):
    again(r, 2, first_reused(r), 1)
    return "use 1 of group"


def reuse_a_group_twice_in_a_step(r):
    again(r, 2, first_reused(r), 3, replaces=False)
    return "twice in a step"


def reuse_what_was_never_trained(r):
    again(r, 2, 99, 2)
    return "reused before it is trained"


def reuse_the_worse_group(r):
    found = batch(r, 1)
    found["worths"][found["groups"].index(first_reused(r))]["spread"] /= 4
    return "but the priority chooses"


def make_a_group_younger_than_its_tokens(r):
    for worth in batch(r, 5)["worths"]:
        worth["oldest_version"] += 1
    return ""


def deny_the_rule(r):
    del r[0]["replay_generation"]
    return "is trained with its spread"


def state_a_rule_that_reuses_nothing(r):
    r[0]["replay_generation"]["share"] = 0.1
    return "can reuse nothing"


def state_a_rule_of_more_uses(r):
    r[0]["replay_generation"]["max_uses"] = 3
    return "but the priority chooses"


@pytest.mark.parametrize(
    "plant",
    [
        use_a_group_too_often,
        reuse_a_group_that_is_too_old,
        reuse_a_group_of_the_skipped_step,
        do_not_record_a_reuse,
        count_a_use_wrongly,
        reuse_a_group_twice_in_a_step,
        reuse_what_was_never_trained,
        reuse_the_worse_group,
        make_a_group_younger_than_its_tokens,
        deny_the_rule,
        state_a_rule_that_reuses_nothing,
        state_a_rule_of_more_uses,
    ],
)
def test_a_wrong_reuse_is_found(reused, audit, plant):
    text = plant(reused)
    broken = audit(reused).broken
    assert text in broken["reused"], broken


def test_a_config_with_another_rule_of_reuse_is_found(reused, audit, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text().replace("max_uses: 2", "max_uses: 3"))
    assert [*audit(reused, folder=".").broken] == ["config"]
