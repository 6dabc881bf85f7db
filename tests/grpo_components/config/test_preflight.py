"""A config that cannot run ends in one line that names the key and what is allowed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from grpo_components.config import preflight
from grpo_components.config.training_checks import MAX_GENERATOR_KL

CONFIG = Path(__file__).parents[3] / "recipes/configs/tiny_async_grpo.yaml"
FILES = ("model.safetensors", "vocab.json", "merges.txt", "tokenizer.json")


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    """The tiny config over a folder like the tiny policy, in a current folder of its own."""
    base, here = tmp_path / "tiny_policy", tmp_path / "here"
    for folder in (base / "data", here):
        folder.mkdir(parents=True)
    for name in (*FILES, "data/train.jsonl", "data/held_out.jsonl"):
        (base / name).touch()
    (base / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    cfg = OmegaConf.load(CONFIG)
    assert isinstance(cfg, DictConfig)
    cfg.base_model_path, cfg.output_dir = str(base), str(tmp_path / "run")
    # The numbers that the tests below count with, however the config is tuned.
    cfg.groups_per_step = cfg.group_size = 8
    cfg.dataset.max_prompt_tokens, cfg.generator.max_response_tokens = 64, 32
    return cfg


DECAY = "{schedule: linear, start: 0.1, end: 0.01, num_steps: 9}"
COSINE = "{_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 3}"  # noqa: E501
TIS = "{_component_: grpo_components.objective.off_policy.TokenTIS}"


def changed(cfg: DictConfig, *overrides: str) -> DictConfig:
    """The config with overrides as on the command line."""
    given = OmegaConf.from_dotlist(list(overrides))
    for key in ("loss", "off_policy"):
        if isinstance(given.get(key), str):  # torchtune's short form for a component
            given[key] = {"_component_": given[key]}
    merged = OmegaConf.merge(cfg, given)
    assert isinstance(merged, DictConfig)
    return merged


def refusal(cfg: DictConfig, *overrides: str) -> str:
    """The message with which a config is refused."""
    with pytest.raises(ValueError) as refused:
        preflight.check(changed(cfg, *overrides))
    message = str(refused.value)
    assert "\n" not in message
    assert "; allowed: " in message
    return message


def test_a_good_config_comes_back_resolved_with_every_default(cfg):
    checked = preflight.check(cfg)
    assert checked.tokenizer.path == f"{cfg.base_model_path}/vocab.json"
    assert checked.timeouts.reward_s == 10 and checked.reward_workers == 1
    assert checked.generator.enforce_eager is True
    assert checked.rewards.correctness.weight == 1.0
    assert list(checked)[: len(cfg)] == list(cfg), "the order of keys is kept"
    assert "timeouts" not in cfg, "the given config is left alone"
    assert preflight.check(checked) == checked


def test_a_default_can_be_overridden_alone(cfg):
    cfg.timeouts = {"rollout_s": 60}
    checked = preflight.check(cfg)
    assert checked.timeouts.rollout_s == 60.0 and checked.timeouts.startup_s == 600.0


@pytest.mark.parametrize("key", list(preflight.SCHEMA))
def test_a_key_that_is_left_out_has_a_default_or_is_named(cfg, key):
    full = preflight.check(cfg)
    del full[key]
    try:
        checked = preflight.check(full)
    except ValueError as refused:
        assert str(refused).startswith(key)
    else:
        assert key in checked


@pytest.mark.parametrize(
    ("override", "start", "allowed"),
    [
        ("group_size=1", "group_size: 1 given", "a whole number at least 2"),
        ("group_size=eight", "group_size: 'eight' given", "a whole number at least 2"),
        ("group_size=8.0", "group_size: 8.0 given", "a whole number"),
        ("group_size=true", "group_size: true given", "a whole number"),
        ("group_size=null", "group_size: null given", "a whole number"),
        ("groups_per_step=0", "groups_per_step: 0 given", "at least 1"),
        ("num_steps=-5", "num_steps: -5 given", "at least 1"),
        ("num_generators=0", "num_generators: 0 given", "at least 1"),
        ("seed=-1", "seed: -1 given", "at least 0 and at most 2147483647"),
        ("device=gpu", "device: 'gpu' given", "cpu | cuda"),
        ("dtype=fp16", "dtype: 'fp16' given", "fp32 | bf16"),
        ("log_level=warning", "log_level: 'warning' given", "DEBUG | INFO | WARNING | ERROR"),
        ("stale_groups=keep", "stale_groups: 'keep' given", "drop | wait"),
        ("shuffle=1", "shuffle: 1 given", "true | false"),
        ("shuffle=yes please", "shuffle: 'yes please' given", "true | false"),
        ("output_dir=''", "output_dir: '' given", "text"),
        ("resume_from_checkpoint=3", "resume_from_checkpoint: 3 given", "true | false | a path"),
        ("resume_from_checkpoint=true", "resume_from_checkpoint: true given", "false, or the path"),
        ("checkpoint_failure=ignore", "checkpoint_failure: 'ignore' given", "error | warn"),
        ("keep_last_n=0", "keep_last_n: 0 given", "at least 1 or null"),
        ("profiler.enabled=1", "profiler.enabled: 1 given", "true | false"),
        ("profiler.active_steps=0", "profiler.active_steps: 0 given", "at least 1"),
        ("packing=true", "packing: true given with device: cpu", "device: cuda"),
        ("max_skipped_steps=0", "max_skipped_steps: 0 given", "at least 1"),
        ("optimizer.lr=0", "optimizer.lr: 0 given", "a number above 0"),
        ("optimizer.lr=.nan", "optimizer.lr: nan given", "a number above 0"),
        ("optimizer.lr=.inf", "optimizer.lr: inf given", "a number above 0"),
        ("optimizer.lr='1e-6'", "optimizer.lr: '1e-6' given", "a number above 0"),
        ("loss.kl_coeff=-0.1", "loss.kl_coeff: -0.1 given", "a number at least 0"),
        ("loss.clip_low=1.5", "loss.clip_low: 1.5 given", "above 0 and at most 1"),
        ("generator.temperature=0", "generator.temperature: 0 given", "a number above 0"),
        ("generator.stop_token_ids=[a]", "generator.stop_token_ids: ['a'] given", "token ids or"),
        ("generator.max_num_seqs=0", "generator.max_num_seqs: 0 given", "at least 1"),
        ("generator=7", "generator: 7 given", "a mapping with max_response_tokens, temperature"),
        ("timeouts.reward_s=0", "timeouts.reward_s: 0 given", "a number above 0"),
        ("clip_grad_norm=0", "clip_grad_norm: 0 given", "a number above 0 or null"),
        ("gpus_per_trainer=2", "gpus_per_trainer: 2 given", "above 0 and at most 1"),
        (
            "checkpointer.model_type=GEMMA2",
            "checkpointer.model_type: 'GEMMA2' given, but torchtune 0.6.1 swaps Gemma 2's norms",
            "| QWEN2",
        ),
        (
            "checkpointer.model_type=LLAMA3_VISION",
            "checkpointer.model_type: 'LLAMA3_VISION' given, but it is multimodal",
            "LLAMA2 | LLAMA3",
        ),
        ("checkpointer.model_type=QWEN3", "checkpointer.model_type: 'QWEN3' given;", "| QWEN2"),
        ("dataset.num_rows=0", "dataset.num_rows: 0 given", "at least 1 or null"),
        ("rewards=null", "rewards: null given", "one `_component_` or more"),
        ("rewards.correctness.weight=.nan", "rewards.correctness.weight: nan", "a number"),
        (
            "rewards.correctness.answer_format=xml",
            "rewards.correctness.answer_format: 'xml' given",
            "tag, boxed",
        ),
        ("rewards.correctness.is_success=1", "rewards.correctness.is_success: 1", "true | false"),
        (
            "rewards.correctness.is_success=false",
            "rewards: is_success: true on none",
            "exactly one",
        ),
        ("model=null", "model: null given", "_component_ and its arguments"),
        ("model=Qwen", "model: 'Qwen' given", "_component_ and its arguments"),
        ("model._component_=null", "model: null given", "_component_ and its arguments"),
        ("seed=${nothing}", "seed: Interpolation key 'nothing' not found", "a value of its own"),
        *(
            (f"seed={given}", f"seed: '{given}' given", "${key} alone, and no resolver")
            for given in ("${eval:1}", "${oc.env:HOME}", "a ${oc.decode:b}", "${${seed}:1}")
        ),
        ("dataset.source=${dataset.${device}}", "dataset.source: ", "no resolver"),
    ],
)
def test_a_wrong_value_names_its_key_and_what_is_allowed(cfg, override, start, allowed):
    message = refusal(cfg, override)
    assert message.startswith(start)
    assert allowed in message.partition("; allowed: ")[2]


def test_rewards_are_a_mapping_from_names(cfg):
    cfg.rewards = {}
    assert refusal(cfg).startswith("rewards: {} given")
    cfg.rewards = [{"_component_": "some.Reward"}]
    assert refusal(cfg).startswith("rewards: [{'_component_': 'some.Reward'}] given")


def test_a_value_still_to_be_filled_in_is_refused(cfg):
    cfg.seed = "???"
    assert refusal(cfg).startswith("seed: Missing mandatory value")


@pytest.mark.parametrize(
    ("override", "start", "hint"),
    [
        ("group_sise=8", "group_sise: unknown key", "did you mean group_size?"),
        ("learning_rate=1", "learning_rate: unknown key", "the keys that `tune cat"),
        ("temperature=1", "temperature: unknown key", "did you mean generator.temperature?"),
        ("lr=1e-6", "lr: unknown key", "did you mean optimizer.lr?"),
        (
            "generator.max_tokens=1",
            "generator.max_tokens: unknown key",
            "max_response_tokens, temp",
        ),
        (
            "generator.temperatures=1",
            "generator.temperatures: unknown",
            "did you mean generator.temper",
        ),
        ("timeouts.rewards_s=1", "timeouts.rewards_s: unknown", "did you mean timeouts.reward_s?"),
        (
            "optimizer.weight_decays=0",
            "optimizer.weight_decays: unknown",
            "optimizer.weight_decay?",
        ),
        (
            "model.num_layer=4",
            "model.num_layer: unknown argument",
            "did you mean model.num_layers?",
        ),
        ("dataset.src=x", "dataset.src: unknown argument of grpo_components", "source"),
        ("loss.epsilon=0.2", "loss.epsilon: unknown key", "clip_low, clip_high, kl_coeff"),
        (
            "rewards.correctness.weights=1",
            "rewards.correctness.weights: unknown",
            "correctness.weight?",
        ),
        ("metric_logger.dir=x", None, None),  # the logger takes any further argument
    ],
)
def test_an_unknown_key_gets_a_suggestion(cfg, override, start, hint):
    if start is None:
        preflight.check(changed(cfg, override))
        return
    message = refusal(cfg, override)
    assert message.startswith(start)
    assert hint in message


@pytest.mark.parametrize("max_staleness", [0, 1, 5])
def test_pushes_must_come_within_the_staleness_bound(cfg, max_staleness):
    at_most = f"push_every_n_steps={max_staleness + 1}"
    too_rare = f"push_every_n_steps={max_staleness + 2}"
    cfg.max_staleness = max_staleness
    preflight.check(changed(cfg, at_most))
    message = refusal(cfg, too_rare)
    assert message.startswith("push_every_n_steps: ")
    assert f"at most max_staleness + 1 = {max_staleness + 1}" in message


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["loss.kl_coeff=0.1", "num_references=0"], "num_references"),
        (["min_generators=2"], "min_generators"),
        ([f"loss.kl_coeff={DECAY}", "num_references=0"], "num_references"),
        (["reward_shaping.kl_coeff=0.1", "num_references=0"], "num_references"),
        (["reward_shaping.overlong_tokens=33"], "reward_shaping.overlong_tokens"),
        (["log_token_logprobs=true", "rollouts_logged_per_step=0"], "log_token_logprobs"),
        ([f"optimizer.lr={DECAY}", f"lr_scheduler={COSINE}"], "lr_scheduler"),
        (
            ["loss=grpo_components.objective.losses.DecoupledPPOLoss", f"off_policy={TIS}"],
            "off_policy",
        ),
        (["generator.top_p=0.9"], "generator.top_p"),
        (["generator.top_k=50"], "generator.top_k"),
        (["generator.min_p=0.1"], "generator.min_p"),
        (["generator.presence_penalty=0.5"], "generator.presence_penalty"),
        (["generator.frequency_penalty=-0.5"], "generator.frequency_penalty"),
        (["generator.repetition_penalty=1.1"], "generator.repetition_penalty"),
        (["num_trainers=65"], "num_trainers"),
        (["num_trainers=2", "updates_per_batch=33"], "num_trainers"),
        (["tensor_parallel_dim=2", "num_trainers=3"], "tensor_parallel_dim"),
        (["tokens_per_micro_batch=95"], "tokens_per_micro_batch"),
        (["generator.max_model_len=95"], "generator.max_model_len"),
        (["generator.max_response_tokens=449"], "generator.max_response_tokens"),
    ],
)
def test_values_that_contradict_each_other_are_refused(cfg, overrides, key):
    assert refusal(cfg, *overrides).startswith(f"{key}: ")


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.kl_coeff=0", "num_references=0"],
        ["min_generators=2", "num_generators=2"],
        ["num_trainers=2", "updates_per_batch=32"],
        ["num_trainers=4", "tensor_parallel_dim=2", "data_parallel_replicate_dim=2"],
        ["tokens_per_micro_batch=96"],
        ["generator.max_model_len=96"],
        ["generator.max_response_tokens=448"],
        ["pull_every_m_rollouts=1000"],
        ["rewards.correctness.weight=-1"],
        ["generator.stop_token_ids=[1,2]"],
        ["seed=0"],
        ["reward_shaping.overlong_tokens=32"],
        [f"loss.kl_coeff={DECAY}"],
        [f"optimizer.lr={DECAY}"],
        [f"off_policy={TIS}"],
        ["off_policy={_component_: grpo_components.objective.off_policy.OffPolicySequenceMask}"],
        ["generator.top_k=-1", "generator.top_p=1", "generator.repetition_penalty=1.0"],
        ["generator.top_p=0.9", "generator.top_k=50", "generator.allow_biased_sampling=true"],
    ],
)
def test_values_at_the_edge_are_accepted(cfg, overrides):
    preflight.check(changed(cfg, *overrides))


def test_heads_that_cannot_be_split_are_refused(cfg):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}
    (Path(cfg.base_model_path) / "config.json").write_text(json.dumps(heads))
    preflight.check(changed(cfg, "num_trainers=2", "tensor_parallel_dim=2"))
    message = refusal(cfg, "num_trainers=4", "tensor_parallel_dim=4")
    assert message.startswith("tensor_parallel_dim: 4 given, and the model's num_key_value_heads")


def test_a_biased_sampler_is_refused_with_the_reason(cfg):
    message = refusal(cfg, "generator.top_p=0.9")
    assert "another distribution than the one the trainer computes" in message
    assert message.endswith("allowed: 1, or generator.allow_biased_sampling: true")


def test_two_rewards_cannot_both_mean_success(cfg):
    cfg.rewards.other = cfg.rewards.correctness
    assert "is_success: true on correctness and other" in refusal(cfg)


def test_the_scheduler_may_be_a_component_or_null(cfg):
    path = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
    cfg.lr_scheduler = {"_component_": path, "num_warmup_steps": 3}
    assert preflight.check(cfg).lr_scheduler.num_warmup_steps == 3
    cfg.lr_scheduler = {
        "_component_": None,
        "num_warmup_steps": 3,
    }  # what `lr_scheduler=null` on the command line does
    assert preflight.check(cfg).lr_scheduler is None
    cfg.lr_scheduler = {"_component_": path}
    assert refusal(cfg).startswith("lr_scheduler.num_warmup_steps: missing")
    assert refusal(cfg, "lr_scheduler=cosine").startswith("lr_scheduler: 'cosine' given")


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
def test_a_missing_file_is_named_with_its_key(cfg, file, key):
    missing = Path(cfg.base_model_path) / file
    missing.unlink()
    assert refusal(cfg).startswith(f"{key}: no file {missing}")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("tiny_policy", "python -m grpo_components.examples.tiny_policy"),
        ("Qwen2.5-3B", "tune download Qwen/Qwen2.5-3B --output-dir /nowhere/Qwen2.5-3B"),
        ("Mistral-7B", "tune download <owner>/Mistral-7B --output-dir /nowhere/Mistral-7B"),
    ],
)
def test_a_missing_model_comes_with_the_command_that_gets_it(cfg, name, command):
    message = refusal(cfg, f"base_model_path=/nowhere/{name}")
    assert message.startswith(f"base_model_path: no folder /nowhere/{name};")
    assert f"`{command}`" in message


def test_checkpoint_files_may_be_numbered(cfg):
    files = {"filename_format": "model-{}-of-{}.safetensors", "max_filename": "00002"}
    cfg.checkpointer.checkpoint_files = files
    assert "model-00001-of-00002.safetensors" in refusal(cfg)
    for number in (1, 2):
        (Path(cfg.base_model_path) / f"model-0000{number}-of-00002.safetensors").touch()
    preflight.check(cfg)
    cfg.checkpointer.checkpoint_files = []
    assert refusal(cfg).startswith("checkpointer.checkpoint_files: [] given")


def test_trainer_and_generators_start_from_one_checkpoint(cfg, tmp_path):
    message = refusal(cfg, f"checkpointer.checkpoint_dir={tmp_path}")
    assert message.startswith(f"checkpointer.checkpoint_dir: {tmp_path} given")


def test_an_output_folder_never_holds_what_is_not_of_the_run(cfg, tmp_path, monkeypatch):
    assert refusal(cfg, f"output_dir={tmp_path}").startswith("output_dir: ")
    assert refusal(cfg, "output_dir=.").startswith("output_dir: ")
    assert refusal(cfg, f"output_dir={cfg.base_model_path}").startswith("output_dir: ")
    preflight.check(changed(cfg, "output_dir=run"))


@pytest.mark.parametrize("key", ["eval_only", "train_from", "reward_model.path"])
def test_what_is_read_while_the_run_goes_on_is_not_moved_aside(cfg, key):
    """As where a run's own checkpoint is evaluated into the run's folder."""
    inside = f"{cfg.output_dir}/checkpoints/best"
    Path(inside).mkdir(parents=True)
    classifier = {"architectures": ["SomeForSequenceClassification"]}
    Path(inside, "config.json").write_text(json.dumps(classifier))
    assert refusal(cfg, f"{key}={inside}").startswith(f"output_dir: {inside} lies in ")
    assert not Path("run").exists(), "checking leaves nothing behind"


def test_an_output_folder_must_be_possible(cfg, tmp_path):
    (tmp_path / "file").touch()
    message = refusal(cfg, f"output_dir={tmp_path}/file/run")
    assert message.startswith(f"output_dir: {tmp_path}/file is not a folder to write to")


@pytest.mark.parametrize(
    ("logger", "package", "arguments"),
    [
        ("TensorBoardLogger", "tensorboard", {"log_dir": "x"}),
        ("WandBLogger", "wandb", {}),
        ("CometLogger", "comet_ml", {}),
    ],
)
def test_a_logger_whose_package_is_missing_says_how_to_get_it(
    cfg, monkeypatch, logger, package, arguments
):
    monkeypatch.setitem(sys.modules, package, None)
    path = f"torchtune.training.metric_logging.{logger}"
    cfg.metric_logger = {"_component_": path, **arguments}
    message = refusal(cfg)
    assert message.startswith(f"metric_logger: {logger} needs the package {package}")
    assert f"`pip install {package}`" in message


OWN_MODULE = """
class Good:
    def __init__(self, limit: int):
        self.limit = limit
    def __call__(self, *, prompt_text, response_text, answer, finish_reason):
        return 1.0

