"""The demo's job as it is learns well, and nothing in it grows."""

from statistics import median

import pytest
from lib.whole_runs import metrics, receipts, records, succeed

pytestmark = pytest.mark.timeout(1800)


def test_nothing_grows(tune):
    """No role uses more in the last 80 steps than in the 80 before them; the first 90 warm up."""
    _, output_dir = succeed(tune, "num_steps=250")
    assert metrics(output_dir)[-1]["eval/success_rate"] >= 0.8
    heartbeats = records(output_dir / "logs" / "heartbeats.jsonl")
    ends = {step["step"]: step["time"] for step in receipts(output_dir)}
    for role in ("driver", "generator_0", "trainer_0", "replay_buffer", "parameter_server"):
        beats = [beat for beat in heartbeats if beat["role"] == role]
        settled = [beat for beat in beats if ends[90] <= beat["time"] < ends[170]]
        late = [beat for beat in beats if ends[170] <= beat["time"] <= ends[250]]
        assert min(len(settled), len(late)) >= 3, f"{role}: {len(beats)} heartbeats"
        for what, slack in (("threads", 8), ("open_files", 4), ("processes", 1), ("objects", 40)):
            if what in beats[0]:
                most = max(beat[what] for beat in settled)
                assert max(beat[what] for beat in late) <= most + slack, (role, what)
        # On a busy machine, gRPC starts a few threads more, for some seconds.
        threads = median(beat["threads"] for beat in late)
        assert threads <= max(beat["threads"] for beat in settled) + 2, role
        # Memory goes up and down with the lengths in a batch: what leaks raises its peaks.
        before, after = ([beat["rss_mib"] for beat in part] for part in (settled, late))
        limit = 32
        if role == "generator_0":  # its peaks are short, so that a leak raises its floor
            limit = 256
            growth = min(after) - min(before)
            assert growth < 64, f"{role} never uses less than {growth:.1f} MiB more"
        growth = max(after) - max(before)
        assert growth < limit, f"{role} grew by {growth:.1f} MiB"
