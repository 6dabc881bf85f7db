"""Checks whether a teacher can grade the policy's tokens: files, token ids, length and model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from grpo_components.config.paths import read_hf_config
from grpo_components.errors import ConfigError, fail, shown
from grpo_components.exchange.weights import check_names_and_shapes, checkpoint_shapes
from grpo_components.models.hf_weights import file_converter
from grpo_components.models.hugging_face_check import check_hugging_face
from grpo_components.models.hugging_face_policy import hugging_face
from grpo_components.settings import Settings

_KEY = "teacher.path"
_MAX_CHARS = 40


def check_teacher(settings: Settings, policy_config: dict[str, Any]) -> None:
    """Refuse a teacher that is missing, or that has other tokens than the policy."""
    if settings.teacher is None:
        return
    base, folder = Path(settings.base_model_path), Path(settings.teacher.path)
    if not folder.is_dir():
        owner = "Qwen" if folder.name.startswith("Qwen") else "<owner>"
        command = f"tune download {owner}/{folder.name} --output-dir {folder}"
        fail(_KEY, f"no folder {folder}", f"an existing one; `{command}` makes it")
    if not any(folder.glob("*.safetensors")):
        fail(_KEY, f"no *.safetensors in {folder}", "a folder with a model's weights")
    teacher_config = read_hf_config(_KEY, folder)
    _check_token_ids(base, folder)
    ours, theirs = (config.get("vocab_size") for config in (policy_config, teacher_config))
    if ours is not None and theirs is not None and theirs < ours:
        problem = f"{folder} has a vocab_size of {theirs}, and the policy may sample {ours} ids"
        fail(_KEY, problem, f"a model with {ours} or more")
    _check_length(settings, folder, teacher_config)


def try_teacher(settings: Settings, path: str) -> None:
    """Refuse a teacher whose weights differ from its files, or whose logprobs are wrong."""
    try:
        with torch.device("meta"):
            model = hugging_face(path)
        named = file_converter(model, None, Path(path))(model.state_dict())
        shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
        check_names_and_shapes(checkpoint_shapes(Path(path)), shapes)
        check_hugging_face(model, _longest(settings))
    except ConfigError as error:  # it names a key of the policy
        fail(_KEY, f"{path}: {error.problem}", error.allowed)
    except ValueError as error:
        problem = str(error).removeprefix("weights: ")
        fail(_KEY, f"{path}: {problem}", "weights of the config.json beside them")


def _check_token_ids(base: Path, folder: Path) -> None:
    """Refuse a teacher whose tokenizer gives one of the policy's tokens another id, or none."""
    ours, theirs = _token_ids(base), _token_ids(folder)
    if ours is None or theirs is None:
        missing = base if ours is None else folder
        problem = f"{missing} has neither tokenizer.json nor vocab.json, so that token ids cannot "
        fail(_KEY, f"{problem}be compared", "a folder with one of them")
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            found, text = theirs.get(token, "no id"), shown(token[:_MAX_CHARS])
            problem = f"token {text} is {number} of the policy, and {found} there"
            fail(_KEY, f"{folder} has another tokenizer: {problem}", "one with the policy's tokens")


def _token_ids(folder: Path) -> dict[str, int] | None:
    """Return the ids of all tokens of a model's tokenizer; None if the folder has no known file."""
    whole, vocabulary = folder / "tokenizer.json", folder / "vocab.json"
    if whole.is_file():
        read = _read(whole)
        model = read.get("model")
        ids = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(ids, list):  # Unigram: pairs of token and score, in the order of their ids
            ids = {pair[0]: number for number, pair in enumerate(ids)}
        if not isinstance(ids, dict):
            fail(_KEY, f"{whole} has no vocabulary", "a file of the library tokenizers")
        return ids | {added["content"]: added["id"] for added in read.get("added_tokens") or ()}
    return _read(vocabulary) if vocabulary.is_file() else None


def _read(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        fail(_KEY, f"{path} cannot be read, {type(error).__name__}: {error}", "a JSON file")
    if not isinstance(read, dict):
        fail(_KEY, f"{path} holds no JSON object", "a file of a tokenizer")
    return read


def _check_length(settings: Settings, folder: Path, teacher_config: dict[str, Any]) -> None:
    positions = teacher_config.get("max_position_embeddings")
    longest = _longest(settings)
    if positions is not None and longest > positions:
        problem = f"{folder} has {positions} positions, and a prompt with its response has up to"
        fail(_KEY, f"{problem} {longest}", f"a model with {longest} positions or more")


def _longest(settings: Settings) -> int:
    """Return the tokens of the longest prompt and response together, as far as the config says."""
    return (settings.dataset.get("max_prompt_tokens") or 1) + settings.generator.max_response_tokens
