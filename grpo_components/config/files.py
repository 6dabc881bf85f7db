"""Checks the files and folders that a config names, and that its numbers suit the models' sizes."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from grpo_components.errors import fail, shown
from grpo_components.records import checkpoint_folder
from grpo_components.records.run_folder import is_used, real_path, refuse_folder_in_use
from grpo_components.settings import Settings

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
"""Suffixes of local data sets; `data/rows.py` reads them, but takes seconds to import."""
_OUTPUTS = ("output_dir", "checkpointer.output_dir", "metric_logger.", "profiler.")
"""Prefixes of keys that name the run's outputs."""


def check_files(settings: Settings) -> None:
    """Refuse missing files, and values that the config.json files of the models rule out."""
    base = Path(settings.base_model_path)
    _check_model_folder("base_model_path", base)
    _check_same_folder(settings, base)
    for key, file in _files(settings):
        if not file.is_file():
            fail(key, f"no file {file}", "an existing file")
    _check_reward_model(settings.reward_model.path)
    hf_config = read_hf_config("base_model_path", base)
    check_against_model(settings, hf_config)
    _check_teacher(settings, hf_config)
    check_splits(settings, hf_config)


def read_hf_config(key: str, folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a model's folder."""
    path = folder / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail(key, f"{path} cannot be read: {error}", "a folder with the config.json of its model")


def longest_sequence(settings: Settings) -> int:
    """Return the limit of prompt and response together, in tokens; an unlimited prompt counts 1."""
    return (settings.dataset.get("max_prompt_tokens") or 1) + settings.generator.max_response_tokens


def check_against_model(settings: Settings, hf_config: dict[str, Any]) -> None:
    """Refuse token ids and lengths that the base model does not support."""
    engine, vocab = settings.generator, hf_config.get("vocab_size")
    for token in engine.stop_token_ids or ():
        if token < 0 or (vocab is not None and token >= vocab):
            problem = f"{shown(token)} given, which the model cannot sample"
            last = "..." if vocab is None else vocab - 1
            fail("generator.stop_token_ids", problem, f"token ids of 0 to {last}")
    positions = hf_config.get("max_position_embeddings")
    if positions is None:
        return
    if engine.max_model_len is not None and engine.max_model_len > positions:
        problem = f"{engine.max_model_len} given, and the model has {positions} positions"
        fail("generator.max_model_len", problem, f"at most {positions}")
    if (longest := longest_sequence(settings)) > positions:
        prompt = longest - engine.max_response_tokens
        if prompt >= positions:
            problem = f"{prompt} given, and the model has {positions} positions"
            fail("dataset.max_prompt_tokens", problem, f"less than {positions}")
        problem = f"{engine.max_response_tokens} given with dataset.max_prompt_tokens: {prompt}, "
        problem += f"and the model has {positions} positions"
        fail("generator.max_response_tokens", problem, f"at most {positions - prompt}")


def check_splits(settings: Settings, hf_config: dict[str, Any]) -> None:
    """Refuse tensor-parallel sizes (trainers, vLLM) that do not divide heads and MLP widths."""
    names = ["num_attention_heads", "intermediate_size"]
    ranks, workers = settings.tensor_parallel_dim, settings.generator.tensor_parallel_size
    split = [("generator.tensor_parallel_size", workers, name) for name in names]
    split += [("tensor_parallel_dim", ranks, name) for name in (*names, "num_key_value_heads")]
    for key, parts, name in split:
        if (size := hf_config.get(name) or parts) % parts:
            problem = f"{parts} given, and the model's {name} is {size}"
            fail(key, problem, f"a divisor of {size}")
    heads = hf_config.get("num_key_value_heads") or workers
    if max(heads, workers) % min(heads, workers):  # vLLM copies heads if there are more workers
        problem = f"{workers} given, and the model's num_key_value_heads is {heads}"
        fail("generator.tensor_parallel_size", problem, f"a divisor or a multiple of {heads}")


def _check_model_folder(key: str, folder: Path) -> None:
    if folder.is_dir():
        return
    owner = "Qwen" if folder.name.startswith("Qwen") else "<owner>"
    command = f"tune download {owner}/{folder.name} --output-dir {folder}"
    if "tiny" in folder.name:
        command = "python -m grpo_components.examples.tiny_policy"
    fail(key, f"no folder {folder}", f"an existing one; `{command}` makes it")


def _check_same_folder(settings: Settings, base: Path) -> None:
    """Refuse a config in which trainers and generators load the policy from different folders."""
    if settings.is_hugging_face:
        key, given = "model.path", settings.model.get("path", base)
    elif settings.checkpointer is None:
        problem = f"null given, and {settings.model._component_} is no model of transformers"
        fail("checkpointer", problem, "`_component_` and its arguments")
    else:
        key = "checkpointer.checkpoint_dir"
        given = settings.checkpointer.get("checkpoint_dir", base)
        path = settings.checkpointer["_component_"]
        if path.startswith("torchtune.") and not path.endswith(".FullModelHFCheckpointer"):
            problem = f"{path} given, and vLLM needs the format of Hugging Face"
            allowed = "torchtune.training.FullModelHFCheckpointer"
            fail("checkpointer._component_", problem, allowed)
    if Path(str(given)).resolve() != base.resolve():
        fail(key, f"{given} given, and generators start from base_model_path", str(base))


def _files(settings: Settings) -> Iterator[tuple[str, Path]]:
    """Yield (config key, file) for each file that a run reads; refuse unknown kinds of data."""
    base, checkpointer = Path(settings.base_model_path), settings.checkpointer
    yield "base_model_path", base / "config.json"
    if checkpointer is not None and not settings.is_hugging_face:
        names = checkpointer.get("checkpoint_files")
        if isinstance(names, str):
            fail("checkpointer.checkpoint_files", f"{shown(names)} given", f"a list: [{names}]")
        for name in names if OmegaConf.is_list(names) else ():
            yield "checkpointer.checkpoint_files", base / str(name)
    tokenizer = settings.tokenizer
    whole = tokenizer._component_.endswith(".hugging_face_tokenizer")
    for key in ("path", "merges_file", "special_tokens_path"):
        if given := tokenizer.get(key):
            of_folder = whole and key == "path"
            yield f"tokenizer.{key}", Path(given, "tokenizer.json") if of_folder else Path(given)
    for key in ("dataset", "eval_dataset"):
        source = (getattr(settings, key) or {}).get("source")
        if source is None:  # a mix of data sets, or a user's own data set
            continue
        path = Path(source)
        if path.is_dir() or (path.exists() and path.suffix not in SUFFIXES):
            problem = f"{source} is a {'folder' if path.is_dir() else 'file of another kind'}"
            fail(f"{key}.source", problem, f"a {' or '.join(SUFFIXES)} file, or a hub name")
        if source.startswith(("/", ".")) or path.suffix in SUFFIXES:
            yield f"{key}.source", path


def _check_reward_model(path: str | None) -> None:
    if path is None:
        return
    key, folder, allowed = "reward_model.path", Path(path), "a model's folder, or a hub name"
    if not (path.startswith(("/", ".")) or folder.exists()):
        from huggingface_hub import hf_hub_download  # takes half a second

        try:
            folder = Path(hf_hub_download(path, "config.json")).parent
        except (OSError, ValueError) as error:  # HF_HUB_OFFLINE=1 takes it from the cache alone
            fail(key, f"{path} cannot be loaded: {error}", allowed)
    kinds = read_hf_config(key, folder).get("architectures") or ["model without architectures"]
    if not kinds[0].endswith("ForSequenceClassification"):
        fail(key, f"{path} has a {kinds[0]}", "a model ForSequenceClassification")


def _check_teacher(settings: Settings, policy_config: dict[str, Any]) -> None:
    """Refuse a teacher without weight files, or with too small a vocabulary or context length."""
    if settings.teacher is None:
        return
    key, folder = "teacher.path", Path(settings.teacher.path)
    _check_model_folder(key, folder)
    if not any(folder.glob("*.safetensors")):
        fail(key, f"no *.safetensors in {folder}", "a folder with a model's weights")
    teacher_config = read_hf_config(key, folder)
    least = {"vocab_size": policy_config.get("vocab_size")}
    least["max_position_embeddings"] = longest_sequence(settings)
    for name, needed in least.items():
        if needed and (has := teacher_config.get(name)) is not None and has < needed:
            fail(key, f"{folder} has {name}: {has}", f"a model with {needed} or more")


# ---- output_dir ---------------------------------------------------------------------------------


def check_output(settings: Settings) -> None:
    """Refuse an output_dir that cannot be written, is or contains an input, or is in use.

    A used output_dir is moved aside with everything in it, so inputs must not lie in it. Links are
    followed. `begin_run` checks the folder again, once it is locked.
    """
    from grpo_components.records.resume import find_checkpoint, run_of  # imports torch

    output_dir, allowed = real_path(settings.output_dir), "a folder for this run alone"
    _check_writable(output_dir)
    refuse_folder_in_use(output_dir)  # before its contents are read
    checkpoint = find_checkpoint(settings.resume_from_checkpoint, output_dir)
    if checkpoint is not None and run_of(checkpoint) == output_dir:
        return  # a resume in the run's own folder, which stays
    named = {"the current folder": str(Path.cwd()), **dict(_paths("", settings.model_dump()))}
    if checkpoint is not None:
        named["resume_from_checkpoint"] = str(checkpoint)
    for key, path in named.items():
        if real_path(path).is_relative_to(output_dir):
            problem = f"{path} lies in {output_dir}, and is {key}"
            fail("output_dir", problem, allowed)
    is_used(output_dir)


def _check_writable(folder: Path) -> None:
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:  # in some places, such as /proc, even root can make no folder
        if nearest != folder or not (nearest.is_dir() and os.access(folder, os.W_OK)):
            tempfile.TemporaryDirectory(prefix=".grpo-", dir=nearest).cleanup()
    except OSError as error:
        problem = f"nothing can be made in {nearest}: {error.strerror}"
        fail("output_dir", problem, "a writable place")


def _paths(key: str, given: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of every existing path in a config, except outputs."""
    if key.startswith(_OUTPUTS) or key == "resume_from_checkpoint":
        return
    if isinstance(given, str):
        if os.path.lexists(given):
            yield key, given
        return
    items = given.items() if isinstance(given, dict) else ()
    items = enumerate(given) if isinstance(given, list | tuple) else items
    for name, value in items:
        yield from _paths(f"{key}.{name}" if key else str(name), value)


def check_disk(settings: Settings) -> None:
    """Refuse a run whose checkpoints do not fit onto the disk of output_dir."""
    from grpo_components.models.lora import pushed_shapes  # imports torch

    lora, model = settings.lora, Path(settings.base_model_path)
    trained = saved = sum(map(math.prod, pushed_shapes(model, lora).values()))
    if lora is not None and lora.save_merged:
        saved += sum(map(math.prod, pushed_shapes(model, None).values()))
    each = checkpoint_folder.nbytes(settings, saved, trained)
    most = checkpoint_folder.most_at_once(settings)
    output_dir = real_path(settings.output_dir)
    resumes = bool(settings.resume_from_checkpoint)  # else old files are moved aside, and stay
    files = (output_dir / "checkpoints").rglob("*") if resumes else ()
    there = sum(file.lstat().st_size for file in files)
    place = next(path for path in (output_dir, *output_dir.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if most * each > free + there:
        gib = 2**30
        problem = f"{output_dir} has {free / gib:.3g} GiB free, and {most} checkpoints of "
        problem += f"{each / gib:.3g} GiB are there at once"
        allowed = "a larger disk, a larger save_every_n_steps or a smaller keep_last_n"
        fail("output_dir", problem, allowed)
