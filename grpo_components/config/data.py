"""Builds tokenizer, data sets and the stream of a run's prompts, and checks every prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from grpo_components.config.components import RAISES, build, environment_kind
from grpo_components.config.files import read_hf_config
from grpo_components.data.curriculum import MAX_PROMPTS, PromptCurriculum
from grpo_components.data.datasets import PromptDataset
from grpo_components.data.prompt_mix import PromptMix, takes_tools
from grpo_components.data.prompt_stream import PromptStream, converted
from grpo_components.data.tokenizers import hugging_face_tokenizer, num_ids
from grpo_components.errors import ConfigError, fail
from grpo_components.objective.component_errors import named_failure
from grpo_components.offline.partial_runs import RecordedPrompts
from grpo_components.settings import HUGGING_FACE, Settings
from grpo_components.slow_calls import told_if_slow
from grpo_components.state_files import check_storable


def build_data(cfg: Settings) -> tuple[Any, Any, Any]:
    """Build the tokenizer, the data set and the evaluation data set; refuse unusable prompts."""
    tokenizer = build("tokenizer", cfg.tokenizer)
    for name in ("encode", "decode", "stop_tokens"):
        if not hasattr(tokenizer, name):
            problem = f"{cfg.tokenizer._component_} makes an object without {name}"
            fail("tokenizer", problem, "a tokenizer of torchtune, or one like it")
    tools, data = _tools_of(cfg.environment), {}
    for key in ("dataset", "eval_dataset"):
        if (node := getattr(cfg, key)) is not None:
            offered = {"tools": tools} if tools and takes_tools(node) else {}
            data[key] = build(key, node, tokenizer, **offered)
            _check_rows(key, node._component_, data[key])
            if key == "dataset" and not (cfg.train_from or cfg.eval_only or cfg.rollout_only):
                _check_columns(node._component_, data[key])
    hf_config = read_hf_config("base_model_path", Path(cfg.base_model_path))
    vocab_size = hf_config.get("vocab_size")
    of_transformers = cfg.model.get("_component_") == HUGGING_FACE
    trained = {
        "model.max_seq_len": cfg.model.get("max_seq_len"),
        "the model's max_position_embeddings": hf_config.get("max_position_embeddings"),
        # torchtune's attention has no window; longer sequences would differ from the generator's.
        "the model's sliding_window": None if of_transformers else _sliding_window(hf_config),
        "tokens_per_micro_batch": cfg.tokens_per_micro_batch,
    }
    name, most = _lowest(trained)
    talk = cfg.generator.max_model_len  # of agents, whose prompts are not known yet
    if talk and talk > most and environment_kind(cfg.environment) == "agents":
        raise ConfigError("generator.max_model_len", f"{talk} given", f"at most {most}, {name}")
    if cfg.train_from:
        data["dataset"] = recorded = RecordedPrompts(cfg.train_from)
        recorded.check(most, name)
    longest = cfg.ptx and cfg.ptx.get("max_tokens")
    if isinstance(longest, int) and longest > most:
        raise ConfigError("ptx.max_tokens", f"{longest} given", f"at most {most}, {name}")
    limit = _lowest({"generator.max_model_len": cfg.generator.max_model_len, **trained})
    for key, dataset in data.items():
        if isinstance(dataset, PromptMix):
            nodes, parts = getattr(cfg, key).parts, dataset.parts
            for part in parts:
                where = f"{key}.parts.{part}"
                _check_prompts(cfg, where, nodes[part], parts[part].prompts, limit, vocab_size)
        elif not isinstance(dataset, RecordedPrompts):  # those were checked above
            _check_prompts(cfg, key, getattr(cfg, key), dataset, limit, vocab_size)
    return tokenizer, data["dataset"], data.get("eval_dataset", PromptDataset([]))


def build_prompts(cfg: Settings, dataset: Any) -> PromptStream | PromptCurriculum:
    """Build the stream that gives each new group its prompt, in the order the config asks for."""
    if cfg.curriculum is None:
        return PromptStream(dataset, shuffle=cfg.shuffle, seed=cfg.seed)
    if len(dataset) > MAX_PROMPTS:
        problem = f"given with a data set of {len(dataset)} prompts"
        fail("curriculum", problem, f"null, or at most {MAX_PROMPTS} prompts")
    return PromptCurriculum(dataset, cfg.curriculum, cfg.seed)


def sampled_ids(cfg: Settings, tokenizer: Any) -> int | None:
    """Return n if only ids below n, which the tokenizer knows, may be sampled; None: any id."""
    stops = cfg.generator.stop_token_ids or getattr(tokenizer, "stop_tokens", ())
    if environment_kind(cfg.environment) == "agents":  # agents use the model's own tokenizer
        tokenizer = hugging_face_tokenizer(cfg.base_model_path)
    return num_ids(tokenizer, stops)


def left_out(dataset: Any, held_out: Any) -> list[str]:
    """Return the notes of both data sets for the user, such as how many rows they leave out."""
    own, other = (getattr(each, "note", "") for each in (dataset, held_out))
    other = re.sub("^dataset", "eval_dataset", other, flags=re.MULTILINE)
    return [*own.splitlines(), *other.splitlines()]


def shared_prompts(dataset: Any, held_out: Any) -> str:
    """Return a note on how many evaluation prompts are also trained on; empty if none are."""
    trained = {tuple(dataset[i]["prompt_ids"]) for i in range(len(dataset))}
    shared = sum(tuple(held_out[i]["prompt_ids"]) in trained for i in range(len(held_out)))
    note = f"eval_dataset: {shared} of its {len(held_out)} prompts are also trained on"
    return note if shared else ""


def _sliding_window(raw: Mapping[str, Any]) -> int | None:
    """Return the base model's attention window in tokens; None without one.

    For a key missing in config.json, the default of transformers for the model family counts.
    """
    if raw.get("model_type") == "qwen2" and not raw.get("use_sliding_window", False):
        return None
    window = raw.get("sliding_window", 4096 if raw.get("model_type") == "mistral" else None)
    return window or None  # vLLM reads 0 as no window


def _tools_of(environment: DictConfig) -> list[Any]:
    """Return the JSON schemas of the tools that the component `environment.world` offers."""
    world = environment.get("world")
    if not (isinstance(world, DictConfig) and "_component_" in world):
        return []
    return list(getattr(build("environment.world", world), "tool_schemas", ()))


def _lowest(limits: Mapping[str, int | None]) -> tuple[str, int]:
    given = [(name, limit) for name, limit in limits.items() if limit is not None]
    return min(given, key=lambda item: item[1])


def _check_rows(key: str, component: str, dataset: Any) -> None:
    """Refuse a data set if fields that the recipe reads are missing or of a wrong type."""
    fields, problem = ("prompt_index", "prompt_ids", "prompt_text", "answer"), ""
    allowed = "rows by index with a whole number as prompt_index, a list of them as prompt_ids,"
    allowed += " a text as prompt_text, and an answer; and a max_prompt_length"
    with named_failure(key, component, RAISES, allowed):
        rows = [[dataset[i][field] for field in fields] for i in range(len(dataset))]
        if not rows or len({index for index, *_ in rows}) < len(rows):
            problem = "gives no rows" if not rows else "gives two rows with the same prompt_index"
        else:
            (index, ids, text, _), _ = rows[0], dataset.max_prompt_length
            is_ids = np.ndim(ids) == 1 and (np.asarray(ids).dtype.kind in "iu" or not len(ids))
            if not (isinstance(index, Integral) and is_ids and isinstance(text, str)):
                problem = f"gives {index!r}, {ids!r}, {text!r} as {', '.join(fields[:3])}"
        if problem:
            fail(key, f"{component} {problem}", allowed)


def _check_columns(component: str, dataset: Any) -> None:
    """Refuse rows that cannot be stored: checkpoints keep the rows of groups to train or reuse."""
    with told_if_slow("a check of all rows"):
        for row in map(dataset.__getitem__, range(len(dataset))):
            try:
                prompt = converted(row)
                del prompt["prompt_ids"]
                check_storable(prompt, "row")
            except TypeError as error:
                allowed = "texts, numbers, lists, mappings and arrays of numbers"
                problem = f"{component}, prompt_index {row['prompt_index']}: {error}"
                fail("dataset", problem, allowed)


def _check_prompts(
    cfg: Settings,
    key: str,
    node: DictConfig,
    prompts: Any,
    limit: tuple[str, int],
    vocab_size: int | None,
) -> None:
    """Refuse a prompt that has unknown tokens, or is too long for a response to follow."""
    chat, styled = node.get("chat_template"), cfg.tokenizer.get("prompt_template") is not None
    if styled and node._component_.startswith("grpo_components.") and chat != "torchtune":
        problem = f"{chat or 'null'} given with tokenizer.prompt_template, which it ignores"
        allowed = "torchtune, or tokenizer.prompt_template: null"
        raise ConfigError(f"{key}.chat_template", problem, allowed)
    name, most = limit
    most -= cfg.generator.max_response_tokens
    for prompt in map(prompts.__getitem__, range(len(prompts))):
        ids = prompt["prompt_ids"]
        if not 0 < len(ids) <= most:
            problem = f"has {len(ids)} tokens"
            allowed = f"1 to {most}, {name} minus generator.max_response_tokens"
        elif vocab_size is not None and max(ids) >= vocab_size:
            problem = f"has the token {max(ids)}"
            allowed = f"below {vocab_size}, the vocab_size of base_model_path"
        else:
            continue
        where = f"{node.get('source', node._component_)}, row {prompt['prompt_index'] + 1}"
        raise ConfigError(key, f"{where}, field question: the prompt {problem}", allowed)
