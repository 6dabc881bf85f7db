"""Loads supervised examples (prompts with their responses) as token ids."""

from __future__ import annotations

from typing import Any

from grpo_components.data.rows import Row, read_rows
from grpo_components.errors import ConfigError
from grpo_components.training.sample import SupervisedExamples


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
    """Load the examples of the supervised loss (`ptx`), which is added to the policy loss.

    Args:
        tokenizer: torchtune's tokenizer.
        source: a .jsonl, .json, .parquet or .csv file, or the name of a Hugging Face data set.
        coeff: weight of the supervised loss; 0 disables it.
        max_tokens: longest prompt plus response, in tokens.
        examples_per_update: examples per optimizer update, on all ranks together.
        name: configuration of a Hugging Face data set.
        split: split of a Hugging Face data set.
        prompt_field: field of a row that holds the prompt.
        response_field: field of a row that holds the response.
        prompt_template: text of the prompt; contains `{prompt}` once.
        seed: seed of the order of the examples.

    Raises:
        ValueError: an argument is wrong, or a row cannot be used. The message names the argument,
            or the source, row (from 1) and field.
    """
    if type(max_tokens) is not int or max_tokens < 1:
        raise ConfigError("ptx.max_tokens", f"{max_tokens!r} given", "a whole number at least 1")
    if not isinstance(prompt_template, str) or prompt_template.count("{prompt}") != 1:
        allowed = "a text that contains {prompt} once"
        raise ConfigError("ptx.prompt_template", f"{prompt_template!r} given", allowed)
    examples: list[tuple[list[int], list[int]]] = []
    for number, values in enumerate(read_rows(source, name, split), start=1):
        where = f"ptx {source}, row {number}"
        row = Row(values, where, None)
        prompt, response = row.text(prompt_field), row.text(response_field)
        text = prompt_template.replace("{prompt}", prompt)
        prompt_ids = tokenizer.encode(text, add_bos=True, add_eos=False)
        response_ids = tokenizer.encode(response, add_bos=False, add_eos=True)
        size = len(prompt_ids) + len(response_ids)
        if size > max_tokens:
            allowed = f"ptx.max_tokens, {max_tokens}"
            raise ValueError(f"{where}: {size} tokens; allowed: {allowed}")
        examples.append((prompt_ids, response_ids))
    if not examples:
        raise ValueError(f"ptx {source}: no rows")
    return SupervisedExamples(
        examples, coeff=coeff, examples_per_update=examples_per_update, seed=seed
    )