class Inherited(Good):
    pass

class TakesNothing:
    def __call__(self, text):
        return 1.0

class CannotBeCalled:
    pass

def make(**kwargs):
    return Good(1)

def judge(*, prompt_text, response_text, answer, finish_reason):
    return 1.0

number = 3
"""


def test_components_may_stand_in_the_current_folder(cfg):
    Path("own_rewards_good.py").write_text(OWN_MODULE)
    for name in ("Good", "Inherited"):
        node = {"_component_": f"own_rewards_good.{name}", "limit": 3}
        cfg.rewards.mine = node
        preflight.check(cfg)
    cfg.rewards.mine = {"_component_": "own_rewards_good.make", "anything": 1}
    preflight.check(cfg)


@pytest.mark.parametrize(
    ("node", "start"),
    [
        ({"_component_": "own_rewards_bad.Good"}, "rewards.mine.limit: missing"),
        ({"_component_": "own_rewards_bad.TakesNothing"}, "rewards.mine: objects of"),
        ({"_component_": "own_rewards_bad.CannotBeCalled"}, "rewards.mine: objects of"),
        ({"_component_": "own_rewards_bad.Absent"}, "rewards.mine._component_: own_rewards_bad.Ab"),
        ({"_component_": "own_rewards_bad.number"}, "rewards.mine._component_: own_rewards_bad.nu"),
        (
            {"_component_": "own_rewards_bad.judge"},
            "rewards.mine._component_: own_rewards_bad.judge ",
        ),
        (
            {"_component_": "grpo_components.rewards.formats.ResponseLength", "max_words": "many"},
            "rewards.mine.max_words, min_words: 'many', 0 given",
        ),
        (
            {"_component_": "grpo_components.rewards.code_tests.CodeTests", "wall_s": "8"},
            "rewards.mine.wall_s: '8' given",
        ),
        ({"_component_": "no_such_module.X"}, "rewards.mine._component_: no_such_module.X cannot"),
        ({"_component_": "..X"}, "rewards.mine._component_: ..X cannot be imported"),
        ({"weight": 1.0}, "rewards.mine: {'weight': 1.0} given"),
    ],
)
def test_a_component_that_cannot_be_used_is_refused(cfg, node, start):
    Path("own_rewards_bad.py").write_text(OWN_MODULE)
    cfg.rewards.mine = node
    assert refusal(cfg).startswith(start)


def test_a_broken_module_of_the_user_is_named_with_its_line(cfg):
    Path("own_rewards_broken.py").write_text("import os\nthis_is_not_defined\n")
    cfg.rewards.mine = {"_component_": "own_rewards_broken.Reward"}
    message = refusal(cfg)
    assert "NameError: name 'this_is_not_defined' is not defined" in message
    assert "own_rewards_broken.py:2" in message


def test_the_current_folder_hides_no_installed_package(cfg):
    Path("datasets.py").write_text("raise AssertionError('imported the wrong module')\n")
    preflight.check(cfg)
    assert sys.path[-1] == str(Path.cwd())


MULTI_TURN = (
    "environment._component_=grpo_components.rollout.multi_turn.MultiTurnEnvironment",
    "environment.max_turns=4",
    "environment.world._component_=grpo_components.rollout.tools.shipped_tools",
)


@pytest.mark.parametrize(
    ("overrides", "start", "allowed"),
    [
        (["environment.max_turns=0"], "environment.max_turns: 0 given", "at least 1"),
        (["environment.max_turns=two"], "environment.max_turns: 'two' given", "a whole number"),
        (
            ["environment.max_turns=33"],
            "environment.max_turns: 33 given, and a turn takes a token or more",
            "at most generator.max_response_tokens = 32",
        ),
        (["environment.turns=3"], "environment.turns: unknown argument", "max_turns"),
        (
            ["environment.num_slots=3"],
            "environment.num_slots: given, and the recipe sets",
            "without",
        ),
        (["~environment.world"], "environment.world: missing", "MultiTurnEnvironment"),
        (["environment.world.tool=[]"], "environment.world.tool: unknown", "world.tools"),
        (
            ["environment.world.tools=[browser]"],
            "environment.world: tools: 'browser' given",
            "calculator, python",
        ),
        (
            ["environment.world._component_=my_worlds.Nowhere"],
            "environment.world._component_: my_worlds.Nowhere cannot be imported",
            "a dotted path",
        ),
        (
            ["environment.world=my_worlds.SecretDigit"],
            "environment.world: 'my_worlds.SecretDigit' given",
            "`_component_` and its arguments",
        ),
        (
            ["environment.world._component_=their_worlds.Forgetful", "~environment.world.tools"],
            "environment.world: objects of their_worlds.Forgetful cannot be called",
            "a class called with prompt, seed",
        ),
    ],
)
def test_an_environment_of_several_turns_is_checked_with_its_world(cfg, overrides, start, allowed):
    cfg.environment = {}
    cfg = changed(cfg, *MULTI_TURN)
    cfg.environment.world.tools = ["calculator"]
    preflight.check(cfg)
    world = "class Forgetful:\n    def __call__(self, prompt):\n        pass\n"
    Path("their_worlds.py").write_text(world)
    for removed in [override for override in overrides if override.startswith("~")]:
        parent, _, name = removed[1:].rpartition(".")
        del OmegaConf.select(cfg, parent)[name]
    overrides = [override for override in overrides if not override.startswith("~")]
    message = refusal(cfg, *overrides)
    assert message.startswith(start) and allowed in message.partition("; ")[2]


@pytest.fixture
def num_gpus(monkeypatch: pytest.MonkeyPatch):
    """Pretends that the machine has so many GPUs."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


