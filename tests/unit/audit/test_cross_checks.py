"""The receipts are compared with the run's config, metrics and events, attempt by attempt."""

import json

import pytest

from grpo_tools.audit.__main__ import audit, main
from grpo_tools.audit.settings import correction_bounds, read_settings

CONFIG = "max_staleness: 2\ngroups_per_step: 2\ngroup_size: 2\nnum_steps: 6\n"


@pytest.fixture
def run(tmp_path, write_run, write_receipts):
    """A folder, its records, and a function that writes them with a valid chain and audits them."""
    records = write_run(tmp_path / "receipts.jsonl")

    def broken():
        write_receipts(tmp_path, records)
        return audit(tmp_path / "receipts.jsonl")[0].broken

    assert not broken()
    return tmp_path, records, broken


@pytest.mark.parametrize("key", ["max_staleness", "groups_per_step", "group_size", "num_steps"])
def test_each_setting_of_the_start_record_must_be_that_of_the_config(run, key):
    _, records, broken = run
    records[0][key] += 1
    found = broken()
    assert f"{key} is {records[0][key]}, but {records[0][key] - 1}" in found["config"]
    assert "receipts.jsonl line 1" in found["config"]


@pytest.mark.parametrize(
    ("config", "holds"),
    [
        (f"{CONFIG}eval_only: false\nmodel: {{a: 1}}\n", True),
        (CONFIG.replace("6", "7"), False),
        (CONFIG.replace("6", "7") + "eval_only: true\n", False),
        (CONFIG + "max_staleness: 9\n", False),
        ("- 1\n", False),
        ("a: [" * 9999, False),
        ("a: \x1b]0;title\x07", False),
        (CONFIG + "a: !!python/object/apply:os.system [exit]\n", True),
        (CONFIG + f"a: {'9' * 5000}\n", True),
        ("x" * 2**21, False),
        (None, True),
    ],
)
def test_a_config_is_read_as_text_and_an_unreadable_one_is_a_violation(run, config, holds):
    folder, _, broken = run
    (folder / "config.yaml").unlink()
    if config is not None:
        (folder / "config.yaml").write_text(config)
    assert ("config" not in broken()) == holds


def test_a_run_with_eval_only_has_no_steps_whatever_num_steps_is(run):
    folder, records, broken = run
    (folder / "config.yaml").write_text(f"{CONFIG}eval_only: /a/model\n")
    (folder / "logs/metrics.jsonl").unlink()
    records[0]["num_steps"] = 0
    records[1:] = []
    assert "config" not in broken()


def test_each_attempt_is_compared_with_the_config_of_its_process(run):
    """Attempt 1 is a rollback in the first process; attempt 2 was resumed with other settings."""
    folder, records, broken = run
    starts = [dict(records[0], attempt=attempt) for attempt in range(3)]
    records[:] = starts
    (folder / "logs/metrics.jsonl").unlink()
    (folder / "config_attempt_1.yaml").write_text(CONFIG)
    (folder / "config.yaml").write_text(
        CONFIG.replace("max_staleness: 2", "max_staleness: 3") + "resume_from_checkpoint: true\n"
    )
    assert "max_staleness is 2" in broken()["config"]
    starts[2]["max_staleness"] = 3
    assert "config" not in broken()
    starts[1]["max_staleness"] = 3
    assert "line 2" in broken()["config"]
    (folder / "config_attempt_1.yaml").unlink()
    assert "config" not in broken(), (
        "without the earlier config only the last attempt can be compared"
    )
    starts[2]["group_size"] = 3
    assert "line 3" in broken()["config"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policy_version", 7),
        ("rollout/trained_tokens", 15),
        ("rollout/trained_tokens", "14"),
        ("staleness/max", 1),
        ("staleness/mean", None),
        ("off_policy/correction_mass", 99),
    ],
)
def test_each_number_must_be_that_of_the_metrics(run, key, value):
    folder, _, broken = run
    path = folder / "logs" / "metrics.jsonl"
    metrics = [json.loads(line) for line in path.open()]
    metrics[4][key] = value
    path.write_text("".join(json.dumps(line) + "\n" for line in metrics))
    found = broken()
    assert list(found) == ["metrics"]
    assert key in found["metrics"] and "(attempt 0, step 5)" in found["metrics"]


