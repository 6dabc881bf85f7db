"""Prompt data sets: questions with known answers, turned into token ids once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.utils.data import Dataset

from grpo_components.data.prompts import prompt_encoder
from grpo_components.data.row_choice import Partition, RowFilters
from grpo_components.data.rows import Row, read_rows

Prompt = dict[str, Any]
ReadRow = Callable[[Row], tuple[str, str]]
"""The question and the known answer of a row; it raises a ValueError that names the row."""


class PromptDataset(Dataset[Prompt]):
    """Prompts in the order of their source.

    Args:
        prompts: each with prompt_index, prompt_ids, prompt_text, answer.
        note: what a person should know of rows that were not used; may be empty.
    """

    def __init__(self, prompts: list[Prompt], note: str = "") -> None:
        self._prompts, self.note = prompts, note
        self.max_prompt_length = max(len(prompt["prompt_ids"]) for prompt in prompts)
        """Tokens of the longest prompt."""

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]


def question_and_answer(row: Row) -> tuple[str, str]:
    """Fields `question`, and `answer` as it is."""
    return row.text("question"), row.text_or_number("answer")


def prompt_dataset(
    tokenizer: Any,
    *,
    source: str,
    name: str | None = None,
    split: str = "train",
    read: ReadRow = question_and_answer,
    columns: Mapping[str, str] | None = None,
    filters: Mapping[str, Mapping[str, Any]] | None = None,
    partition: str | None = None,
    num_rows: int | None = None,
    prompt_template: str = "{question}",
    chat_template: str | None = None,
    system_prompt: str | None = None,
    max_prompt_tokens: int | None = None,
    too_long: str = "error",
) -> PromptDataset:
    """A data set of rows with the fields `question` and `answer`, a text or a number, as it is.

    Args:
        tokenizer: torchtune's.
        source: a .jsonl, .json, .parquet or .csv file, or the name of a Hugging Face data set.
        name: configuration of a Hugging Face data set.
        split: of a Hugging Face data set.
        read: question and answer of a row, for builders of other formats.
        columns: names of the source's columns, by field, where they have others; a field that
            `read` never asks for is refused.
        filters: conditions by column of the source, see `RowFilters`.
        partition: some of n parts of the rows, such as `1-9/10`, see `Partition`.
        num_rows: use the first n rows that are left; None uses all.
        prompt_template: text of a prompt; `{question}` stands in it once.
        chat_template: of the prompt as a chat: `torchtune`, or a model folder, see
            `prompt_encoder`; None for the text alone.
        system_prompt: of the chat.
        max_prompt_tokens: longest prompt allowed.
        too_long: what a longer one is: an `error`, or a row to `drop`.

    Returns:
        The prompts. Their prompt_index is the row in the source, from 0, whatever was left out.

    Raises:
        ValueError: naming the key, or source, row (from 1) and field of what cannot be used.
    """
    _check_kinds("a text", source=source, split=split)
    chat = {"chat_template": chat_template, "system_prompt": system_prompt}
    _check_kinds("a text, or null", name=name, **chat)
    _check_kinds("a whole number above 0", num_rows=num_rows, max_prompt_tokens=max_prompt_tokens)
    _check_kinds("the source's column by field", columns=columns)
    if too_long not in ("error", "drop"):
        raise ValueError(f"dataset.too_long: {too_long!r} given; allowed: error | drop")
    encode = prompt_encoder(tokenizer, prompt_template, chat_template, system_prompt)
    keep = RowFilters({} if filters is None else filters)
    in_part = Partition("1/1" if partition is None else partition)
    prompts: list[Prompt] = []
    asked: set[str] = set()
    longer = f"longer than {max_prompt_tokens} tokens"
    left_out = dict.fromkeys(("filtered out", "in other parts", longer), 0)
    number = 0
    for number, values in enumerate(read_rows(source, name, split), start=1):
        where = f"dataset {source}, row {number}"
        if not keep(Row(values, where, {})):
            left_out["filtered out"] += 1
            continue
        row = Row(values, where, columns or {})
        question, answer = read(row)
        asked |= row.asked
        if not (isinstance(question, str) and isinstance(answer, str)):
            given = f"{question!r} and {answer!r}"
            raise ValueError(f"{where}: read as {given}; allowed: question and answer as texts")
        if not in_part(question):
            left_out["in other parts"] += 1
            continue
        ids, text = encode(question)
        if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
            if too_long == "error":
                raise ValueError(
                    f"{where}, field question: the prompt has {len(ids)} tokens, "
                    f"and max_prompt_tokens is {max_prompt_tokens}"
                )
            left_out[longer] += 1
            continue
        prompt = {"prompt_ids": ids, "prompt_text": text, "answer": answer}
        prompts.append({"prompt_index": number - 1, **prompt})
        if len(prompts) == num_rows:
            break
    why = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
    if not prompts:
        raise ValueError(f"dataset {source}: has no rows{f' left: {why}' if why else ''}")
    for field in sorted(set(columns or {}) - asked):
        fields = ", ".join(sorted(asked))
        raise ValueError(f"dataset.columns.{field}: no field of the builder; allowed: {fields}")
    note = f"dataset {source}: {len(prompts)} prompts of {number} rows; {why}" if why else ""
    return PromptDataset(prompts, note)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "a text": lambda value: isinstance(value, str),
    "a text, or null": lambda value: isinstance(value, str | None),
    "a whole number above 0": lambda value: value is None or (type(value) is int and value > 0),
    "the source's column by field": lambda value: (
        value is None
        or (isinstance(value, Mapping) and all(isinstance(name, str) for name in value.values()))
    ),
}


def _check_kinds(kind: str, **given: Any) -> None:
    for name, value in given.items():
        if not _KINDS[kind](value):
            raise ValueError(f"dataset.{name}: {value!r} given; allowed: {kind}")


def _after_hashes(row: Row) -> tuple[str, str]:
    question = row.text("question")
    _, marker, answer = row.text("answer").rpartition("####")
    answer = answer.strip().replace(",", "")
    if not marker or not answer:
        row.refuse("answer", "does not end in `#### <answer>`")
    return question, answer


gsm8k_dataset = partial(prompt_dataset, read=_after_hashes)
"""A data set in GSM8K's format: `question`, and an `answer` that ends in `#### 42`."""


