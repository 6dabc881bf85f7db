"""Files and folders of a run, what it records, and half runs: refused by key, or accepted."""

import functools
import json
import os
import sys
from pathlib import Path

import pytest
from lib.checkpoints import write_checkpoint
from lib.config_errors import refusal_of, refused_key
from omegaconf import OmegaConf

from grpo_components.config.checkpointer_checks import checkpoint_files
from grpo_components.config.output_checks import check_folder, check_inputs
from grpo_components.config.paths import expand_paths, is_path, read_hf_config
from grpo_components.config.reading import read_settings
from grpo_components.records.run_folder import lock_folder
from grpo_components.settings import Settings

CONFIG = Path(__file__).parents[3] / "recipes/configs/tiny_async_grpo.yaml"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("log_token_logprobs=true rollouts_logged_per_step=0", "log_token_logprobs"),
        ("keep_best=loss/total", "keep_best"),
        ("checkpointer.model_type=QWEN3", "checkpointer.model_type"),
        ("resume_from_checkpoint=true", "resume_from_checkpoint"),
        ("output_dir=.", "output_dir"),
        ("output_dir=..", "output_dir"),
        ("output_dir=${base_model_path}", "output_dir"),
        ("output_dir=${base_model_path}/config.json/run", "output_dir"),
        ("checkpointer.checkpoint_dir=/tmp", "checkpointer.checkpoint_dir"),
        ("checkpointer.checkpoint_files=[]", "checkpointer.checkpoint_files"),
        ("base_model_path=/nowhere/tiny_policy", "base_model_path"),
        ("base_model_path=/nowhere/Qwen2.5-3B", "base_model_path"),
        ("reward_model.path=/nowhere/classifier", "reward_model.path"),
        ("reward_model.path=no-owner/no/name", "reward_model.path"),
        ("teacher.path=/nowhere/Qwen2.5-7B", "teacher.path"),
        # half runs
        ("eval_only=true rollout_only=true", "rollout_only"),
        ("rollout_only=true resume_from_checkpoint=/a", "resume_from_checkpoint"),
        ("eval_only=/nowhere", "eval_only"),
        ("train_from=/nowhere/trajectories.jsonl", "train_from"),
        ("train_from=/nowhere.jsonl keep_best=eval/reward_mean", "keep_best"),
        # interpolation
        ("seed=${nothing}", "seed"),
        ("seed=${eval:1}", "seed"),
        ("seed=${oc.env:HOME}", "seed"),
        ("seed=a ${oc.decode:b}", "seed"),
        ("seed=${${seed}:1}", "seed"),
        ("dataset.source=${dataset.${device}}", "dataset.source"),
    ],
)
def test_what_is_refused_by_its_key(refused, overrides, key):
    assert refused(overrides) == key


def test_a_value_still_to_be_filled_in_is_refused(cfg, refused):
    cfg.seed = "???"
    assert refused() == "seed"


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("config.json", "base_model_path"),
        ("model.safetensors", "checkpointer.checkpoint_files"),
        ("vocab.json", "tokenizer.path"),
        ("merges.txt", "tokenizer.merges_file"),
        ("tokenizer.json", "tokenizer.special_tokens_path"),
        ("data/train.jsonl", "dataset.source"),
        ("data/held_out.jsonl", "eval_dataset.source"),
    ],
)
def test_a_missing_file_is_refused_by_its_key(cfg, refused, file, key):
    (Path(cfg.base_model_path) / file).unlink()
    assert refused() == key


@pytest.mark.parametrize("key", ["dataset", "eval_dataset"])
@pytest.mark.parametrize(
    "name", ["rows.jsonl.gz", "rows", "folder", "folder.jsonl", "nowhere.jsonl", "no/rows.parquet"]
)
def test_a_local_data_set_that_is_no_file_of_rows_is_refused(cfg, refused, key, name):
    path = Path(cfg.base_model_path) / name
    if name.startswith("folder"):
        path.mkdir()
    elif name.startswith("rows"):
        path.touch()
    assert refused(f"{key}.source={path}") == f"{key}.source"


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}


