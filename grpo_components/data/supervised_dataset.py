"""Supervised examples from a file or the hub: prompts and responses, turned into token ids once."""

from __future__ import annotations

from typing import Any

from grpo_components.data.rows import Row, read_rows
from grpo_components.training.supervised import SupervisedExamples


def supervised_dataset(
    tokenizer: Any,
    *,
    source: str,
    coeff: float,
    max_tokens: int,
    examples_per_update: int = 8,
    name: str | None = None,
    split: str = "train",
    prompt_field: str = "prompt",
    response_field: str = "response",
    prompt_template: str = "{prompt}",
    seed: int = 0,
) -> SupervisedExamples:
    """Examples for the supervised loss (`ptx`) beside the policy's.

    Args:
        tokenizer: torchtune's.
        source: a .jsonl, .json, .parquet or .csv file, or the name of a Hugging Face data set.
        coeff: weight of the supervised loss; 0 leaves it out.
        max_tokens: longest prompt plus response.
        examples_per_update: rows in one optimizer update, of all ranks together.
        name: configuration of a hub data set.
        split: of a hub data set.
        prompt_field: of a row.
        response_field: of a row.
        prompt_template: text of a prompt; `{prompt}` stands in it once.
        seed: of the order.

    Raises:
        ValueError: naming the argument, or file, row (from 1) and field of what cannot be used.
    """
    if type(max_tokens) is not int or max_tokens < 1:
        raise ValueError(
            f"ptx.max_tokens: {max_tokens!r} given; allowed: a whole number at least 1"
        )
    if not isinstance(prompt_template, str) or prompt_template.count("{prompt}") != 1:
        raise ValueError("ptx.prompt_template: must contain {prompt} exactly once")
    examples: list[tuple[list[int], list[int]]] = []
    for number, values in enumerate(read_rows(source, name, split), start=1):
        where = f"ptx {source}, row {number}"
        row = Row(values, where, {})
        prompt, response = row.text(prompt_field), row.text(response_field)
        text = prompt_template.replace("{prompt}", prompt)
        prompt_ids = tokenizer.encode(text, add_bos=True, add_eos=False)
        response_ids = tokenizer.encode(response, add_bos=False, add_eos=True)
        size = len(prompt_ids) + len(response_ids)
        if size > max_tokens:
            raise ValueError(f"{where}: has {size} tokens, ptx.max_tokens is {max_tokens}")
        examples.append((prompt_ids, response_ids))
    if not examples:
        raise ValueError(f"ptx {source}: has no rows")
    return SupervisedExamples(
        examples, coeff=coeff, examples_per_update=examples_per_update, seed=seed
    )
