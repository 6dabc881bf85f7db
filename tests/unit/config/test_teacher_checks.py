"""A teacher that cannot grade the policy's tokens is refused by name before anything starts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_components.config.gpu_checks import check_gpus
from grpo_components.config.teacher_checks import try_teacher
from grpo_components.settings import teachers_of

CONFIG = {"vocab_size": 4, "hidden_size": 8, "max_position_embeddings": 512}
TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "<end>", "id": 2}]}


def write(folder, config=CONFIG, tokenizer=TOKENIZER):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def teacher(cfg, tmp_path):
    """A folder of a teacher that is right for the policy of `cfg`."""
    write(Path(cfg.base_model_path))
    return write(tmp_path / "teacher")


def with_tokens(**tokens):
    return {"model": {"vocab": {"a": 0, "b": 1, **tokens}}, "added_tokens": []}


def test_a_teacher_with_the_policys_tokens_is_accepted(teacher, check):
    assert check().teacher is None
    settings = check(f"teacher.path={teacher}")
    assert (settings.teacher.path, settings.teacher.coeff) == (str(teacher), 1.0)
    write(teacher, tokenizer=with_tokens(**{"<end>": 2, "<more>": 3}))  # more tokens do no harm
    assert check(f"teacher.path={teacher}", "teacher.coeff=0.1").teacher.coeff == 0.1
    (teacher / "tokenizer.json").unlink()
    (teacher / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "<end>": 2}))
    check(f"teacher.path={teacher}")


@pytest.mark.parametrize(
    ("config", "tokenizer", "message"),
    [
        (CONFIG, with_tokens(), "'<end>' is 2 of the policy, and no id there"),
        (CONFIG, with_tokens(**{"<end>": 3}), "'<end>' is 2 of the policy, and 3 there"),
        (CONFIG, {"model": 3}, "has no vocabulary"),
        (CONFIG, [], "holds no JSON object"),
        (CONFIG | {"max_position_embeddings": 95}, TOKENIZER, "has 95 positions"),
        (
            CONFIG | {"vocab_size": 3},
            TOKENIZER,
            "has a vocab_size of 3, and the",
        ),
        ([], TOKENIZER, "config.json holds no JSON object"),
    ],
)
def test_a_teacher_of_another_kind_is_refused(teacher, refusal, config, tokenizer, message):
    write(teacher, config, tokenizer)
    found = refusal(f"teacher.path={teacher}")
    assert found.startswith("teacher.path: ") and message in found


@pytest.mark.parametrize("missing", ["tokenizer.json", "model.safetensors", "config.json"])
def test_a_file_that_the_teacher_lacks_is_named(teacher, refusal, missing):
    (teacher / missing).unlink()
    assert refusal(f"teacher.path={teacher}").startswith("teacher.path: ")


def test_a_missing_teacher_comes_with_the_command_that_gets_it(refusal):
    found = refusal("teacher.path=/nowhere/Qwen2.5-7B")
    assert found.startswith("teacher.path: no folder /nowhere/Qwen2.5-7B;")
    assert "`tune download Qwen/Qwen2.5-7B --output-dir /nowhere/Qwen2.5-7B`" in found


@pytest.mark.parametrize("coeff", ["0", "-1", ".nan", ".inf", "much"])
def test_a_weight_of_the_teacher_that_is_none_is_refused(teacher, refusal, coeff):
    assert refusal(f"teacher.path={teacher}", f"teacher.coeff={coeff}").startswith(
        "teacher.coeff: "
    )


def test_a_weight_without_a_teacher_is_refused(refusal):
    assert refusal("teacher.coeff=1").startswith("teacher.path: missing")


def test_a_teacher_counts_where_something_is_trained(cfg, teacher, check):
    given = (f"teacher.path={teacher}", "num_teachers=3")
    assert teachers_of(check(*given)) == 3
    assert teachers_of(check(*given, "rollout_only=true")) == 0
    assert teachers_of(check("num_teachers=3")) == 0
    cfg.teacher = OmegaConf.create({"path": str(teacher), "coeff": 2})
    assert teachers_of(check()) == 1


@pytest.mark.parametrize(("share", "allowed"), [(1.0, 3), (0.5, 3), (0.2, 2)])
def test_a_teacher_needs_its_share_of_a_gpu(settings_with, monkeypatch, share, allowed):
    changes = {"device": "cuda", "teacher": {"path": "/models/teacher"}, "gpus_per_teacher": share}
    settings = settings_with(**changes, gpus_per_trainer=0.8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: allowed)
    check_gpus(settings, here=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: allowed - 1)
    with pytest.raises(ValueError, match=r"^num_generators: .*num_teachers: 1 need"):
        check_gpus(settings, here=True)


LARGER = {
    **{"vocab_size": 400, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A random model of another family and other sizes than the tiny policy."""
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**LARGER)).save_pretrained(folder)
    return folder


def test_a_model_of_another_family_and_size_may_teach(llama, settings_with):
    try_teacher(settings_with(), str(llama))


def test_weights_that_are_not_the_models_are_refused(llama, settings_with, tmp_path):
    other = shutil.copytree(llama, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": 72}))
    with pytest.raises(ValueError, match=r"^teacher\.path: .*other: .*mlp.*; allowed: "):
        try_teacher(settings_with(), str(other))
