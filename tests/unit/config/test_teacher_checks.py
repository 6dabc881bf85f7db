"""A teacher that cannot grade the policy's tokens is refused by its key before anything starts."""

import json
import shutil
from pathlib import Path

import pytest
from lib.config_errors import refusal_of, refused_key
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_components.config.model_trial import try_teacher

CONFIG = {"vocab_size": 4, "hidden_size": 8, "max_position_embeddings": 512}


def write(folder, config=CONFIG):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    return folder


@pytest.fixture
def teacher(cfg, tmp_path):
    """A folder of a teacher that is right for the policy of `cfg`."""
    write(Path(cfg.base_model_path))
    return write(tmp_path / "teacher")


def test_a_teacher_that_is_large_enough_is_accepted(teacher, check):
    assert check().teacher is None
    settings = check(f"teacher.path={teacher}")
    assert (settings.teacher.path, settings.teacher.coeff) == (str(teacher), 1.0)


@pytest.mark.parametrize("smaller", [{"max_position_embeddings": 95}, {"vocab_size": 3}])
def test_a_smaller_teacher_is_refused(teacher, refused, smaller):
    write(teacher, CONFIG | smaller)
    assert refused(f"teacher.path={teacher}") == "teacher.path"


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_file_that_the_teacher_lacks_is_refused(teacher, refused, file):
    (teacher / file).unlink()
    assert refused(f"teacher.path={teacher}") == "teacher.path"


def test_a_damaged_config_of_a_model_is_refused_by_its_key(teacher, refused):
    (teacher / "config.json").write_text("{")
    assert refused(f"teacher.path={teacher}") == "teacher.path"


@pytest.fixture(scope="module")
def llama(tmp_path_factory, tiny_policy):
    """A random model of another family and other sizes than the tiny policy, with its tokens."""
    sizes = {"vocab_size": 400, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    for path in (*tiny_policy.glob("token*"), *tiny_policy.glob("vocab*")):
        shutil.copy(path, folder)
    return folder


def test_a_model_of_another_family_may_teach_with_the_policys_tokens_and_its_own_weights(
    llama, settings_with, tiny_policy, tmp_path
):
    cfg = settings_with(base_model_path=str(tiny_policy))
    try_teacher(cfg, str(llama))
    other = shutil.copytree(llama, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": 72}))
    assert refused_key(try_teacher, cfg, str(other)) == "teacher.path"
    other = shutil.copytree(llama, tmp_path / "tokens")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "another tokenizer: token 'a'" in refusal_of(try_teacher, cfg, str(other)).problem
