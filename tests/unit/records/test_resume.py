"""A run resumes from its checkpoint, or is refused in one line."""

import asyncio
import os
import shutil
from contextlib import nullcontext

import pytest
from lib.checkpoints import write_checkpoint
from lib.files import tree_of, write_text
from lib.receipts import of
from lib.rows import read_rows
from omegaconf import OmegaConf

from grpo_components.data.prompt_stream import PromptStream
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.staleness import StalenessContract
from grpo_components.records.checkpoint_folder import latest, point_latest
from grpo_components.records.receipt_chain import read_end
from grpo_components.records.receipts import Receipts
from grpo_components.records.resume import begin_run, check_resume, last_attempt, roll_back
from grpo_components.records.run_folder import LOCK
from grpo_components.settings import Settings
from grpo_tools.audit.__main__ import audit

VALUES = {
    **{"seed": 1, "dtype": "fp32", "base_model_path": "/models/a", "shuffle": True},
    "model": {"_component_": "qwen2", "num_layers": 2},
    "tokenizer": {"_component_": "qwen2_5_tokenizer"},
    "checkpointer": {"model_type": "QWEN2", "output_dir": "/runs/a"},
    "dataset": {"_component_": "gsm8k", "num_rows": 9},
    **{"group_size": 4, "groups_per_step": 2, "num_steps": 20, "num_trainers": 1},
    **{"num_generators": 1, "max_staleness": 1, "rollouts_in_flight": 4},
    "loss": {"_component_": "GRPOLoss", "kl_coeff": 0.0},
    "reward_shaping": {"kl_coeff": 0.0},
    "optimizer": {"_component_": "AdamW", "lr": 1e-3},
    "lr_scheduler": None,
}


def parts(num_rows=9):
    prompts = PromptStream([{"prompt_index": i} for i in range(num_rows)], shuffle=True, seed=1)
    return Ledger(StalenessContract(1, 2), 20, prompts), prompts


def save(folder, ledger, prompts, **more):
    """Write the checkpoint of the last step, and return its folder."""
    checkpoint = folder / "checkpoints" / f"step_{ledger.steps_done}"
    state = {"ledger": ledger.state_dict(), "prompts": prompts.state_dict()}
    write_checkpoint(checkpoint, state | more, VALUES)
    point_latest(checkpoint)
    return checkpoint


@pytest.fixture
def run(tmp_path):
    """The folder of a run that has three checkpoints and one attempt."""
    folder = tmp_path / "run"
    ledger, prompts = parts()
    for step in (2, 4, 6):
        for _ in range(5):
            next(prompts)
        ledger.steps_done = ledger.policy_version = step
        save(folder, ledger, prompts)
    receipts(folder, parts()[0], 0).close()
    (folder / "logs").mkdir()
    written = OmegaConf.to_yaml({"output_dir": "/before", **VALUES})
    (folder / "config.yaml").write_text(f"# run: 1\n{written}")
    return folder


def receipts(folder, ledger, attempt, **ids):
    sizes = {"max_staleness": 1, "groups_per_step": 2, "group_size": 4}
    ledger.events.attempt = attempt
    return Receipts(folder / "receipts.jsonl", ledger, sizes | ids)


def config(output_dir, resume_from, **changes):
    settings = {"output_dir": str(output_dir), "resume_from_checkpoint": resume_from}
    return OmegaConf.merge(OmegaConf.create(VALUES | settings), OmegaConf.create(changes))


def check(cfg):
    values = OmegaConf.to_container(cfg)
    check_resume(values, {key: values[key] for key in ("loss", "reward_shaping")})


def begin(cfg, num_rows=9):
    ledger, prompts = parts(num_rows)
    names = ("output_dir", "resume_from_checkpoint", "num_steps")
    settings = Settings.model_construct(**{name: cfg[name] for name in names})
    return begin_run(settings, ledger, prompts), ledger, prompts


