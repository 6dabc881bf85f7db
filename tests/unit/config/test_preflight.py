"""A config is read, completed and checked as a whole before anything starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpo_components.config.training_checks import MAX_GENERATOR_KL


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


@pytest.mark.parametrize(
    ("override", "key", "allowed"),
    [
        ("resume_from_checkpoint=true", "resume_from_checkpoint", "false, or the path"),
        ("group_size=eight", "group_size", "a whole number at least 2"),
        ("seed=${nothing}", "seed", "a value of its own"),
        *(
            (f"seed={given}", "seed", "${key} alone, and no resolver")
            for given in ("${eval:1}", "${oc.env:HOME}", "a ${oc.decode:b}", "${${seed}:1}")
        ),
        ("dataset.source=${dataset.${device}}", "dataset.source", "no resolver"),
    ],
)
def test_what_is_refused_names_its_key_and_what_is_allowed(refusal, override, key, allowed):
    message = refusal(override)
    assert message.startswith(f"{key}: ") and allowed in message.partition("; allowed: ")[2]


def test_a_value_still_to_be_filled_in_is_refused(cfg, refusal):
    cfg.seed = "???"
    assert refusal().startswith("seed: ")


def test_an_output_folder_never_holds_what_is_not_of_the_run(cfg, check, refusal, tmp_path):
    (tmp_path / "file").touch()
    for wrong in (tmp_path, ".", cfg.base_model_path, f"{tmp_path}/file/run"):
        assert refusal(f"output_dir={wrong}").startswith("output_dir: ")
    check("output_dir=run")
    assert not Path("run").exists(), "checking leaves nothing behind"


@pytest.mark.parametrize("key", ["eval_only", "train_from", "reward_model.path"])
def test_what_is_read_while_the_run_goes_on_is_not_moved_aside(cfg, refusal, key):
    """As where a run's own checkpoint is evaluated into the run's folder."""
    inside = f"{cfg.output_dir}/checkpoints/best"
    Path(inside).mkdir(parents=True)
    classifier = {"architectures": ["SomeForSequenceClassification"]}
    Path(inside, "config.json").write_text(json.dumps(classifier))
    assert refusal(f"{key}={inside}").startswith(f"output_dir: {inside} lies in ")


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


def test_an_enabled_profiler_traces_into_the_folder_of_the_run(cfg, check, refusal):
    assert "output_dir" not in check().profiler
    cfg.profiler.enabled = True
    profiler = check().profiler
    assert profiler.output_dir == f"{cfg.output_dir}/profile"
    assert (profiler.cuda, profiler.xpu) == (False, False)
    cfg.profiler.output_dir = "/elsewhere"
    assert check().profiler.output_dir == "/elsewhere"
    assert refusal("profiler.steps=3").startswith("profiler.steps: unknown argument")


def test_arguments_that_are_left_of_another_component_are_refused_with_its_own(refusal):
    policy = "model._component_=grpo_components.models.hugging_face"
    message = refusal(policy, "model.path=${base_model_path}")
    assert message.startswith("model.vocab_size: unknown argument") and message.endswith(": path")


def test_the_bound_on_the_disagreement_is_that_of_the_dtype_or_of_the_config(check):
    biased = ("generator.top_p=0.9", "generator.allow_biased_sampling=true")
    assert check().max_generator_kl == MAX_GENERATOR_KL["fp32"]
    assert check("max_generator_kl=0.5", *biased).max_generator_kl == 0.5
    assert check(*biased).max_generator_kl is None


def test_held_out_prompts_follow_those_trained_on_or_are_refused(check, refusal):
    chat = ("dataset.chat_template=torchtune", "dataset.system_prompt=Briefly.")
    held_out = check(*chat).eval_dataset
    assert (held_out.chat_template, held_out.system_prompt) == ("torchtune", "Briefly.")
    other = (*chat, "eval_dataset.chat_template=null")
    assert refusal(*other).startswith("eval_dataset.chat_template: null, and dataset.chat_tem")
    check(*other, "eval.allow_other_prompts=true")
