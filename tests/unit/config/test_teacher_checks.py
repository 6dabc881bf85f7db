"""A teacher that cannot grade the policy's tokens is refused by its key before anything starts."""

import json
import shutil
from pathlib import Path

import pytest
from lib.config_errors import refused_key
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_components.config.model_trial import try_teacher

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
    check(f"teacher.path={teacher}")
    write(teacher, tokenizer={"model": {"vocab": [["a", 0.0], ["b", -1.0], ["<end>", -2.0]]}})
    check(f"teacher.path={teacher}")
    (teacher / "tokenizer.json").unlink()
    (teacher / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "<end>": 2}))
    check(f"teacher.path={teacher}")


@pytest.mark.parametrize(
    ("config", "tokenizer"),
    [
        (CONFIG, with_tokens()),
        (CONFIG, with_tokens(**{"<end>": 3})),
        (CONFIG | {"max_position_embeddings": 95}, TOKENIZER),
        (CONFIG | {"vocab_size": 3}, TOKENIZER),
    ],
)
def test_a_teacher_of_another_kind_is_refused(teacher, refused, config, tokenizer):
    write(teacher, config, tokenizer)
    assert refused(f"teacher.path={teacher}") == "teacher.path"


@pytest.mark.parametrize("missing", ["tokenizer.json", "model.safetensors", "config.json"])
def test_a_file_that_the_teacher_lacks_is_refused(teacher, refused, missing):
    (teacher / missing).unlink()
    assert refused(f"teacher.path={teacher}") == "teacher.path"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A random model of another family and other sizes than the tiny policy."""
    sizes = {"vocab_size": 400, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    return folder


def test_a_model_of_another_family_may_teach_with_weights_of_its_own(
    llama, settings_with, tmp_path
):
    try_teacher(settings_with(), str(llama))
    other = shutil.copytree(llama, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": 72}))
    assert refused_key(try_teacher, settings_with(), str(other)) == "teacher.path"
