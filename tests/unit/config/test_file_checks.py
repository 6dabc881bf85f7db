"""A missing file is refused by its key; numbers fit the models that the config names."""

import json
from pathlib import Path

import pytest

from grpo_components.config.file_checks import check_against_model


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
def test_a_missing_file_is_named_with_its_key(cfg, refusal, file, key):
    missing = Path(cfg.base_model_path) / file
    missing.unlink()
    assert refusal().startswith(f"{key}: no file {missing}")


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("tiny_policy", "python -m grpo_components.examples.tiny_policy"),
        ("Qwen2.5-3B", "tune download Qwen/Qwen2.5-3B --output-dir /nowhere/Qwen2.5-3B"),
        ("Mistral-7B", "tune download <owner>/Mistral-7B --output-dir /nowhere/Mistral-7B"),
    ],
)
def test_a_missing_model_comes_with_the_command_that_gets_it(refusal, name, command):
    message = refusal(f"base_model_path=/nowhere/{name}")
    assert message.startswith(f"base_model_path: no folder /nowhere/{name};")
    assert f"`{command}`" in message


def test_checkpoint_files_may_be_numbered(cfg, check, refusal):
    files = {"filename_format": "model-{}-of-{}.safetensors", "max_filename": "00002"}
    cfg.checkpointer.checkpoint_files = files
    assert "model-00001-of-00002.safetensors" in refusal()
    for number in (1, 2):
        (Path(cfg.base_model_path) / f"model-0000{number}-of-00002.safetensors").touch()
    check()
    cfg.checkpointer.checkpoint_files = []
    assert refusal().startswith("checkpointer.checkpoint_files: [] given")


def test_trainer_and_generators_start_from_one_checkpoint(refusal, tmp_path):
    message = refusal(f"checkpointer.checkpoint_dir={tmp_path}")
    assert message.startswith(f"checkpointer.checkpoint_dir: {tmp_path} given")


@pytest.mark.parametrize("key", ["dataset", "eval_dataset"])
@pytest.mark.parametrize(
    "name", ["rows.jsonl.gz", "rows", "folder", "folder.jsonl", "nowhere.jsonl", "no/rows.parquet"]
)
def test_a_local_data_set_that_is_no_file_of_rows_is_refused(cfg, refusal, key, name):
    path = Path(cfg.base_model_path) / name
    if name.startswith("folder"):
        path.mkdir()
    elif name.startswith("rows"):
        path.touch()
    message = refusal(f"{key}.source={path}")
    assert message.startswith(f"{key}.source: ") and str(path) in message


def test_a_mix_of_data_sets_has_no_source_of_its_own(cfg, check, refusal):
    part = {"_component_": cfg.dataset._component_, "source": cfg.dataset.source}
    cfg.eval_dataset = part
    cfg.dataset = {
        "_component_": "grpo_components.data.prompt_mix.mixed_dataset",
        "parts": {"first": part, "second": {**part, "weight": 2}},
    }
    assert check().dataset.parts.second.weight == 2
    cfg.dataset.wait = 2
    assert refusal().startswith("dataset.wait: unknown argument")


@pytest.mark.parametrize(
    ("hf_config", "kind"),
    [({"model_type": "gemma2"}, "gemma2"), ({"model_type": "vl", "vision_config": {}}, "vl")],
)
def test_a_base_model_that_cannot_be_trained_is_refused(cfg, refusal, hf_config, kind):
    (Path(cfg.base_model_path) / "config.json").write_text(json.dumps(hf_config))
    message = refusal()
    assert message.startswith("base_model_path: ") and f"is a {kind} model" in message
    assert message.endswith("PHI4, QWEN2, QWEN3")


def test_heads_that_cannot_be_split_are_refused(cfg, check, refusal):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}
    (Path(cfg.base_model_path) / "config.json").write_text(json.dumps(heads))
    check("num_trainers=2", "tensor_parallel_dim=2")
    message = refusal("num_trainers=4", "tensor_parallel_dim=4")
    assert message.startswith("tensor_parallel_dim: 4 given") and "num_key_value_heads" in message


def test_stop_tokens_and_lengths_are_those_of_the_model(settings_with):
    hf_config = {"vocab_size": 384, "max_position_embeddings": 512}
    check_against_model(settings_with(generator__stop_token_ids=[0, 383]), hf_config)
    check_against_model(settings_with(generator__max_model_len=512), hf_config)
    for tokens in ([384], [1, -1], [10**30]):
        with pytest.raises(ValueError, match=r"^generator\.stop_token_ids: .* 0 to 383$"):
            check_against_model(settings_with(generator__stop_token_ids=tokens), hf_config)
    with pytest.raises(ValueError, match=r"^generator\.max_model_len: 513 given.* 512$"):
        check_against_model(settings_with(generator__max_model_len=513), hf_config)


def test_a_learned_reward_is_a_classifier_under_a_name_of_its_own(cfg, check, refusal, tmp_path):
    folder = tmp_path / "classifier"
    given = f"reward_model.path={folder}"
    assert refusal(given).startswith(f"reward_model.path: no file {folder}/config.json")
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    message = refusal(given)
    assert message.startswith("reward_model.path: ") and "Qwen2ForCausalLM" in message
    (folder / "config.json").write_text('{"architectures": ["Qwen2ForSequenceClassification"]}')
    check(given)
    cfg.rewards.reward_model = {"_component_": "grpo_components.rewards.formats.BoxedFormat"}
    check()
    assert refusal(given).startswith("rewards.reward_model: given beside reward_model.path")


def test_a_learned_reward_of_the_hub_is_one_that_the_cache_or_the_hub_has(
    check, refusal, tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    given = "reward_model.path=owner/name"
    message = refusal(given)
    assert message.startswith("reward_model.path: ") and "127.0.0.1:1" in message
    assert "\n" not in message and "; allowed: " in message
    cached = tmp_path / "models--owner--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("abc")
    (cached / "snapshots/abc").mkdir(parents=True)
    (cached / "snapshots/abc/config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    assert "Qwen2ForCausalLM" in refusal(given)
    classifier = '{"architectures": ["Qwen2ForSequenceClassification"]}'
    (cached / "snapshots/abc/config.json").write_text(classifier)
    check(given)
