"""Wall-clock time and restarts count over all attempts of a run."""

import json
import time

import pytest

from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.records.receipts import Receipts
from grpo_components.records.run_totals import RunTotals
from grpo_components.replay.event_order import EventOrder


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_new_run_has_no_restarts_and_its_clock_runs(tmp_path):
    before = time.perf_counter()
    totals = RunTotals(tmp_path)
    first, second = totals.metrics(), totals.metrics()
    assert 0 <= first["time/wall_clock"] <= second["time/wall_clock"]
    assert second["time/wall_clock"] <= time.perf_counter() - before
    assert first["restarts"] == 0


def test_restarts_of_a_role_and_of_all_trainers_count_and_a_role_given_up_does_not(tmp_path):
    totals = RunTotals(tmp_path)
    events = EventOrder(listeners=[totals.follow])
    events.record("restart", role="generator_0", what="died", given_up=False)
    events.note("rollback", role="trainer_0", what="died")
    events.note("restart", role="trainer_0", what="died")  # while the roles start
    events.record("restart", role="generator_1", what="died", given_up=True)
    events.record("issue", role="generator_0", group=1)
    assert totals.metrics()["restarts"] == 3


def test_a_resumed_run_goes_on_from_its_logs(tmp_path):
    """Those of the real event log; a text that looks like an event is none."""
    (tmp_path / "logs").mkdir()
    ledger = Ledger(StalenessContract(1, 1), 3, iter(()))
    events, receipts = ledger.events, Receipts(tmp_path / "receipts.jsonl", ledger, 0, {})
    events.record("restart", role="generator_0", what='{"event": "rollback"', given_up=False)
    events.note("rollback", role="trainer_0", what='said "restart"')
    events.record("restart", role="generator_0", what="died", given_up=True)
    receipts.close()
    steps = [{"step": s, "time/wall_clock": took} for s, took in ((1, 50.0), (2, 90.0), (1, 70.0))]
    write(tmp_path / "logs/metrics.jsonl", {"step": 0}, *steps)
    totals = RunTotals(tmp_path / "logs")
    assert totals.metrics()["restarts"] == 2
    assert totals.metrics()["time/wall_clock"] == pytest.approx(90.0, abs=5)


@pytest.mark.parametrize("took", ["[1]", '"9"', "null", "{"])
def test_damaged_logs_of_an_earlier_attempt_do_not_stop_the_next(tmp_path, took):
    line = f'{{"step": 1, "time/wall_clock": {took}}}\n'
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "metrics.jsonl").write_text(line + '{"step": 2, "time/wall_clock": 9')
    (tmp_path / "receipts.jsonl").write_text('{"event": "restart"\n{"event": "restart"')
    assert RunTotals(logs).metrics()["restarts"] == 0
    assert RunTotals(logs).metrics()["time/wall_clock"] < 5