def test_cuda_without_a_gpu_is_refused(cfg, num_gpus):
    num_gpus(0)
    message = refusal(cfg, "device=cuda")
    assert message.startswith("device: cuda given, and PyTorch")
    assert message.endswith("allowed: cpu")


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        (["num_generators=4", "num_trainers=3", "loss.kl_coeff=0.1"], 8),
        (["num_generators=4", "num_trainers=3"], 7),  # the reference is not started
        (["num_generators=3", "gpus_per_generator=0.5", "generator.gpu_memory_utilization=0.4"], 3),
        (["num_generators=3", "gpus_per_generator=0.9", "num_trainers=1"], 4),
        (["num_generators=2", "gpus_per_generator=0.7", "gpus_per_trainer=0.3"], 2),
        (["num_generators=2", "num_trainers=3", "eval_only=true"], 2),  # no trainer is started
    ],
)
def test_roles_need_so_many_gpus_and_no_fewer(cfg, num_gpus, overrides, gpus):
    overrides = ["device=cuda", "generator.gpu_memory_utilization=0.4", *overrides]
    num_gpus(gpus)
    checked = preflight.check(changed(cfg, *overrides))
    assert checked.generator.enforce_eager is False
    num_gpus(gpus - 1)
    message = refusal(cfg, *overrides)
    assert message.startswith("num_generators: " if gpus > 1 else "device: ")
    assert f"need {gpus} GPUs, and there are {gpus - 1}" in message


