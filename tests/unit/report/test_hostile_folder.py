"""An untrusted folder always gets a page that lists what was skipped; nothing else is written."""

import json
import os
import random
import re
import threading

import pytest

from grpo_tools.report import page, unread
from grpo_tools.report.__main__ import main

VALUES = [
    *(None, True, 0, -1, 2**53, 2**63, 10**400, -(10**400), 1e308, -1e308, 5e-324),
    *("", "x", "\x1b[31m", "\u202e", "\ud800", "<script>", "9" * 5000),
    *([], {}, [[]], {"a": 1}, [{}], [None], {"": {}}, [10**400], {"x": 1e308}),
]
"""`DIGITS` and `DEPTH` are JSON that Python's writer does not produce."""
DIGITS, DEPTH = "9" * 5000, "[" * 500 + "]" * 500


def lines_of_a_run():
    """File -> one record of each kind that the report reads."""
    response = {
        **{"response": "a", "finish_reason": "stop", "response_tokens": 3, "reward": 1.0},
        **{"reward_terms": {"r": 1.0}, "success": True, "error": None, "versions": [0, 1]},
        **{"tokens": ["a", "b"], "generator_logprobs": [-1.0, None], "trainer_logprobs": [-1, -2]},
    }
    turn = {**response, "turns": [{"by": "policy", "text": "a"}]}
    turn.pop("tokens")
    group = {"step": 1, "attempt": 0, "group_id": 0, "prompt_index": 1, "epoch": 0, "prompt": "p"}
    group |= {"answer": "4", "responses": [response, turn], "advantages": [0.5, None]}
    answers = {key: value for key, value in group.items() if key != "advantages"}
    moments = [
        {"event": "start", "cpus": 2, "libraries": {"torch": "2.13.0"}},
        {"event": "issue", "role": "generator_0", "group": 0},
        {"event": "finish", "group": 0},
        {"event": "buffer", "group": 0},
        {"event": "drop", "groups": [0]},
        {"event": "sample", "step": 1},
        {"event": "publish", "version": 1},
        {"event": "load", "role": "generator_0", "version": 1},
        {"event": "step", "step": 1},
        {"event": "restart", "role": "generator_0", "what": "died", "given_up": True},
        {"event": "rollback", "role": "trainer_0", "attempt": 1},
    ]
    step = {"record": "step", "attempt": 0, "step": 1, "token_versions": {"0": 5}}
    step |= {"trained_from": 0, "policy_version": 1, "tokens": {"1": {"trained": 5, "stale": 1}}}
    events = [
        {"issued": 0, "prompt_index": 1, "epoch": 0},
        {"issued": 1, "prompt_index": 1, "epoch": 0},
        {"generated": 1, "response_tokens": 3.0},
        {"dropped": 0, "reason": "stale", "reissue": True, "tokens": None},
        {"trained": 1},
    ]
    metrics = {"rollout/reward_mean": 0.5, "staleness/max": 1, "eval/success_rate": 0.5, "mine": 1}
    metrics |= {"time/wall_clock": 1.0, "restarts": 1, "reward_terms/r_std": 0.5}
    metrics |= {"time/step": 1.0, "throughput/trained_tokens_per_second": 5.0, "ratio/max": 1.5}
    return {
        "receipts.jsonl": [
            {"record": "start", "attempt": 0, "steps_done": 0, "num_steps": 9}
            | {"group_size": 2, "carried": {}},
            {**step, "events": events},
            {"record": "end", "attempt": 0, "step": 1, "finished": True, "events": []}
            | {"living": [{"group_id": 2, "tokens": 3}], "policy_version": 1},
            {"record": "start", "attempt": 1, "steps_done": 1, "num_steps": 9}
            | {"group_size": 2, "carried": {"2": 3}},
        ],
        "logs/metrics.jsonl": [{"step": s, "attempt": 0, **metrics} for s in (1, 2)],
        "logs/rollouts.jsonl": [group],
        "logs/evaluation_answers.jsonl": [answers],
        "logs/events.jsonl": [{**e, "time": 10.0 + i} for i, e in enumerate(moments)],
        "logs/roles.jsonl": [
            {"role": role, "started": 1.0, "attempt": 0, "pid": 1, "node": "host"}
            for role in ("generator_0", "reference_0", "generator_0")
        ],
        "logs/heartbeats.jsonl": [{"role": "generator_0", "time": 2.0, "rss_mib": 100.0}],
        "logs/failures.jsonl": [{"attempt": 0, "error": "died"}],
        "logs/failed_samples.jsonl": [
            {"group_id": 0, "attempt": 0, "prompt_index": 1, "errors": {"E": 2}},
            {"evaluation": 3, "errors": {"E": 2}},
        ],
    }


