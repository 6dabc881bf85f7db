"""When, how long, where and with which versions a run ran, whatever its files contain."""

import json

import pytest

from grpo_tools.report.run_facts import RunFacts, duration, read_facts


@pytest.fixture
def write(tmp_path):
    (tmp_path / "logs").mkdir()

    def write(name, *records):
        text = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / "logs" / name).write_text(text + '{"torn')
        return tmp_path

    return write


def start(time, **more):
    return {"event": "start", "number": 0, "attempt": 0, **more, "time": time}


def event(time):
    return {"event": "issue", "attempt": 0, "time": time}


def test_the_duration_leaves_out_the_pauses_between_the_processes_of_a_run(write):
    times = [start(1000.0), event(1010.0), event(1060.0), start(9000.0), event(9005.0)]
    facts = read_facts(write("events.jsonl", *times))
    assert facts.seconds == 65.0
    assert facts.items() == {"began": "1970-01-01 00:16 UTC", "duration": "1 min 5 s"}


def test_hosts_and_versions_are_those_of_the_last_attempt(write):
    folder = write("events.jsonl", start(1.0), start(5.0, cpus=4, libraries={"torch": "2"}))
    nodes = [(0, "old"), (1, "b"), (1, "a"), (1, "b")]
    write("roles.jsonl", *({"role": "x", "attempt": n, "node": node} for n, node in nodes))
    items = read_facts(folder).items()
    assert (items["host"], items["versions"]) == ("b, a (4 CPUs)", "torch 2")


def test_without_files_nothing_is_known(tmp_path):
    assert read_facts(tmp_path) == RunFacts() and RunFacts().items() == {}


@pytest.mark.parametrize("time", [None, "x", 1e90, -1e90, [1]])
def test_impossible_times_are_left_out(write, time):
    items = read_facts(write("events.jsonl", start(time), event(time))).items()
    assert "began" not in items


def test_names_of_many_hosts_and_long_texts_are_cut():
    facts = RunFacts(hosts=[f"{i}" * 500 for i in range(9)], versions={"<b>": "v" * 500})
    assert len(facts.items()["host"]) < 300 and facts.items()["host"].endswith("5 more")
    assert len(facts.items()["versions"]) < 100 and "<b>" not in facts.html().replace("<b>", "", 2)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.2, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (3700, "1 h 1 min")),
        (200_000, "2 d 7 h"),
    ],
)
def test_a_duration_in_words(seconds, text):
    assert duration(seconds) == text
