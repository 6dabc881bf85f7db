"""A run whose weights go through vLLM's engines of `nccl`, on a CPU, has the same bits."""

import os

from lib.chaos import forked_recipe
from lib.nccl_on_cpu import nccl_on_cpu
from lib.whole_runs import assert_same_run, metrics, records, succeed

SMALL = (
    *("groups_per_step=4", "group_size=4", "eval_dataset.num_rows=4", "num_generators=2"),
    *("num_trainers=2", "rollouts_in_flight=4", "pull_every_m_rollouts=1"),
)


def on_cpu(folder):
    """A recipe, and an environment, in which `weights: nccl` needs no GPU."""
    recipe, environment = forked_recipe(folder, [])
    source = (folder / recipe).read_text()
    # A recipe that names sys.path is not checked before it runs, and so not before this.
    more = "import chaos\n    import nccl_on_cpu  # on sys.path\n\n    nccl_on_cpu.install()"
    (folder / recipe).write_text(source.replace("import chaos\n", f"{more}\n"))
    path = os.pathsep.join((nccl_on_cpu.FOLDER, environment["PYTHONPATH"]))
    return {"recipe": recipe, "env": environment | {"PYTHONPATH": path}}


def loads(output_dir):
    events = records(output_dir / "receipts.jsonl")
    return [(e["role"], e["version"], e["checksum"]) for e in events if e["event"] == "load"]


def test_an_asynchronous_run_repeated_over_nccl_has_the_same_bits(tune, tmp_path):
    """Two generators and two trainers: one recording, whose weights were in the object store."""
    _, original = succeed(tune, *SMALL, "num_steps=5")
    output, replay = succeed(
        *(tune, *SMALL, "num_steps=5", "weights=nccl", f"replay_events={original}"),
        **on_cpu(tmp_path),
    )
    assert "events in the recorded order" in output
    assert_same_run(original, replay, num_steps=5)
    assert sorted(loads(replay)) == sorted(loads(original))
    assert {role for role, *_ in loads(replay)} == {"generator_0", "generator_1"}
    assert max(record["staleness/max"] for record in metrics(original)[1:]) > 0