FILES = [*lines_of_a_run()]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")  # saves 5 MB per page
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    for name, records in lines_of_a_run().items():
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.yaml").write_text("seed: 1\n")
    return folder


def places(value, path=()):
    if path:
        yield path
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from places(item, (*path, key))


def with_value(record, path, value):
    record = json.loads(json.dumps(record))
    parent = record
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = "HOLE" if value in (DIGITS, DEPTH) else value
    line = json.dumps(record)
    return line.replace('"HOLE"', value) if value in (DIGITS, DEPTH) else line


def check(run):
    """Write the page; its data is valid JSON with the types that the script expects."""
    html = page.write_report(run).read_text(encoding="utf-8")
    found = re.findall(r'<script type="application/json" id="[^"]*">(.*?)</script>', html)
    charts, groups, answers, _ = (json.loads(d, parse_constant=pytest.fail) for d in found)
    assert not set(html) & {"\x1b", "\u202e"} and "<script>alert" not in html
    for group in [*groups, *answers]:
        for response in group["responses"]:
            numbers = [response["reward"], response["tokens"], *response["terms"].values()]
            assert all(n is None or isinstance(n, int | float) for n in numbers)
            assert response["versions"] is None or len(response["versions"]) == 2
    assert all(trace["x"] is not None for chart in charts for trace in chart["data"])
    return html


def notes(html):
    found = re.search(r'<pre class="warn">not read:\n(.*?)</pre>', html, re.DOTALL)
    return found[1].splitlines() if found else []


def test_an_undamaged_folder_is_read_completely(run):
    html = check(run)
    assert notes(html) == []
    assert '<th scope="col">books</th>' in html and "<td>masked: older than max_stal" in html


@pytest.mark.parametrize("name", FILES)
def test_every_field_may_be_anything(run, name):
    """One line per field and value, followed by the undamaged lines."""
    records = lines_of_a_run()[name]
    hostile = [
        with_value(record, path, value)
        for record in records
        for path in places(record)
        for value in [*VALUES, DIGITS, DEPTH]
    ]
    undamaged = (run / name).read_text()
    (run / name).write_text("".join(f"{line}\n" for line in hostile) + undamaged)
    [note] = [note for note in notes(check(run)) if note.startswith(f"{name}: ") and "line" in note]
    assert re.search(r"\d lines, first line \d", note)


@pytest.mark.parametrize("name", FILES)
def test_a_single_hostile_value(run, name):
    """A sample of them, each alone, so that no other one hides its effect."""
    records = lines_of_a_run()[name]
    cases = [
        (n, path, value)
        for n, record in enumerate(records)
        for path in places(record)
        for value in [*VALUES, DIGITS, DEPTH]
    ]
    for n, path, value in random.Random(name).sample(cases, min(60, len(cases))):
        lines = [json.dumps(record) for record in records]
        lines[n] = with_value(records[n], path, value)
        (run / name).write_text("".join(f"{line}\n" for line in lines))
        check(run)


HOSTILE_VALUES = {
    "a step of 5,000 digits": ("logs/metrics.jsonl", {"step": DIGITS}),
    "a group's step of 5,000 digits": ("logs/rollouts.jsonl", {"step": DIGITS}),
    "a receipt's step of 5,000 digits": ("receipts.jsonl", {"step": DIGITS}),
    "an issued group that is an object": ("receipts.jsonl", {"events": [{"issued": {}}]}),
    "a dropped group that is an object": ("receipts.jsonl", {"events": [{"dropped": {}}]}),
    "a trained group that is a list": ("receipts.jsonl", {"events": [{"trained": []}]}),
    "a start in the year 10**400": ("logs/roles.jsonl", {"started": 10**400}),
    "a start in the year -1e308": ("logs/roles.jsonl", {"started": -1e308}),
    "a heartbeat after 10**400 seconds": ("logs/heartbeats.jsonl", {"time": 10**400}),
    "an event after 10**400 seconds": ("logs/events.jsonl", {"time": 10**400}),
    "memory of 10**400 MiB": ("logs/heartbeats.jsonl", {"rss_mib": 10**400}),
    "a loss of 10**400": ("logs/metrics.jsonl", {"loss/total": 10**400}),
    "an attempt of 10**400": ("logs/failures.jsonl", {"attempt": 10**400}),
}