def test_shares_of_a_gpu_must_be_possible(cfg, num_gpus):
    num_gpus(8)
    message = refusal(cfg, "device=cuda", "gpus_per_generator=0.4")
    assert message.startswith("generator.gpu_memory_utilization: 0.85 given")
    message = refusal(cfg, "device=cuda", "gpus_per_trainer=0.5", "num_trainers=2")
    assert message.startswith("gpus_per_trainer: 0.5 given")


def test_checking_imports_neither_ray_nor_vllm(cfg, tmp_path):
    OmegaConf.save(cfg, tmp_path / "cfg.yaml")
    script = (
        "import sys\nfrom omegaconf import OmegaConf\n"
        "from grpo_components.config import preflight\n"
        f"preflight.check(OmegaConf.load({str(tmp_path / 'cfg.yaml')!r}))\n"
        "print(sorted({'ray', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("hf_config", "why"),
    [
        ({"model_type": "gemma2"}, "is a gemma2 model; torchtune 0.6.1 swaps Gemma 2's norms"),
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, "is a qwen2_5_vl model; it is multimo"),
    ],
)
def test_a_base_model_that_cannot_be_trained_is_told_by_its_own_config(cfg, hf_config, why):
    (Path(cfg.base_model_path) / "config.json").write_text(json.dumps(hf_config))
    message = refusal(cfg)
    assert message.startswith("base_model_path: ")
    # A long path may have taken the place of the end of the reason.
    assert why[: 1 + why.index("model")] in message
    assert message.endswith("PHI4, QWEN2")