@pytest.mark.parametrize(
    ("hf_config", "overrides", "key"),
    [
        ({"model_type": "gemma2"}, "", "base_model_path"),
        ({"model_type": "vl", "vision_config": {}}, "", "base_model_path"),
        (HEADS, "num_trainers=4 tensor_parallel_dim=4", "tensor_parallel_dim"),
        (HEADS, "generator.tensor_parallel_size=3", "generator.tensor_parallel_size"),
        (HEADS, "num_trainers=2 tensor_parallel_dim=2", None),
    ],
)
def test_a_base_model_that_cannot_be_trained_is_refused(
    cfg, check, refused, hf_config, overrides, key
):
    (Path(cfg.base_model_path) / "config.json").write_text(json.dumps(hf_config))
    if key is None:
        check(overrides)
    else:
        assert refused(overrides) == key


@pytest.mark.parametrize(
    ("folder", "command"),
    [
        ("tiny_policy", "python -m grpo_components.examples.tiny_policy"),
        ("Qwen2.5-3B", "tune download Qwen/Qwen2.5-3B --output-dir /no/Qwen2.5-3B"),
        ("Mistral-7B", "tune download <owner>/Mistral-7B --output-dir /no/Mistral-7B"),
    ],
)
def test_a_missing_model_comes_with_the_command_that_gets_it(check, folder, command):
    assert command in refusal_of(check, f"base_model_path=/no/{folder}").allowed


@pytest.mark.parametrize("where", ["folder", "hub"])
def test_a_learned_reward_is_a_classifier(check, refused, tmp_path, monkeypatch, where):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder, given = tmp_path / "classifier", f"reward_model.path={tmp_path}/classifier"
    if where == "hub":
        folder, given = tmp_path / "models--a--b/snapshots/abc", "reward_model.path=a/b"
        (tmp_path / "models--a--b/refs").mkdir(parents=True)
        (tmp_path / "models--a--b/refs/main").write_text("abc")
    assert refused(given) == "reward_model.path"
    folder.mkdir(parents=True)
    for architectures in ('["Qwen2ForCausalLM"]', "[]", "3"):
        (folder / "config.json").write_text(f'{{"architectures": {architectures}}}')
        assert refused(given) == "reward_model.path"
    (folder / "config.json").write_text('{"architectures": ["Qwen2ForSequenceClassification"]}')
    check(given)


@pytest.mark.parametrize("key", ["eval_only", "train_from", "reward_model.path"])
def test_what_is_read_while_the_run_goes_on_is_not_moved_aside(cfg, refused, key):
    """As where a run's own checkpoint is evaluated into the run's folder."""
    inside = f"{cfg.output_dir}/checkpoints/best"
    Path(inside).mkdir(parents=True)
    classifier = {"architectures": ["SomeForSequenceClassification"]}
    Path(inside, "config.json").write_text(json.dumps(classifier))
    assert refused(f"{key}={inside}") == "output_dir"


@pytest.mark.parametrize("logger", ["TensorBoardLogger", "WandBLogger", "CometLogger"])
def test_a_logger_whose_package_is_missing_is_refused(read, monkeypatch, logger):
    for package in ("tensorboard", "wandb", "comet_ml"):
        monkeypatch.setitem(sys.modules, package, None)
    path = f"torchtune.training.metric_logging.{logger}"
    assert refused_key(read, f"metric_logger._component_={path}") == "metric_logger"


# ---- a config that is right ---------------------------------------------------------------------


def test_a_good_config_comes_back_resolved_with_every_default(cfg, check):
    settings = check()
    assert settings.tokenizer.path == f"{cfg.base_model_path}/vocab.json"
    assert settings.timeouts.reward_s == 10 and settings.reward_workers == 1
    assert settings.generator.enforce_eager is True
    whole = settings.model_dump()
    assert [key for key in whole if key in cfg] == list(cfg), "the order of keys is kept"
    assert "timeouts" not in cfg, "the given config is left alone"
    cfg.clear()
    cfg.update(whole)
    assert check() == settings
    check("output_dir=run")
    assert not Path("run").exists(), "checking leaves nothing behind"


def test_checking_imports_neither_ray_nor_vllm(cfg, tmp_path, interpreter):
    OmegaConf.save(cfg, tmp_path / "cfg.yaml")
    script = (
        "import sys\nfrom omegaconf import OmegaConf\n"
        "from grpo_components.config import preflight\n"
        f"preflight.check(OmegaConf.load({str(tmp_path / 'cfg.yaml')!r}))\n"
        "print(sorted({'ray', 'vllm'} & set(sys.modules)))"
    )
    done = interpreter("-c", script)
    assert done.stdout.strip() == "[]", done.stderr


