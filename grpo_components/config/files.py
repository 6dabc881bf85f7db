"""Checks the files and folders that a config names, and its numbers against the models in them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from omegaconf import OmegaConf

from grpo_components.config.replayed import run_folder
from grpo_components.errors import fail, shown
from grpo_components.records import checkpoint_folder
from grpo_components.records.run_folder import is_used, real_path, refuse_folder_in_use, short
from grpo_components.settings import REFUSED_MODEL_TYPES, ModelType, Settings

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
"""Suffixes of local data sets; `data/rows.py` reads them, but takes seconds to import."""
_TEACHER = "teacher.path"
_VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this, and splits what results."""
_INPUTS = {
    *("base_model_path", "checkpointer.checkpoint_dir", "reward_model.path", "eval_only"),
    *("train_from", "replay_events", "dataset.source", "eval_dataset.source", "model.path"),
    *("tokenizer.path", "tokenizer.merges_file", "tokenizer.special_tokens_path", "teacher.path"),
}
"""Keys of files and folders that a run reads.

Text under other keys counts as a path if it has a slash or is the path of a file."""
_OUTPUTS = ("output_dir", "checkpointer.output_dir", "metric_logger.", "profiler.")
"""Prefixes of the keys that name what the run writes."""


def check_files(settings: Settings) -> None:
    """Refuse missing files, and values that do not fit the models in them."""
    base = Path(settings.base_model_path)
    _check_model_folder("base_model_path", base)
    _check_same_folder(settings, base)
    for key, file in _files(settings):
        if not file.is_file():
            fail(key, f"no file {file}", "an existing file")
    _check_reward_model(settings.reward_model.path)
    hf_config = read_hf_config("base_model_path", base)
    kind = {"gemma2": "GEMMA2"}.get(str(hf_config.get("model_type")))
    kind = None if settings.is_hugging_face else kind
    if "vision_config" in hf_config or "audio_config" in hf_config:
        kind = "LLAMA3_VISION"  # all multimodal models, for the same reason
    if kind is not None:
        problem = f"{base} is a {hf_config.get('model_type')} model; {REFUSED_MODEL_TYPES[kind]}"
        fail("base_model_path", problem, f"a model of {', '.join(get_args(ModelType))}")
    check_against_model(settings, hf_config)
    _check_teacher(settings, hf_config)
    check_heads(settings.tensor_parallel_dim, hf_config)
    check_tensor_parallel(settings.generator.tensor_parallel_size, hf_config)