_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_UNBRACED = re.compile(r"-?\w(?:[\w.,/]*\w)?")  # of `\boxed 5`, which MATH has, too
_BRACE = re.compile(r"\\.|([{}])", re.DOTALL)  # one after a backslash is text


def _in_the_box(row: Row) -> tuple[str, str]:
    problem, solution = row.text("problem"), row.text("solution")
    for box in reversed(list(_BOX.finditer(solution))):
        if content := _content(solution[box.end() :]):
            return problem, content
    row.refuse("solution", r"has no answer in \boxed{}")


def _content(text: str) -> str:
    """What a box holds that opens where the text begins; nothing if it is never closed."""
    if not text.startswith("{"):
        match = _UNBRACED.match(text)
        return match[0] if match else ""
    depth = 0
    for brace in _BRACE.finditer(text):
        depth += (brace[1] == "{") - (brace[1] == "}")
        if depth == 0:
            return text[1 : brace.start()].strip()
    return ""


math_dataset = partial(
    prompt_dataset,
    read=_in_the_box,
    prompt_template="{question}\nReason step by step, and put the final answer in \\boxed{}.\n",
)
"""A data set in MATH's format: `problem`, and a `solution` whose last `\\boxed{}` is the answer."""


def _numbers_and_target(row: Row) -> tuple[str, str]:
    numbers, target = row.parsed("numbers"), row.parsed("target")
    if not isinstance(numbers, list) or not numbers or not all(type(n) is int for n in numbers):
        row.refuse("numbers", "must be a list of whole numbers")
    if type(target) is not int:
        row.refuse("target", "must be a whole number")
    listed = ", ".join(map(str, numbers))
    question = (
        f"Make {target} out of the numbers {listed}: use each exactly once, with +, -, *, / and "
        "parentheses."
    )
    return question, json.dumps({"numbers": numbers, "target": target})


countdown_dataset = partial(
    prompt_dataset,
    read=_numbers_and_target,
    prompt_template="{question} Give the expression in <answer> </answer>.\n",
)
"""Countdown: `numbers`, and the `target` to make of them; the `answer` is both, as JSON text."""


def _prompt_and_tests(row: Row) -> tuple[str, str]:
    prompt, tests = row.text("prompt"), row.parsed("tests")
    if isinstance(tests, list):
        tests = {"asserts": tests}
    if isinstance(tests, dict):  # a table has every key in every row, those of other rows as null
        tests = {kind: cases for kind, cases in tests.items() if cases is not None}
    before = _before_asserts(row, tests)
    if isinstance(tests, dict) and tests.keys() == {"inputs", "outputs"}:
        columns = [tests["inputs"], tests["outputs"]]
        if all(isinstance(texts, list) for texts in columns) and len({*map(len, columns)}) == 1:
            pairs = zip(*columns, strict=True)
            tests = {"stdin_stdout": [{"input": i, "output": o} for i, o in pairs]}
    if not _are_tests(tests):
        row.refuse(
            "tests",
            'must be {"stdin_stdout": [{"input": text, "output": text}, ...]} or '
            '{"asserts": [text, ...]}, with at least one test',
        )
    if before and "asserts" not in tests:
        row.refuse(min(before), "goes with asserts, and the tests are others")
    return prompt, json.dumps({**tests, **before})


def _before_asserts(row: Row, tests: Any) -> dict[str, Any]:
    """What MBPP has beside the asserts, of the row or its tests; what is empty is left out."""
    before: dict[str, Any] = {}
    for field, allowed in (("test_imports", "a list of texts"), ("test_setup_code", "a text")):
        value = tests.pop(field, None) if isinstance(tests, dict) else None
        if not value and row.has(field):
            value = row.value(field)
        if field == "test_imports" and isinstance(value, str) and value.strip():
            is_list = value.lstrip().startswith("[")  # as JSON, of a CSV file
            value = row.parsed(field) if is_list else [value]
        if not value:
            continue
        if not (_are_texts(value) if field == "test_imports" else isinstance(value, str)):
            row.refuse(field, f"must be {allowed}")
        before[field] = value
    return before


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _are_tests(tests: Any) -> bool:
    if not isinstance(tests, dict) or len(tests) != 1:
        return False
    ((kind, cases),) = tests.items()
    if not isinstance(cases, list) or not cases:
        return False
    if kind == "asserts":
        return all(isinstance(case, str) and case.strip() for case in cases)
    return kind == "stdin_stdout" and all(
        isinstance(case, dict)
        and case.keys() == {"input", "output"}
        and all(isinstance(text, str) for text in case.values())
        for case in cases
    )


code_dataset = partial(
    prompt_dataset,
    read=_prompt_and_tests,
    prompt_template="{question}\nWrite the program in Python, in a ```python block.\n",
)
"""Programs: `prompt`, and `tests` as JSON or as a mapping, which travel in `answer` as JSON text.

The tests are `{"stdin_stdout": [{"input": text, "output": text}, ...]}`, or `{"asserts": [text,
...]}`; a list of asserts, and `{"inputs": [...], "outputs": [...]}`, are understood, too. Where a
row has `test_imports`, a list of statements, or `test_setup_code`, they run before its asserts."""