def test_without_resume_a_used_folder_is_moved_aside(run):
    run_start, ledger, _ = begin(config(run, False))
    assert (run_start.attempt, run_start.checkpoint, ledger.steps_done) == (0, None, 0)
    assert run_start.note.endswith(f"is now {run}-1")
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize(("path", "step"), [(None, 6), ("checkpoints/step_4", 4)])
def test_a_run_resumes_in_its_folder_as_the_next_attempt(run, path, step):
    for attempt in (1, 2):
        cfg = config(run, str(run / path) if path else True, num_steps=30)
        check(cfg)
        run_start, ledger, prompts = begin(cfg)
        assert run_start.attempt == attempt
        assert run_start.checkpoint == run / "checkpoints" / f"step_{step}"
        assert run_start.note == f"resumed from {run_start.checkpoint} (attempt {attempt})"
        assert ledger.steps_done == ledger.policy_version == step
        whole = [next(each) for each in [parts()[1]] * (5 * step // 2 + 9)]
        assert whole[-9:] == [next(prompts) for _ in range(9)]
        assert latest(run / "checkpoints") == run_start.checkpoint, "which it resumed from"
        receipts(run, ledger, run_start.attempt)  # killed: it never closes them
        run_start.lock.close()
    assert OmegaConf.load(run / "config.yaml").num_steps == 30
    assert OmegaConf.load(run / "config_attempt_0.yaml").num_steps == 20
    assert started(run, "attempt", "steps_done") == [(0, 0), (1, step), (2, step)]


def test_a_run_can_resume_in_another_folder_with_what_the_audit_needs_of_it(run, tmp_path):
    kept = {"config_attempt_0.yaml": "seed: 1\n", "code/attempt_0/my_grpo.py": "loss = 1\n"}
    for name, text in kept.items():
        write_text(run / name, text)
    receipts(run, parts()[0], 1).close()
    before, other = tree_of(run), tmp_path / "other"
    run_start, ledger, _ = begin(config(other, str(run / "checkpoints/step_4"), num_steps=30))
    assert (run_start.attempt, ledger.steps_done, last_attempt(other)) == (2, 4, 1)
    receipts(other, ledger, run_start.attempt)
    assert tree_of(run) == before and latest(run / "checkpoints").name == "step_6"
    assert {name: (other / name).read_text() for name in kept} == kept
    assert OmegaConf.load(other / "config_attempt_1.yaml").num_steps == 20
    assert OmegaConf.load(other / "config.yaml").num_steps == 30
    records = read_end(run / "receipts.jsonl").records
    assert read_end(other / "receipts.jsonl").records == records + 1


def test_a_copied_checkpoint_brings_nothing_that_lies_around_it(run, tmp_path):
    shutil.copytree(run / "checkpoints/step_4", copied := tmp_path / "kept" / "step_4")
    for name in ("code/mine.py", "config.yaml", "config_attempt_7.yaml"):
        write_text(tmp_path / name, "seed: 5\n")
    run_start, ledger, _ = begin(config(tmp_path / "new", str(copied)))
    assert (run_start.attempt, ledger.steps_done) == (0, 4)
    assert {path.name for path in tree_of(tmp_path / "new")} == {"config.yaml", "logs", LOCK}


def test_a_dead_link_in_the_code_of_a_run_does_not_keep_another_from_starting(run, tmp_path):
    (run / "code").mkdir()
    (run / "code" / "my_grpo.py").symlink_to("/nowhere")
    begin(config(tmp_path / "new", str(run / "checkpoints/step_4")))
    assert last_attempt(tmp_path / "new") == 0


@pytest.mark.parametrize("elsewhere", [False, True])
def test_missing_records_are_still_noticed_after_the_run_resumed(run, tmp_path, elsewhere):
    """The next record is chained to the missing one."""
    lines = (run / "receipts.jsonl").read_bytes().splitlines(keepends=True)
    for cut in (False, True):
        source = tmp_path / f"kept {cut}"
        shutil.copytree(run, source, symlinks=True)
        (source / "receipts.jsonl").write_bytes(b"".join(lines[:-1] if cut else lines))
        folder = tmp_path / f"other {cut}" if elsewhere else source
        run_start, ledger, _ = begin(config(folder, str(source / "checkpoints/step_4")))
        receipts(folder, ledger, run_start.attempt).close()
        report, _ = audit(folder / "receipts.jsonl")
        assert ("chain" in report.broken) == cut, report.broken


def started(folder, *keys):
    """These values of every attempt in the receipts."""
    starts = of(read_rows(folder / "receipts.jsonl"), "start")
    return [tuple(start.get(key) for key in keys) for start in starts]


def begun(cfg):
    """Run an attempt that saves a checkpoint and ends."""
    run_start, ledger, prompts = begin(cfg)
    ids = run_start.identity._asdict()
    receipts(run_start.output_dir, ledger, run_start.attempt, **ids).close()
    save(run_start.output_dir, ledger, prompts, identity=ids)
    run_start.lock.close()
    return run_start.identity


def test_a_run_keeps_its_id_and_every_process_has_its_own(run, tmp_path):
    """Even if the run is older than ids, and if it resumes in another folder."""
    first, second = (begun(config(run, True)) for _ in range(2))
    other = begun(config(tmp_path / "other", str(run / "checkpoints/step_6")))
    assert first.run == second.run == other.run
    assert len({first.incarnation, second.incarnation, other.incarnation}) == 3
    ids, keys = [(i.run, i.incarnation) for i in (first, second, other)], ("run", "incarnation")
    assert started(run, *keys) == [(None, None), *ids[:2]]
    assert started(tmp_path / "other", *keys) == [(None, None), *ids]
    assert begun(config(tmp_path / "new", False)).run != first.run


@pytest.mark.parametrize("resume_from", [False, True, "checkpoints/step_4"])
def test_no_attempt_starts_in_the_folder_of_a_running_one(run, resume_from):
    resume_from = str(run / resume_from) if isinstance(resume_from, str) else resume_from
    living, *_ = begin(config(run, True))
    before = tree_of(run)
    with pytest.raises(ValueError, match=f"^output_dir: .* pid {os.getpid()} on "):
        begin(config(run, resume_from))
    assert tree_of(run) == before
    living.lock.close()


def test_an_incomplete_start_record_is_not_an_attempt(run):
    with (run / "receipts.jsonl").open("a") as file:
        file.write('{"event": "start", "attempt": 1, "for')
    assert last_attempt(run) == 0


@pytest.mark.parametrize("resume_from", [True, "nowhere", "RUN/checkpoints"])
def test_a_missing_checkpoint_is_refused_by_its_key(run, tmp_path, resume_from):
    if isinstance(resume_from, str):
        resume_from = resume_from.replace("RUN", str(run))
    with pytest.raises(ValueError, match=r"^resume_from_checkpoint: .*; allowed: "):
        check(config(tmp_path / "fresh", resume_from))


@pytest.mark.parametrize(
    ("change", "start", "allowed"),
    [
        ({"seed": 2}, "seed: 2 ", "1"),
        ({"group_size": 8}, "group_size: 8 ", "4"),
        ({"shuffle": False}, "shuffle: false ", "true"),
        ({"dtype": "bf16"}, "dtype: 'bf16' ", "'fp32'"),
        ({"model": {"num_layers": 3}}, "model.num_layers: 3 ", "2"),
        ({"model": {"extra": 3}}, "model.extra: 3 ", "null"),
        ({"tokenizer": {"_component_": "other"}}, "tokenizer._component_: ", "'qwen2_5_tokenizer'"),
        ({"dataset": {"num_rows": None}}, "dataset.num_rows: null ", "9"),
        ({"checkpointer": {"model_type": "GEMMA"}}, "checkpointer.model_type: ", "'QWEN2'"),
        ({"optimizer": {"_component_": "SGD"}}, "optimizer._component_: 'SGD' ", "'AdamW'"),
        ({"lr_scheduler": {"_component_": "cosine"}}, "lr_scheduler._component_: ", "null"),
        ({"loss": {"kl_coeff": 0.1}}, "loss.kl_coeff: ", "0.0"),
        ({"teacher": {"path": "/models/b"}}, "teacher: cannot change to or from null", "null"),
        ({"num_steps": 6}, "num_steps: 6 ", "above 6"),
    ],
)
def test_an_incompatible_change_is_refused_by_its_key(run, change, start, allowed):
    with pytest.raises(ValueError) as refused:
        check(config(run, True, **change))
    text = str(refused.value)
    assert text.startswith(start) and text.endswith(f"; allowed: {allowed}") and "\n" not in text


@pytest.mark.parametrize(
    ("component", "fixed"),
    [("torch.optim.lr_scheduler.StepLR", True), ("torchtune.get_cosine", False)],
)
def test_the_arguments_of_torchs_own_schedulers_are_fixed(run, component, fixed):
    saved = OmegaConf.create(VALUES | {"lr_scheduler": {"_component_": component, "step_size": 5}})
    OmegaConf.save(saved, run / "checkpoints" / "latest" / "state" / "config.yaml")
    check(config(run, True, lr_scheduler=saved.lr_scheduler))
    changed = config(run, True, lr_scheduler={"_component_": component, "step_size": 9})
    with pytest.raises(ValueError, match="step_size: 9 ") if fixed else nullcontext():
        check(changed)


@pytest.mark.parametrize(
    "change",
    [
        {"num_steps": 7, "num_trainers": 4, "num_generators": 3},
        {"groups_per_step": 8, "max_staleness": 0, "rollouts_in_flight": 1},
        {"optimizer": {"lr": 1.0}, "loss": {"_component_": "GSPOLoss"}},
        {"checkpointer": {"output_dir": "/runs/b"}},
    ],
)
def test_a_compatible_change_is_accepted(run, change):
    check(config(run, True, **change))


def test_a_data_set_of_another_length_is_refused_and_nothing_is_touched(run):
    (run / LOCK).touch()
    before = tree_of(run)
    with pytest.raises(ValueError, match=r"^dataset: .*8 rows; allowed: .*9 rows"):
        begin(config(run, True), num_rows=8)
    assert tree_of(run) == before


def trained_on(ledger, prompts):
    """Train for a while, with groups in flight."""
    for _ in range(4):
        next(prompts)
    ledger.steps_done = ledger.policy_version = ledger.published_version = 9
    asyncio.run(ledger.admit("test", 1))


@pytest.mark.parametrize("resumed", [False, True])
def test_a_failed_attempt_rolls_back_to_its_newest_checkpoint(run, tmp_path, resumed):
    """Without one, to its start: a checkpoint, maybe in another folder, or nothing."""
    folder = tmp_path / "other"
    cfg = config(folder, str(run / "checkpoints/step_4") if resumed else False)
    run_start, ledger, prompts = begin(cfg)
    expected = [next(begin(config(tmp_path / "again", cfg.resume_from_checkpoint))[2])[0]]
    for number in (1, 2):  # then once more
        trained_on(ledger, prompts)
        run_start = roll_back(run_start, ledger, prompts)
        assert run_start.attempt == number + resumed
        assert ledger.steps_done == ledger.policy_version == (4 if resumed else 0)
        assert (ledger.published_version, ledger.living()) == (0, [])
        prompt, _ = next(prompts)
        assert [prompt] == expected
    trained_on(ledger, prompts)
    checkpoint = save(folder, ledger, prompts)
    ahead = [next(prompts) for _ in range(3)]
    run_start = roll_back(run_start, ledger, prompts)
    assert run_start.checkpoint == checkpoint.resolve()
    assert ledger.steps_done == 9
    assert [entry.state for entry in ledger.living()] == ["in_flight"]  # issued again, first
    assert [next(prompts) for _ in range(3)] == ahead
