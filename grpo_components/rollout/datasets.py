"""Prompt data sets: questions with known answers, turned into token ids once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
from torch.utils.data import Dataset

Prompt = dict[str, Any]


class PromptDataset(Dataset[Prompt]):
    """Prompts in the order of their source.

    Args:
        prompts: each with prompt_index, prompt_ids, prompt_text, answer.
    """

    def __init__(self, prompts: list[Prompt]) -> None:
        self._prompts = prompts
        self.max_prompt_length = max(len(prompt["prompt_ids"]) for prompt in prompts)
        """Tokens of the longest prompt."""

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]


def gsm8k_dataset(
    tokenizer: Any,
    *,
    source: str,
    name: str | None = None,
    split: str = "train",
    prompt_template: str = "{question}",
    max_prompt_tokens: int | None = None,
    num_rows: int | None = None,
) -> PromptDataset:
    """A data set in GSM8K's format: `question`, and an `answer` that ends in `#### 42`.

    Args:
        tokenizer: torchtune's.
        source: a .jsonl or .parquet file, or the name of a data set on the Hugging Face hub.
        name: configuration of a hub data set.
        split: of a hub data set.
        prompt_template: text of a prompt; `{question}` stands in it once.
        max_prompt_tokens: longest prompt allowed.
        num_rows: use the first n rows only; None uses all.

    Returns:
        The prompts.

    Raises:
        ValueError: naming file, row (from 1) and field of what cannot be used.
    """
    if prompt_template.count("{question}") != 1:
        raise ValueError("dataset.prompt_template: must contain {question} exactly once")
    prompts: list[Prompt] = []
    for number, row in enumerate(rows(source, name, split), start=1):
        if num_rows is not None and number > num_rows:
            break
        where = f"dataset {source}, row {number}"
        question = text_of(row, "question", where)
        _, marker, answer = text_of(row, "answer", where).rpartition("####")
        answer = answer.strip().replace(",", "")
        if not marker or not answer:
            raise ValueError(f"{where}, field answer: does not end in `#### <answer>`")
        text = prompt_template.replace("{question}", question)
        ids = tokenizer.encode(text, add_bos=True, add_eos=False)
        if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
            raise ValueError(
                f"{where}, field question: the prompt has {len(ids)} tokens, "
                f"dataset.max_prompt_tokens is {max_prompt_tokens}"
            )
        prompts.append(
            {
                "prompt_index": number - 1,
                "prompt_ids": ids,
                "prompt_text": text,
                "answer": answer,
            }
        )
    if not prompts:
        raise ValueError(f"dataset {source}: has no rows")
    return PromptDataset(prompts)


def rows(source: str, name: str | None, split: str) -> Iterable[Any]:
    """Raw rows of a data set.

    Args:
        source: a .jsonl or .parquet file, or the name of a data set on the Hugging Face hub.
        name: configuration of a hub data set.
        split: of a hub data set.

    Raises:
        ValueError: naming file and row of what cannot be read.
    """
    path = Path(source)
    if path.suffix == ".jsonl":
        return _json_lines(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    try:
        return datasets.load_dataset(source, name, split=split)
    except (OSError, ValueError) as error:
        raise ValueError(f"dataset {source}: cannot be loaded: {error}") from error


def _json_lines(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise ValueError(f"dataset {path}: no such file")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"dataset {path}, row {number}: not readable: {error}") from None


def _parquet_rows(path: Path) -> Iterator[Any]:
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield row
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        after = f", after row {number}" if number else ""
        raise ValueError(f"dataset {path}{after}: cannot be loaded: {error}") from error


def text_of(row: Any, field: str, where: str) -> str:
    """A row's text in a field.

    Args:
        row: of a data set.
        field: its name.
        where: the row is, for the error.

    Raises:
        ValueError: if there is no text to be tokenized.
    """
    if not isinstance(row, dict) or field not in row:
        raise ValueError(f"{where}: has no field {field}")
    value = row[field]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}, field {field}: must be a text that is not empty")
    try:
        value.encode()  # JSON can hold half a surrogate pair, which no tokenizer takes
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}, field {field}: is no Unicode text: {error}") from None
    return value
