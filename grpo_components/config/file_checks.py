"""Checks that the files named in a config exist, and that its numbers fit the models in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from grpo_components.config.checkpointer_checks import checkpoint_files
from grpo_components.config.generator_checks import check_cpu_engine, check_tensor_parallel
from grpo_components.config.paths import read_hf_config
from grpo_components.config.teacher_checks import check_teacher
from grpo_components.config.training_checks import check_heads
from grpo_components.errors import fail, shown
from grpo_components.setting_types import REFUSED_MODEL_TYPES, ModelType
from grpo_components.settings import Settings

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
"""Suffixes of local data sets; `data/rows.py` reads them, but takes seconds to import."""
_CLASSIFIERS = "a model's folder, or a hub name"
_HUB_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)


def check_files(settings: Settings) -> None:
    """Refuse missing files, and values that do not fit the models in them."""
    base = Path(settings.base_model_path)
    if not base.is_dir():
        owner = "Qwen" if base.name.startswith("Qwen") else "<owner>"
        command = f"tune download {owner}/{base.name} --output-dir {base}"
        if "tiny" in base.name:
            command = "python -m grpo_components.examples.tiny_policy"
        fail("base_model_path", f"no folder {base}", f"an existing one; `{command}` makes it")
    _check_same_folder(settings, base)
    for key, file in _files(settings, base):
        if not file.is_file():
            fail(key, f"no file {file}", "an existing file")
    _check_reward_model(settings.reward_model.path)
    hf_config = read_hf_config("base_model_path", base)
    _check_kind(base, hf_config, settings.is_hugging_face)
    check_against_model(settings, hf_config)
    check_teacher(settings, hf_config)
    check_heads(settings.tensor_parallel_dim, hf_config)
    check_tensor_parallel(settings.generator.tensor_parallel_size, hf_config)
    if settings.device == "cpu":
        check_cpu_engine(hf_config)


def _check_same_folder(settings: Settings, base: Path) -> None:
    """Refuse a policy that is read from another folder than the generators' model."""
    if settings.is_hugging_face:
        key, given = "model.path", settings.model.get("path", base)
    elif settings.checkpointer is None:
        problem = f"null given, and {settings.model._component_} is no model of transformers"
        fail("checkpointer", problem, "`_component_` and its arguments")
    else:
        key = "checkpointer.checkpoint_dir"
        given = settings.checkpointer.get("checkpoint_dir", base)
    if Path(str(given)).resolve() != base.resolve():
        fail(key, f"{given} given, and generators start from base_model_path", str(base))


def check_against_model(settings: Settings, hf_config: dict[str, Any]) -> None:
    """Refuse token ids and lengths that the base model does not support."""
    engine, vocab = settings.generator, hf_config.get("vocab_size")
    for token in engine.stop_token_ids or ():
        if token < 0 or (vocab is not None and token >= vocab):
            ids = f"0 to {vocab - 1}" if vocab is not None else "0 and above"
            problem = f"{shown(token)} given, which the model cannot sample"
            fail("generator.stop_token_ids", problem, f"token ids of {ids}")
    positions = hf_config.get("max_position_embeddings")
    if positions is None:
        return
    if engine.max_model_len is not None and engine.max_model_len > positions:
        problem = f"{engine.max_model_len} given, and the model has {positions} positions"
        fail("generator.max_model_len", problem, f"at most {positions}")
    prompt = settings.dataset.get("max_prompt_tokens") or 1
    if prompt + engine.max_response_tokens > positions:
        problem = f"{engine.max_response_tokens} given with dataset.max_prompt_tokens: {prompt}, "
        problem += f"and the model has {positions} positions"
        fail("generator.max_response_tokens", problem, f"at most {positions - prompt}")


def _files(settings: Settings, base: Path) -> list[tuple[str, Path]]:
    """Return the files that a run reads, each with its key; refuse data files of unknown kind."""
    files = [("base_model_path", base / "config.json")]
    if settings.checkpointer is not None and not settings.is_hugging_face:
        named = checkpoint_files(settings.checkpointer, base, settings.output_dir)
        files += [("checkpointer.checkpoint_files", file) for file in named]
    tokenizer = settings.tokenizer
    keys = [key for key in ("path", "merges_file", "special_tokens_path") if tokenizer.get(key)]
    files += [(f"tokenizer.{key}", Path(tokenizer[key])) for key in keys]
    if tokenizer._component_.endswith(".hugging_face_tokenizer"):
        files = [
            (key, path / "tokenizer.json" if key == "tokenizer.path" else path)
            for key, path in files
        ]
    sources = {"dataset.source": settings.dataset.get("source")}
    sources["eval_dataset.source"] = (settings.eval_dataset or {}).get("source")
    for key, source in sources.items():
        if source is None:  # a mix of data sets, or a user's own data set
            continue
        path = Path(source)
        if source.startswith(("/", ".")) or path.suffix in SUFFIXES or path.exists():
            files.append((key, path))
            if path.is_dir() or (path.exists() and path.suffix not in SUFFIXES):
                problem = f"{source} is a {'folder' if path.is_dir() else 'file of another kind'}"
                fail(key, problem, f"a {' or '.join(SUFFIXES)} file, or a hub name")
    return files


def _check_kind(base: Path, hf_config: dict[str, Any], is_hugging_face: bool) -> None:
    """Refuse a base model of a family that cannot be trained."""
    kind = {"gemma2": "GEMMA2"}.get(str(hf_config.get("model_type")))
    if is_hugging_face:
        kind = None
    if "vision_config" in hf_config or "audio_config" in hf_config:
        kind = "LLAMA3_VISION"  # all multimodal models, for the same reason
    if kind is not None:
        problem = f"{base} is a {hf_config.get('model_type')} model; {REFUSED_MODEL_TYPES[kind]}"
        fail("base_model_path", problem, f"a model of {', '.join(get_args(ModelType))}")


def _check_reward_model(path: str | None) -> None:
    if path is None:
        return
    key, folder = "reward_model.path", Path(str(path))
    if not (path.startswith(("/", ".")) or folder.exists()):
        folder = _hub_folder(key, path)
    if not (folder / "config.json").is_file():
        fail(key, f"no file {path}/config.json", _CLASSIFIERS)
    kinds = read_hf_config(key, folder).get("architectures")
    kind = kinds[0] if isinstance(kinds, list) and kinds else "model without architectures"
    if not str(kind).endswith("ForSequenceClassification"):
        fail(key, f"{path} has a {kind}", "a model ForSequenceClassification")


def _hub_folder(key: str, name: str) -> Path:
    """Return the folder in the hub's cache that has a model's config."""
    if not _HUB_NAME.fullmatch(name):
        fail(key, f"no folder {name}", _CLASSIFIERS)
    from huggingface_hub import hf_hub_download  # takes half a second

    try:
        return Path(hf_hub_download(name, "config.json")).parent
    except (OSError, ValueError) as error:  # HF_HUB_OFFLINE=1 takes it from the cache alone
        fail(key, f"{name} cannot be loaded: {error}", _CLASSIFIERS)
