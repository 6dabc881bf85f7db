"""A run's folder is recognised by its files; any other file in it is found."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpo_components.records.folder_lock import LOCK, lock_folder
from grpo_components.records.run_contents import foreign_entry, is_empty, is_run, lies_in_run

WRITTEN = (
    *("config.yaml", "config_attempt_0.yaml", "receipts.jsonl", "report.html", ".report.html.part"),
    *("trajectories.jsonl", "logs/events.jsonl", "logs/generator_0.log", "logs/driver_stacks.log"),
    *("logs/disk/log_17.txt", "logs/schedule_generator_0.jsonl", "skipped/step_3/trajectories.npz"),
    *("checkpoints/step_4/state/driver.json", "checkpoints/.step_5.unfinished/a.safetensors"),
    *("checkpoints/.step_3.discarded/a", "profile/iteration_2/trace.json.gz", ".gitkeep"),
    *("code/attempt_0/environment.json", "code/attempt_0/modules/mine/rewards.py"),
    *(".config.yaml.0a1b.part", ".nfs00000000a1b2c3d4", "checkpoints/latest", "checkpoints/best"),
)


def config(output_dir, **changes):
    keys = {"base_model_path": "/m", "max_staleness": 1, "groups_per_step": 2, "group_size": 2}
    logger = {"_component_": "DiskLogger", "log_dir": f"{output_dir}/logs/disk"}
    return {"output_dir": str(output_dir), **keys, "metric_logger": logger, **changes}


@pytest.fixture
def run(tmp_path):
    """All files of a run, made by a version without ids and locks."""
    folder = tmp_path / "run"
    for name in WRITTEN:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    for name in ("latest", "best"):
        (folder / "checkpoints" / name).unlink()
        (folder / "checkpoints" / name).symlink_to("step_4")
    OmegaConf.save(config(folder), folder / "config.yaml")
    (folder / "receipts.jsonl").write_text('{"record": "start", "attempt": 0}\n')
    return folder


def test_files_of_a_run_are_recognised(run):
    assert is_run(run) and foreign_entry(run) is None and not is_empty(run)
    (run / "receipts.jsonl").unlink()  # the run ended before its first receipt
    assert not is_run(run)
    (run / "logs/events.jsonl").write_text(json.dumps({"event": "start"}) + "\n")
    assert is_run(run)


def test_a_renamed_run_is_still_a_run(run):
    moved = run.rename(run.with_name("better name"))
    assert is_run(moved) and foreign_entry(moved) is None


@pytest.mark.parametrize("missing", ["config.yaml", "logs"])
def test_a_folder_without_config_or_logs_is_not_a_run(run, missing):
    (run / missing).rename(run.with_name("elsewhere"))
    assert not is_run(run)


@pytest.mark.parametrize("text", ["[", "[1]", "seed: 1", "a: !!python/object:os.x {}", "\0", "é"])
def test_a_folder_with_the_config_of_another_program_is_not_a_run(run, text):
    (run / "config.yaml").write_text(text, encoding="latin-1")
    assert not is_run(run)


def test_a_folder_with_only_the_lock_of_a_dead_process_is_a_run(tmp_path):
    assert not is_run(tmp_path)
    lock = lock_folder(tmp_path)
    record = (tmp_path / LOCK).read_bytes()
    lock.release()
    (tmp_path / LOCK).write_bytes(record)
    assert is_run(tmp_path) and is_empty(tmp_path) and foreign_entry(tmp_path) is None


@pytest.mark.parametrize(
    "name",
    [
        *("thesis.tex", "config.yml", "config_attempt_x.yaml", "data/train.jsonl", "logs/plot.png"),
        *("logs/disk.txt", "checkpoints/thesis.tex", "checkpoints/step_4b/x", "skipped/mine/x"),
        *("code/mine.py", "code/attempt_x/a.py"),
        *(".git/config", "__pycache__/a.pyc", ".vscode/settings.json", "receipts.jsonl~", ".x.swp"),
        *("profile/run/run.lock", "logs/disk/run.lock", "checkpoints/step_4/run.lock"),
    ],
)
def test_a_foreign_file_is_found(run, name):
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text("mine")
    assert foreign_entry(run) == Path(name)


@pytest.mark.parametrize("link", ["thesis", "latest", "logs/more"])
def test_a_link_that_no_run_made_is_found(run, link):
    (run / link).symlink_to("/etc")
    assert foreign_entry(run) == Path(link)


def test_folders_of_the_logger_and_profiler_belong_to_the_run(run):
    node = {"log_dir": f"{run}/boards/tb"}
    OmegaConf.save(config(run, metric_logger=node), run / "config_attempt_1.yaml")
    OmegaConf.save(config(run, profiler={"output_dir": f"{run}/traces"}), run / "config.yaml")
    for name in ("boards/tb/x", "traces/y"):
        (run / name).parent.mkdir(parents=True)
        (run / name).touch()
    assert foreign_entry(run) is None
    (run / "boards/mine").touch()
    assert foreign_entry(run) == Path("boards/mine")


@pytest.mark.parametrize("log_dir", ["", "/", "/../other", "/logs/../.."])
def test_with_a_logger_in_the_folder_itself_foreign_files_are_still_found(run, log_dir):
    logger = {"log_dir": f"{run}{log_dir}"}
    OmegaConf.save(config(run, metric_logger=logger), run / "config_attempt_1.yaml")
    (run / "events.out.tfevents.17.host").touch()
    (run / "wandb").mkdir()
    (run / "wandb" / "debug.log").touch()
    inside = log_dir in ("", "/")
    assert foreign_entry(run) == (None if inside else Path("events.out.tfevents.17.host"))
    (run / "thesis.tex").touch()
    assert foreign_entry(run) is not None


@pytest.mark.parametrize(
    ("name", "empty"),
    [("a/b/c/", True), ("a/.gitkeep", True), (".DS_Store", True), ("a/b/thesis.tex", False)],
)
def test_a_folder_with_only_empty_folders_and_placeholders_is_empty(tmp_path, name, empty):
    path = tmp_path / name
    (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
    None if name.endswith("/") else path.touch()
    assert is_empty(tmp_path) == empty
    (tmp_path / "link").symlink_to("nowhere")
    assert not is_empty(tmp_path)


def test_a_folder_inside_a_run_is_recognised(run):
    for name in ("checkpoints", "logs/x/y", "profile/run", "skipped/a"):
        assert lies_in_run(run / name) == run
    for folder in (run, run / "another", run.parent):
        assert lies_in_run(folder) is None