def test_an_enabled_profiler_traces_into_the_folder_of_the_run(cfg, read):
    assert "output_dir" not in read().profiler
    profiler = read("profiler.enabled=true").profiler
    assert profiler.output_dir == f"{cfg.output_dir}/profile"
    assert (profiler.cuda, profiler.xpu) == (False, False)
    chosen = read("profiler.enabled=true profiler.output_dir=/elsewhere").profiler
    assert chosen.output_dir == "/elsewhere"


def test_held_out_prompts_follow_those_trained_on(check):
    held_out = check("dataset.chat_template=torchtune dataset.system_prompt=Briefly.").eval_dataset
    assert (held_out.chat_template, held_out.system_prompt) == ("torchtune", "Briefly.")


# ---- checkpointer -------------------------------------------------------------------------------

NODE = {
    "_component_": "torchtune.training.FullModelHFCheckpointer",
    "checkpoint_files": ["a.safetensors", "b.safetensors"],
    "model_type": "QWEN2",
}
NUMBERED = {"filename_format": "model-{}-of-{}.safetensors", "max_filename": "00002"}


def files(base, **change):
    found = checkpoint_files(OmegaConf.create(NODE | change), base, "/run")
    return [path.relative_to(base).name for path in found]


def test_checkpoint_files_are_named_or_numbered(tmp_path):
    assert files(tmp_path) == ["a.safetensors", "b.safetensors"]
    numbered = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert files(tmp_path, checkpoint_files=NUMBERED) == numbered
    files(tmp_path, _component_="my_checkpointers.Mine")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"_component_": "torchtune.training.FullModelMetaCheckpointer"}, "_component_"),
        ({"_component_": "torchtune.training.FullModelTorchTuneCheckpointer"}, "_component_"),
        ({"should_load_recipe_state": True}, "should_load_recipe_state"),
        ({"resume_from_checkpoint": True}, "resume_from_checkpoint"),
        ({"checkpoint_files": []}, "checkpoint_files"),
        ({"checkpoint_files": "a"}, "checkpoint_files"),
        ({"checkpoint_files": [1]}, "checkpoint_files"),
        ({"checkpoint_files": ["a"] * 10_001}, "checkpoint_files"),
        ({"checkpoint_files": {}}, "checkpoint_files.max_filename"),
        (
            {"checkpoint_files": NUMBERED | {"max_filename": "9" * 12}},
            "checkpoint_files.max_filename",
        ),
        ({"checkpoint_files": NUMBERED | {"filename_format": 3}}, "checkpoint_files"),
        ({"output_dir": "/dev/null/x"}, "output_dir"),
        ({"output_dir": "{base}/x"}, "output_dir"),
    ],
)
def test_a_checkpointer_that_would_fail_in_the_trainer_is_refused(change, key, tmp_path):
    if "output_dir" in change:
        change = {"output_dir": change["output_dir"].format(base=tmp_path)}
    assert refused_key(files, tmp_path, **change) == f"checkpointer.{key}"


