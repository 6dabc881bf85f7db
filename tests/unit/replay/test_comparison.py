"""The first difference of a what-if is the one of the lowest step, with all that differs there."""

import json

from grpo_components.replay.comparison import Comparison
from grpo_components.replay.recorded_run import Original


def test_the_first_difference_is_found_whatever_is_compared_first(tmp_path):
    (tmp_path / "logs").mkdir()
    lines = [{"step": 0, "eval/success_rate": 0.5}]
    lines += [{"step": s, "loss/total": 0.1 * s, "grad_norm": None, "lr": 0.1} for s in (3, 4)]
    (tmp_path / "logs" / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    notes = []
    original = Original({3: "a", 4: "b"}, {2: "weights 2", 3: "weights 3"})
    comparison = Comparison(tmp_path, original, 2, notes.append)

    def load(version, checksum):
        comparison.check_load({"event": "load", "version": version, "checksum": checksum})

    load(2, "weights 2")
    comparison.check_load({"event": "push", "version": 3})
    comparison.check_batch(3, "a")
    comparison.check_step(3, {"loss/total": 0.1 * 3, "grad_norm": float("nan"), "lr": 0.1})
    assert "up to step 2, then live; no difference found" in comparison.summary()
    comparison.check_batch(4, "other")
    assert notes == ["what-if: first difference in step 4: batch"]
    load(3, "others")
    load(3, "others")  # by another generator
    load(9, "weights that the original did not load")
    comparison.check_step(3, {"loss/total": 0.1 * 3, "lr": 0.2})
    found = "first difference in step 3: weights of version 3, lr 0.2 (there 0.1)"
    assert f"{found}; same batches from there on: 1" in comparison.summary()
    assert len(notes) == 1