@pytest.mark.parametrize("what", HOSTILE_VALUES)
def test_the_page_lists_the_file_with_the_damage(run, what):
    name, changes = HOSTILE_VALUES[what]
    lines = []
    for record in lines_of_a_run()[name]:
        # Keeps the writer's order of fields: the reader looks at the head of a line.
        line = json.dumps({**record, **{key: f"HOLE {key}" for key in changes}})
        for key, value in changes.items():
            written = value if value == DIGITS else json.dumps(value)
            line = line.replace(f'"HOLE {key}"', written)
        lines.append(line)
    (run / name).write_text("".join(f"{line}\n" for line in lines))
    assert any(note.startswith(f"{name}: ") for note in notes(check(run)))


@pytest.mark.parametrize("name", [*FILES, "config.yaml"])
def test_only_regular_files_of_the_folder_are_read(run, tmp_path, name):
    """A link to a private file would put its content into a page that is sent to others."""
    secret = tmp_path / "secret"
    secret.write_text('{"step": 1, "attempt": 0, "secret": "swordfish"}\nsecret: swordfish\n')
    path = run / name
    for put in (
        lambda: path.symlink_to(secret),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(path.name),
        lambda: path.symlink_to("/nowhere"),
        lambda: os.mkfifo(path),
        path.mkdir,
    ):
        path.unlink()
        put()
        html = check(run)
        assert "swordfish" not in html
        assert any(note.startswith(f"{name}: ") for note in notes(html)), put
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
            path.touch()


def test_binary_data_and_endless_lines(run, monkeypatch):
    monkeypatch.setattr(unread, "MAX_LINE_BYTES", 10_000)
    for name in FILES:
        with (run / name).open("ab") as file:
            file.write(b"\xff\xfe\x00\n[[\n" + random.Random(0).randbytes(500) + b"\n{" * 3)
            file.write(b"1" * 20_000)
    found = notes(check(run))
    assert {note.partition(":")[0] for note in found} == set(FILES)
    assert any("longer than" in note for note in found)


def test_unreadable_metrics_still_give_a_page(run):
    (run / "logs/metrics.jsonl").write_text("x\n")
    [note] = notes(check(run))
    assert note.startswith("logs/metrics.jsonl: line 1: ")


def test_many_attempts_roles_keys_and_reasons_stay_small(run):
    """The time is not quadratic, and the number of charts is limited."""
    n = 3000
    start = {"record": "start", "steps_done": 0}
    step = {"record": "step", "step": 1}
    drops = [{"dropped": i, "reason": f"r{i}", "reissue": False} for i in range(n)]
    receipts = [{**start, "attempt": i} for i in range(n)]
    receipts += [{**step, "attempt": i, "events": drops[i : i + 1]} for i in range(n)]
    (run / "receipts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in receipts))
    metrics = [{"step": 1, "attempt": i, f"key {i}": 1.0} for i in range(n)]
    metrics.append({"step": 1, "attempt": n, **{f"key {i}": 1.0 for i in range(n)}})
    (run / "logs/metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    roles = [{"role": f"role {i % 500}", "started": float(i)} for i in range(n)]
    (run / "logs/roles.jsonl").write_text("".join(json.dumps(r) + "\n" for r in roles))
    html = check(run)
    assert html.count('class="plot"') < 400
    assert any("other metrics" in note for note in notes(html))


@pytest.mark.parametrize("what", ["link", "hard link", "pipe", "dangling"])
def test_writing_the_page_replaces_a_link_or_pipe_and_does_not_follow_it(run, tmp_path, what):
    own = tmp_path / "own"
    own.write_text("mine")
    for name in ("report.html", ".report.html.part"):
        path = run / name
        if what == "link":
            path.symlink_to(own)
        elif what == "hard link":
            os.link(own, path)
        elif what == "dangling":
            path.symlink_to(tmp_path / "made")
        else:
            os.mkfifo(path)
    check(run)
    assert own.read_text() == "mine" and not (tmp_path / "made").exists()
    assert (run / "report.html").is_file() and not (run / "report.html").is_symlink()


def test_a_folder_named_like_the_page_is_one_line_and_exit_code_2(run, capsys):
    (run / "report.html").mkdir()
    before = sorted(run.iterdir())
    assert main([str(run)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert sorted(run.iterdir()) == before


def test_control_characters_of_a_folder_name_are_escaped(tmp_path, capsys, run):
    evil = run.rename(tmp_path / "a\x1b]0;owned\x07\n")
    assert main([str(evil)]) == 0
    assert main([str(evil / "\x1b[31m")]) == 2
    output = capsys.readouterr()
    assert not set(output.out + output.err) & {"\x1b", "\x07"}
    assert len((output.out + output.err).splitlines()) == 2


def test_a_pipe_does_not_block(run):
    """Nobody writes to it, so a read would wait forever."""
    for name in FILES[:1]:
        (run / name).unlink()
        os.mkfifo(run / name)
    thread = threading.Thread(target=page.write_report, args=(run,), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