# ---- paths --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        *("output_dir", "base_model_path", "tokenizer.path", "tokenizer.merges_file"),
        *("tokenizer.special_tokens_path", "checkpointer.checkpoint_dir", "dataset.source"),
        *("eval_dataset.source", "dataset.parts.math.source", "resume_from_checkpoint"),
        *("eval_only", "train_from", "replay_events", "reward_model.path", "ptx.source"),
        *("metric_logger.log_dir", "profiler.output_dir", "rewards.mine.model_path"),
        "environment.world.folder",
    ],
)
def test_a_tilde_is_the_home_folder_in_every_path(key, monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/me")
    values = OmegaConf.create({"output_dir": "/tmp/run"})
    OmegaConf.update(values, key, "~/x/y", force_add=True)
    OmegaConf.update(values, "dataset.prompt_template", "~/x/y", force_add=True)
    expanded = OmegaConf.create(expand_paths(OmegaConf.to_container(values)))
    assert OmegaConf.select(expanded, key) == "/home/of/me/x/y"
    assert expanded.dataset.prompt_template == "~/x/y", "other text is left alone"


def test_every_path_of_the_schema_is_known_by_its_name():
    paths = {"output_dir", "base_model_path", "resume_from_checkpoint", "eval_only", "train_from"}
    assert {key for key in Settings.model_fields if is_path(key)} == paths | {"replay_events"}


@pytest.mark.parametrize("key", ["output_dir", "base_model_path", "eval_only", "train_from"])
@pytest.mark.parametrize(
    "path", ["x" * 300, "a/" * 3000, "~nobody-of-this-name/x", "a\0b", "\ud800", "circle/x"]
)
def test_a_path_that_no_system_call_takes_is_refused_by_key(key, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("circle").symlink_to("circle")
    assert refused_key(expand_paths, {"output_dir": "/tmp/run", key: path}) == key


def test_the_files_of_a_run_must_fit_below_its_folder(tmp_path):
    name = os.pathconf("/", "PC_NAME_MAX")
    for long in ("x" * name, "x/" * 1900):
        assert refused_key(expand_paths, {"output_dir": f"{tmp_path}/{long}"}) == "output_dir"
    expand_paths({"output_dir": str(tmp_path / ("x" * (name - 8)))})


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", "[" * 100_000, "\udcff", '{"vocab_size": "x"}', '{"hidden_size": 1e9}', None],
)
def test_a_damaged_config_of_a_model_is_refused_by_its_key(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    assert refused_key(read_hf_config, "teacher.path", tmp_path) == "teacher.path"


# ---- output_dir against all other paths ---------------------------------------------------------

KEYS = ("resume_from_checkpoint", "eval_only", "rollout_only", "train_from", "replay_events")
INPUTS = {
    "base_model_path": "base",
    "dataset.source": "data",
    "eval_dataset.parts.0.source": "held",
    "environment.world.database": "env",
    "reward_model.path": "scorer",
    "train_from": "rollouts",
    "replay_events": "first",
}


@pytest.fixture
def values(tmp_path, monkeypatch):
    """What a config names, each in a place of its own."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    named = ("base/model", "base/vocab.json", "data/train.jsonl", "scorer/config.json", "env/db")
    for name in (*named, "first/logs/events.jsonl", "rollouts/trajectories.jsonl", "held/out.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return {
        "output_dir": str(tmp_path / "run"),
        "base_model_path": f"{tmp_path}/base",
        "tokenizer": {"path": f"{tmp_path}/base/vocab.json"},
        "checkpointer": {"checkpoint_dir": f"{tmp_path}/base", "output_dir": f"{tmp_path}/run"},
        "dataset": {"source": f"{tmp_path}/data/train.jsonl", "split": "train"},
        "eval_dataset": {"parts": [{"source": f"{tmp_path}/held/out.csv"}]},
        "environment": {"world": {"database": f"{tmp_path}/env/db"}},
        "reward_model": {"path": f"{tmp_path}/scorer"},
        "metric_logger": {"log_dir": f"{tmp_path}/run/logs"},
        "profiler": {"output_dir": f"{tmp_path}/run/profile"},
        "train_from": f"{tmp_path}/rollouts/trajectories.jsonl",
        "replay_events": f"{tmp_path}/first/logs/events.jsonl",
    }


@functools.cache
def tiny():
    return OmegaConf.to_container(OmegaConf.load(CONFIG), resolve=True)


def check_with(check, values, output_dir=None, **changes):
    """Check settings of the tiny config with these values in their sections."""
    nested = {key: value for key, value in values.items() if isinstance(value, dict)}
    sections = {key: {**tiny().get(key, {}), **value} for key, value in nested.items()}
    place = {} if output_dir is None else {"output_dir": str(output_dir)}
    check(read_settings({**tiny(), **values, **sections, **place, **changes}))


def is_refused(check, values, output_dir, **changes):
    """Return the problem of an output_dir that is refused."""
    error = refusal_of(check_with, check, values, output_dir, **changes)
    assert error.key == "output_dir"
    return error.problem


def test_a_folder_of_its_own_is_accepted_and_not_made(values, tmp_path):
    before = sorted(tmp_path.iterdir())
    check_with(check_inputs, values)
    check_with(check_folder, values)
    check_with(check_inputs, values, tmp_path / "a" / "run")
    assert sorted(tmp_path.iterdir()) == before
    Path("train").mkdir()  # the name of a split as well
    check_with(check_inputs, values, "train")


@pytest.mark.parametrize("where", ["{0}", "{0}/", "{1}", "../{2}", "{0}/../{2}"])
@pytest.mark.parametrize(("key", "folder"), INPUTS.items())
def test_a_folder_that_holds_what_is_read_is_refused(values, tmp_path, key, folder, where):
    (tmp_path / "link").symlink_to(tmp_path / folder)
    output_dir = where.format(tmp_path / folder, tmp_path / "link", folder)
    assert key in is_refused(check_inputs, values, output_dir)


@pytest.mark.parametrize("key", ["base_model_path", "reward_model.path", "replay_events"])
def test_a_folder_inside_of_what_is_read_is_refused(values, tmp_path, key):
    (tmp_path / "link").symlink_to(tmp_path / INPUTS[key])
    for inside in (tmp_path / INPUTS[key] / "a" / "b", tmp_path / "link" / "a"):
        assert key in is_refused(check_inputs, values, inside)


def test_a_link_to_what_lies_in_the_folder_is_followed(values, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.jsonl").touch()
    Path("train.jsonl").symlink_to(tmp_path / "run" / "mine.jsonl")
    values["dataset"]["source"] = "train.jsonl"
    assert "dataset.source" in is_refused(check_inputs, values, tmp_path / "run")


@pytest.mark.parametrize("place", ["/proc/foo/logs", "{0}/train.jsonl", "{0}/train.jsonl/logs"])
@pytest.mark.parametrize("key", ["metric_logger.log_dir", "profiler.output_dir"])
def test_a_place_where_nothing_can_be_made_is_refused_by_its_key(values, tmp_path, key, place):
    section, name = key.split(".")
    changed = {**values[section], name: place.format(tmp_path / "data"), "enabled": True}
    changed |= {name: tiny()[section][name] for name in tiny()[section] if name not in changed}
    assert refused_key(check_with, check_inputs, {**values, section: changed}) == key
    here = {**changed, name: str(tmp_path / "new" / "logs")}
    check_with(check_inputs, {**values, section: here})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("output_dir", [".", "..", "/", "/..", "/proc/foo", "/proc/self/a/b"])
def test_a_place_for_more_than_a_run_or_for_none_is_refused(values, output_dir):
    is_refused(check_inputs, values, output_dir)


@pytest.mark.parametrize("folder", ["/etc", "/usr", "~"])
def test_folders_of_the_system_and_homes_are_refused(values, tmp_path, monkeypatch, folder):
    home = tmp_path / "home"
    (home / ".config").mkdir(parents=True)
    (home / ".config" / "mine").touch()
    monkeypatch.setenv("HOME", str(home))
    is_refused(check_folder, values, Path(folder).expanduser())


@pytest.mark.parametrize("key", [None, *KEYS])
def test_a_folder_in_use_is_refused_for_every_kind_of_run(values, tmp_path, key):
    write_checkpoint(tmp_path / "run/checkpoints/step_2")
    (tmp_path / "run/checkpoints/latest").symlink_to("step_2")
    lock = lock_folder(tmp_path / "run")
    changes = {} if key is None else {key: True if key in KEYS[:3] else values[key]}
    assert str(os.getpid()) in is_refused(check_folder, values, None, **changes)
    lock.release()


def test_a_run_goes_on_in_its_folder_whatever_else_lies_there(values, tmp_path):
    write_checkpoint(tmp_path / "run/checkpoints/step_2")
    (tmp_path / "run" / "notes.md").touch()
    for path in (f"{tmp_path}/run/checkpoints/step_2", "../run/checkpoints/step_2"):
        check_with(check_folder, values, resume_from_checkpoint=path)
    is_refused(check_folder, values, None)


@pytest.mark.parametrize("output_dir", ["kept/step_2", "kept/step_2/more", "kept"])
def test_the_checkpoint_of_another_run_is_not_written_to(values, tmp_path, output_dir):
    write_checkpoint(tmp_path / "kept/step_2")
    (tmp_path / "kept/receipts.jsonl").write_text('{"record": "start"}\n')
    resumed = {"resume_from_checkpoint": f"{tmp_path}/kept/step_2"}
    is_refused(check_folder, values, tmp_path / output_dir, **resumed)
