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


IMPOSSIBLE = {"low": 0.9, "high": 0.1, "floor": 0.5, "decay": 0.9}
FORGED = {
    "a draw": lambda r: of(r, "issue")[-2].update(epoch=50),
    "some results": lambda r: [
        each.update(successes=0 if each["successes"] else 2) for each in of(r, "finish")[:4]
    ],
    "an impossible result": lambda r: of(r, "finish")[-1].update(scored=3),
    "no result": lambda r: [of(r, "finish")[-1].pop(name) for name in ("successes", "scored")],
    "another seed": lambda r: r[0].update(seed=8),
    "another rule": lambda r: r[0]["curriculum"].update(decay=0.1),
    "an impossible rule": lambda r: r[0].update(curriculum=IMPOSSIBLE),
    "no curriculum": lambda r: [r[0].pop(name) for name in ("seed", "curriculum", "prompts")],
    "a row left out": lambda r: r[0]["prompts"][0].update(rows=[[3, 5]]),
    "no rows": lambda r: r[0].update(prompts=[{"weight": 1.0, "rows": []}]),
    "no weight": lambda r: r[0].update(prompts=[{"weight": 0.0, "rows": [[3, 9]]}]),
    "a row twice": lambda r: r[0]["prompts"][0].update(rows=[[3, 5], [5, 9]]),
    "rows that go back": lambda r: r[0]["prompts"][0].update(rows=[[3, 5], [9, 8]]),
    "endless rows": lambda r: r[0]["prompts"][0].update(rows=[[0, 10**400]]),
    "an endless row": lambda r: r[0]["prompts"][0].update(rows=[[10**400, 10**400]]),
    "no seed": lambda r: r[0].pop("seed"),
    "an empty rule": lambda r: r[0].update(curriculum=None),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_a_forged_draw_is_found(records, audit, forge):
    forge(records)
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


def again(records, number, group, use, *besides):
    batch(records, number)["reused"] = [*besides, {"group": group, "use": use}]


def first(records):
    return reuses(records)[2][0][0]


def reuse_the_worse_group(r):
    found = batch(r, 1)
    found["worths"][found["groups"].index(first(r))]["spread"] /= 4


def make_a_group_younger_than_its_tokens(r):
    for worth in batch(r, 5)["worths"]:
        worth["oldest_version"] += 1


OTHER = "but the priority chooses"
WRONG = {
    "too often": (lambda r: again(r, 3, first(r), 3), OTHER),
    "too old": (lambda r: again(r, 6, batch(r, 1)["groups"][0] + 1, 2), OTHER),
    "of the skipped step": (lambda r: again(r, 5, batch(r, 3)["groups"][0], 2), OTHER),
    "not recorded": (lambda r: batch(r, 2).update(reused=[]), "reuses []"),
    "counted wrongly": (lambda r: again(r, 2, first(r), 1), OTHER),
    "twice in a step": (lambda r: again(r, 2, first(r), 3, *batch(r, 2)["reused"]), OTHER),
    "never trained": (lambda r: again(r, 2, 99, 2), OTHER),
    "the worse one": (reuse_the_worse_group, OTHER),
    "younger than its tokens": (make_a_group_younger_than_its_tokens, ""),
    "no rule": (lambda r: r[0].pop("replay_generation"), "2 of 2 groups are trained with spread"),
    "a rule without reuse": (
        lambda r: r[0]["replay_generation"].update(share=0.1),
        "can reuse nothing",
    ),
    "a rule of more uses": (lambda r: r[0]["replay_generation"].update(max_uses=3), OTHER),
}


@pytest.mark.parametrize(("plant", "text"), WRONG.values(), ids=WRONG)
def test_a_wrong_reuse_is_found(reused, audit, plant, text):
    plant(reused)
    broken = audit(reused).broken
    assert text in broken["reused"], broken


ABSURD = {
    "spread": lambda r, huge: batch(r, 1)["worths"][0].update(spread=huge),
    "oldest_version": lambda r, huge: batch(r, 1)["worths"][0].update(oldest_version=huge),
    "share": lambda r, huge: r[0]["replay_generation"].update(share=huge),
    "max_uses": lambda r, huge: r[0]["replay_generation"].update(max_uses=huge),
    "groups_per_step": lambda r, huge: r[0].update(groups_per_step=huge),
    "trained_from": lambda r, huge: of(r, "step")[1].update(trained_from=huge),
}


@pytest.mark.parametrize("plant", ABSURD.values(), ids=ABSURD)
def test_an_absurd_value_is_a_finding_and_no_error(reused, audit, plant):
    plant(reused, 10**400)
    result = audit(reused)
    assert result.code == 1 and result.broken