def test_an_enabled_profiler_traces_into_the_folder_of_the_run(cfg):
    assert "output_dir" not in preflight.check(cfg).profiler
    cfg.profiler.enabled = True
    checked = preflight.check(cfg).profiler
    assert checked.output_dir == f"{cfg.output_dir}/profile"
    assert (checked.cuda, checked.xpu) == (False, False)
    cfg.profiler.output_dir = "/elsewhere"
    assert preflight.check(cfg).profiler.output_dir == "/elsewhere"
    message = refusal(cfg, "profiler.steps=3")
    assert message.startswith("profiler.steps: unknown argument")


def test_packed_rows_must_fit_the_models_positions(cfg, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    packing = ("device=cuda", "packing=true")
    assert preflight.check(changed(cfg, *packing, "tokens_per_micro_batch=512")).packing
    message = refusal(cfg, *packing, "tokens_per_micro_batch=513")
    assert message.startswith("tokens_per_micro_batch: 513 given with packing: true")
    assert message.endswith("at most the model's 512")


@pytest.mark.parametrize("key", ["dataset", "eval_dataset"])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("rows.jsonl.gz", "is a file of another kind"),
        ("rows.tsv", "is a file of another kind"),
        ("rows", "is a file of another kind"),
        ("folder", "is a folder"),
        ("folder.jsonl", "is a folder"),
        ("nowhere.jsonl", "no file"),
        ("nowhere/rows.parquet", "no file"),
    ],
)
def test_a_local_data_set_that_is_no_file_of_rows_is_refused(cfg, key, name, problem):
    path = Path(cfg.base_model_path) / name
    if name.startswith("folder"):
        path.mkdir()
    elif name.startswith("rows"):
        path.touch()
    message = refusal(cfg, f"{key}.source={path}")
    assert message.startswith(f"{key}.source: ") and problem in message and str(path) in message