def test_only_the_last_step_may_be_missing_from_the_metrics(run):
    folder, records, broken = run
    path = folder / "logs" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    assert not broken(), "killed between the two writes"
    path.write_text("".join(lines[:2] + lines[3:]))
    assert list(broken()) == ["metrics"]
    path.write_text("".join(lines))
    del records[6:]
    assert "step 6 of attempt 0" in broken()["metrics"]


def test_a_checksum_forged_in_both_fields_differs_from_the_loaded_one(run):
    _, records, broken = run
    [pull] = records[5]["acknowledged"]
    pull["checksum"] = pull["published"] = "forged"
    records[5]["generators"][pull["generator"]]["checksum"] = "forged"
    found = broken()
    assert list(found) == ["loads"] and "forged" in found["loads"]


def test_a_pull_without_a_load_event_is_detected(run):
    folder, _, broken = run
    path = folder / "logs" / "events.jsonl"
    lines = [line for line in path.read_text().splitlines(keepends=True) if '"load"' in line]
    path.write_text("".join(lines[1:]))
    assert list(broken()) == ["loads"]
    path.write_text(lines[0].replace('"attempt": 0', '"attempt": 7'))
    assert not broken(), "the folder lacks the log of this attempt"


@pytest.mark.parametrize(
    ("component", "settings", "bounds"),
    [
        ("NoCorrection", {}, (1, 1)),
        ("GeometricMask", {"high": "1.01"}, (0, 1)),
        ("TokenTIS", {"cap": "2.0"}, (0, 2)),
        ("SequenceTIS", {"cap": "3"}, (0, 3)),
        ("MaskedIS", {"low": "0.5", "high": "5.0"}, (0, 5)),
        ("TokenTIS", {}, (0, float("inf"))),
        ("TokenTIS", {"cap": "many"}, (0, float("inf"))),
        ("Mine", {"cap": "2.0"}, (0, float("inf"))),
    ],
)
def test_the_correction_mass_is_within_the_bounds_of_its_component(
    run, component, settings, bounds
):
    name = f"grpo_components.objective.off_policy.{component}"
    assert correction_bounds({"_component_": name, **settings}) == bounds
    folder, records, broken = run
    inner = "".join(f", {key}: {value}" for key, value in settings.items())
    (folder / "config.yaml").write_text(f"{CONFIG}off_policy: {{_component_: {name}{inner}}}\n")
    assert not broken()
    records[2]["correction_mass"] = 99.0
    assert ("correction" in broken()) == (bounds[1] < 99)


def test_other_files_may_be_missing_or_damaged(run):
    folder, _, broken = run
    for name in ("config.yaml", "logs/metrics.jsonl", "logs/events.jsonl"):
        (folder / name).unlink()
    assert not broken()
    for name in ("logs/metrics.jsonl", "logs/events.jsonl"):
        (folder / name).write_bytes(
            b'\xff\n[[\n{"load": {}}\n{"step": 1e999}\n' + b"9" * 5000 + b"\n"
            b'{"event": "load", "role": [], "version": {}, "attempt": null}\n'
        )
    assert not broken()
    (folder / "config.yaml").mkdir()
    assert "config" in broken()


def test_settings_are_the_scalars_of_a_saved_config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("a: 2\nb: {c: x, d: [1]}\ne: [1, 2]\nf: null\n")
    assert read_settings(path) == {"a": "2", "b": {"c": "x"}, "f": "null"}


def test_text_from_the_files_is_escaped(run, capsys, write_receipts):
    folder, records, _ = run
    evil = "\x1b]0;owned\x07\u202e\u2028\x9b31m\ud800"
    records[2]["acknowledged"][0]["generator"] = evil
    records[1]["events"].append({"dropped": 99, "reason": evil * 500, "reissue": False})
    records[3]["generators"][evil] = {"version": 5, "checksum": evil}
    write_receipts(folder, records)
    assert main([str(folder)]) == 1
    out = capsys.readouterr().out
    assert out.isascii() and not set(out) & {"\x1b", "\x07"}
    assert max(map(len, out.splitlines())) < 400