def read_hf_config(key: str, folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a model's folder."""
    path = folder / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail(key, f"{path} cannot be read: {error}", "a folder with the config.json of its model")


def longest_sequence(settings: Settings) -> int:
    """Return the tokens of the longest prompt and response together, as far as the config says."""
    return (settings.dataset.get("max_prompt_tokens") or 1) + settings.generator.max_response_tokens


def check_against_model(settings: Settings, hf_config: dict[str, Any]) -> None:
    """Refuse token ids and lengths that the base model does not support."""
    engine, vocab = settings.generator, hf_config.get("vocab_size")
    for token in engine.stop_token_ids or ():
        if token < 0 or (vocab is not None and token >= vocab):
            problem = f"{shown(token)} given, which the model cannot sample"
            fail("generator.stop_token_ids", problem, f"token ids of 0 to {vocab or '...'}")
    positions = hf_config.get("max_position_embeddings")
    if positions is None:
        return
    if engine.max_model_len is not None and engine.max_model_len > positions:
        problem = f"{engine.max_model_len} given, and the model has {positions} positions"
        fail("generator.max_model_len", problem, f"at most {positions}")
    if (longest := longest_sequence(settings)) > positions:
        prompt = longest - engine.max_response_tokens
        problem = f"{engine.max_response_tokens} given with dataset.max_prompt_tokens: {prompt}, "
        problem += f"and the model has {positions} positions"
        fail("generator.max_response_tokens", problem, f"at most {positions - prompt}")


def check_heads(tensor: int, hf_config: dict[str, Any]) -> None:
    """Check that the trainer's tensor parallelism can split the layers of a checkpoint."""
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = hf_config.get(name) or tensor
        if size % tensor:
            problem = f"{tensor} given, and the model's {name} is {size}"
            fail("tensor_parallel_dim", problem, f"a divisor of {size}")


def check_tensor_parallel(workers: int, hf_config: dict[str, Any]) -> None:
    """Check that a number of workers can share each layer of a checkpoint in vLLM."""
    heads = hf_config.get("num_attention_heads")
    kv_heads = hf_config.get("num_key_value_heads") or heads or workers
    vocab = -(-hf_config.get("vocab_size", 0) // _VOCAB_PADDING) * _VOCAB_PADDING
    sizes = {"num_attention_heads": heads, "intermediate_size": hf_config.get("intermediate_size")}
    for name, size in {**sizes, "padded vocab_size": vocab}.items():
        if (size or 0) % workers:
            problem = f"{workers} given, and the model's {name} is {size}"
            fail("generator.tensor_parallel_size", problem, f"a divisor of {size}")
    if kv_heads % workers and workers % kv_heads:  # fewer heads are replicated
        problem = f"{workers} given, and the model's num_key_value_heads is {kv_heads}"
        allowed = f"a divisor or multiple of {kv_heads}"
        fail("generator.tensor_parallel_size", problem, allowed)


def _check_model_folder(key: str, folder: Path) -> None:
    if folder.is_dir():
        return
    owner = "Qwen" if folder.name.startswith("Qwen") else "<owner>"
    command = f"tune download {owner}/{folder.name} --output-dir {folder}"
    if "tiny" in folder.name:
        command = "python -m grpo_components.examples.tiny_policy"
    fail(key, f"no folder {folder}", f"an existing one; `{command}` makes it")


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
        path = settings.checkpointer["_component_"]
        if path.startswith("torchtune.") and not path.endswith(".FullModelHFCheckpointer"):
            problem = f"{path} given, and vLLM needs the format of Hugging Face"
            allowed = "torchtune.training.FullModelHFCheckpointer"
            fail("checkpointer._component_", problem, allowed)
    if Path(str(given)).resolve() != base.resolve():
        fail(key, f"{given} given, and generators start from base_model_path", str(base))


def _files(settings: Settings) -> Iterator[tuple[str, Path]]:
    """Yield the files that a run reads, each with its key; refuse data files of unknown kind."""
    base, checkpointer = Path(settings.base_model_path), settings.checkpointer
    yield "base_model_path", base / "config.json"
    if checkpointer is not None and not settings.is_hugging_face:
        names = checkpointer.get("checkpoint_files")
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
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
            fail(key, f"no folder {path}", allowed)
        from huggingface_hub import hf_hub_download  # takes half a second

        try:
            folder = Path(hf_hub_download(path, "config.json")).parent
        except (OSError, ValueError) as error:  # HF_HUB_OFFLINE=1 takes it from the cache alone
            fail(key, f"{path} cannot be loaded: {error}", allowed)
    kinds = read_hf_config(key, folder).get("architectures") or ["model without architectures"]
    if not kinds[0].endswith("ForSequenceClassification"):
        fail(key, f"{path} has a {kinds[0]}", "a model ForSequenceClassification")


# ---- the teacher --------------------------------------------------------------------------------


def _check_teacher(settings: Settings, policy_config: dict[str, Any]) -> None:
    """Refuse a teacher that is missing, or that has other tokens than the policy."""
    if settings.teacher is None:
        return
    folder = Path(settings.teacher.path)
    _check_model_folder(_TEACHER, folder)
    if not any(folder.glob("*.safetensors")):
        fail(_TEACHER, f"no *.safetensors in {folder}", "a folder with a model's weights")
    teacher_config = read_hf_config(_TEACHER, folder)
    ours, theirs = _token_ids(Path(settings.base_model_path)), _token_ids(folder)
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            found = theirs.get(token, "no id")
            problem = f"{folder} has another tokenizer: token {shown(token)} is {number} of the "
            problem += f"policy, and {found} there"
            fail(_TEACHER, problem, "one with the policy's tokens")
    least = {"vocab_size": policy_config.get("vocab_size")}
    least["max_position_embeddings"] = longest_sequence(settings)
    for name, needed in least.items():
        if needed and (has := teacher_config.get(name)) is not None and has < needed:
            fail(_TEACHER, f"{folder} has {name}: {has}", f"a model with {needed} or more")


def _token_ids(folder: Path) -> dict[str, int]:
    """Return the ids of all tokens of a model's tokenizer."""
    for name in ("tokenizer.json", "vocab.json"):
        if (folder / name).is_file():
            read = json.loads((folder / name).read_text(encoding="utf-8"))
            break
    else:
        problem = f"{folder} has neither tokenizer.json nor vocab.json, to compare token ids"
        fail(_TEACHER, problem, "a folder with one of them")
    if name == "vocab.json":
        return read
    ids = read["model"]["vocab"]
    if isinstance(ids, list):  # Unigram: pairs of token and score, in the order of their ids
        ids = {pair[0]: number for number, pair in enumerate(ids)}
    return ids | {added["content"]: added["id"] for added in read.get("added_tokens") or ()}


# ---- output_dir ---------------------------------------------------------------------------------


def check_output(settings: Settings) -> None:
    """Refuse an output_dir that cannot be written, contains an input or lies in one, or is in use.

    Inputs must stay where they are: a used output_dir is moved aside with everything in it. Links
    are followed. `begin_run` checks it again, with the folder locked.
    """
    from grpo_components.records.resume import find_checkpoint, run_of  # imports torch

    output_dir = real_path(settings.output_dir)
    for key, named in _paths("", settings.model_dump()):
        path = real_path(named)
        if path.is_relative_to(output_dir):
            problem = f"{short(Path(named))} lies in {short(output_dir)}, and {key} names it"
            fail("output_dir", problem, "a folder for this run alone")
        if key in _INPUTS and output_dir.is_relative_to(path):
            problem = f"{short(output_dir)} lies in {key}, {short(Path(named))}"
            fail("output_dir", problem, "a folder outside of it")
    if Path.cwd().is_relative_to(output_dir):
        problem = f"{short(Path.cwd())} lies in {short(output_dir)}"
        fail("output_dir", problem, "a folder for this run alone")
    _check_writable("output_dir", output_dir)
    outputs = {"checkpointer.output_dir": settings.checkpointer}
    outputs["metric_logger.log_dir"] = settings.metric_logger
    if settings.profiler.enabled:
        outputs["profiler.output_dir"] = settings.profiler
    for key, section in outputs.items():
        place = section and section.get(key.rpartition(".")[2])
        if isinstance(place, str) and not real_path(place).is_relative_to(output_dir):
            _check_writable(key, real_path(place))
    refuse_folder_in_use(output_dir)  # before its contents are read
    checkpoint = find_checkpoint(settings.resume_from_checkpoint, output_dir)
    if checkpoint is not None and run_of(checkpoint) == output_dir:
        return  # a resume in the run's own folder
    if checkpoint is not None and output_dir.is_relative_to(checkpoint):
        problem = f"{short(output_dir)} lies in the checkpoint of resume_from_checkpoint"
        fail("output_dir", problem, "a folder outside of it")
    if is_used(output_dir) and checkpoint is not None and checkpoint.is_relative_to(output_dir):
        problem = f"{short(output_dir)} holds the checkpoint of resume_from_checkpoint, but not in "
        fail("output_dir", problem + "a run's folder checkpoints", "another folder")


def _check_writable(key: str, folder: Path) -> None:
    """Refuse a folder in which nothing can be made, or which cannot be made itself."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:  # in some places, such as /proc, even root can make no folder
        if nearest != folder or not (nearest.is_dir() and os.access(folder, os.W_OK)):
            tempfile.TemporaryDirectory(prefix=".grpo-", dir=nearest).cleanup()
    except OSError as error:
        fail(key, f"nothing can be made in {nearest}: {error.strerror}", "a writable place")


def _paths(key: str, given: Any) -> Iterator[tuple[str, str]]:
    """Yield the existing files and folders that a config names as inputs, each with its key."""
    if key.startswith(_OUTPUTS) or key in ("resume_from_checkpoint", "log_level"):
        return
    if isinstance(given, str):
        is_named = key in _INPUTS or os.sep in given or os.path.isfile(given)
        if is_named and os.path.lexists(given):
            yield key, str(run_folder(given)) if key == "replay_events" else given
        return
    items = given.items() if isinstance(given, dict) else ()
    items = enumerate(given) if isinstance(given, list | tuple) else items
    for name, value in items:
        yield from _paths(f"{key}.{name}" if key else str(name), value)


def check_disk(settings: Settings) -> None:
    """Refuse a run whose checkpoints do not fit onto the disk of output_dir."""
    from grpo_components.models.lora import pushed_shapes  # imports torch

    shapes = pushed_shapes(Path(settings.base_model_path), settings.lora)
    parameters = sum(math.prod(shape) for shape in shapes.values())
    optimizer = settings.optimizer["_component_"]
    each = checkpoint_folder.nbytes(parameters, parameters, settings.dtype, optimizer)
    most = checkpoint_folder.most_at_once(
        settings.num_steps, settings.save_every_n_steps, settings.keep_last_n, settings.keep_best
    )
    output_dir = real_path(settings.output_dir)
    resumes = bool(settings.resume_from_checkpoint)  # else what is there is moved aside, and stays
    there = sum(file.st_size for file in _stats(output_dir / "checkpoints")) if resumes else 0
    place = next(path for path in (output_dir, *output_dir.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if most * each > free + there:
        gib = 2**30
        problem = f"{short(output_dir)} has {free / gib:.3g} GiB free, and {most} checkpoints of "
        problem += f"{each / gib:.3g} GiB are there at once"
        allowed = "a larger disk, a larger save_every_n_steps or a smaller keep_last_n"
        fail("output_dir", problem, allowed)


def _stats(folder: Path) -> Iterator[os.stat_result]:
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            yield path.lstat()