def test_a_data_set_need_have_no_source_of_its_own(cfg):
    part = OmegaConf.to_container(cfg.dataset, resolve=True)
    cfg.eval_dataset = part  # it refers to keys that a mix has not
    cfg.dataset = {
        "_component_": "grpo_components.data.prompt_mix.mixed_dataset",
        "parts": {"first": part, "second": {**part, "weight": 2}},
    }
    assert preflight.check(cfg).dataset.parts.second.weight == 2
    cfg.dataset.wait = 2
    assert refusal(cfg).startswith("dataset.wait: unknown argument")


def test_the_object_store_must_fit_into_this_machine(cfg):
    assert refusal(cfg, "object_store_memory=1").startswith("object_store_memory: 1 given")
    assert refusal(cfg, "object_store_memory=1000000000000000").startswith("object_store_memory: ")
    preflight.check(changed(cfg, "object_store_memory=80000000"))


def test_programs_are_ended_before_their_reward_is(cfg):
    node = {"_component_": "grpo_components.rewards.code_tests.CodeTests"}
    cfg.rewards.code = node
    preflight.check(cfg)
    assert refusal(cfg, "timeouts.reward_s=8").startswith("rewards.code.wall_s: 8 given with time")
    assert refusal(cfg, "rewards.code.cpu_s=0").startswith("rewards.code.cpu_s: 0 given")


def test_a_learned_reward_is_a_classifier_under_a_name_of_its_own(cfg, tmp_path):
    folder = tmp_path / "classifier"
    given = f"reward_model.path={folder}"
    assert refusal(cfg, given).startswith(f"reward_model.path: no file {folder}/config.json")
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    assert "has a Qwen2ForCausalLM; allowed: a model ForSequence" in refusal(cfg, given)
    (folder / "config.json").write_text('{"architectures": ["Qwen2ForSequenceClassification"]}')
    preflight.check(changed(cfg, given))
    preflight.check(changed(cfg, "reward_model=null"))
    preflight.check(changed(cfg, "reward_model.path=owner/name-on-the-hub"))
    cfg.rewards.reward_model = {"_component_": "grpo_components.rewards.formats.BoxedFormat"}
    preflight.check(cfg)
    assert refusal(cfg, given).startswith("rewards.reward_model: given beside reward_model.path")


# ---- trainer against generator ------------------------------------------------------------------


def test_the_bound_on_their_disagreement_is_the_dtypes_or_the_users(cfg):
    def bound(*overrides):
        return preflight.check(changed(cfg, *overrides)).max_generator_kl

    bent = ("generator.top_p=0.9", "generator.allow_biased_sampling=true")
    assert bound() == MAX_GENERATOR_KL["fp32"]
    assert bound("max_generator_kl=0.5") == bound("max_generator_kl=0.5", *bent) == 0.5
    assert bound(*bent) is None
    for wrong in ("0", "-1", "much"):
        message = refusal(cfg, f"max_generator_kl={wrong}")
        assert message.startswith("max_generator_kl: ")
        assert wrong in message


def test_held_out_prompts_follow_those_trained_on_or_are_refused(cfg):
    chat = ("dataset.chat_template=torchtune", "dataset.system_prompt=Briefly.")
    checked = preflight.check(changed(cfg, *chat))
    assert checked.eval_dataset.chat_template == "torchtune"
    assert checked.eval_dataset.system_prompt == "Briefly."
    message = refusal(cfg, *chat, "eval_dataset.chat_template=null")
    assert message.startswith("eval_dataset.chat_template: null, and dataset.chat_template is ")
    preflight.check(
        changed(cfg, *chat, "eval_dataset.chat_template=null", "eval.allow_other_prompts=true")
    )
