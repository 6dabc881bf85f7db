"""Builds prompt data sets: questions as token ids, with their known answers."""

from __future__ import annotations

import contextlib
import inspect
import json
import multiprocessing
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal, NotRequired, cast

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, with_config
from torch.utils.data import Dataset
from tqdm import tqdm
from typing_extensions import TypedDict

from grpo_components.data.boxes import last_boxed
from grpo_components.data.columns import OWN_FIELDS, filled, plain_value
from grpo_components.data.prompts import prompt_encoder
from grpo_components.data.row_choice import Partition, RowFilters
from grpo_components.data.rows import Question, Row, is_question, read_rows
from grpo_components.errors import ConfigError
from grpo_components.machine import usable_cpus
from grpo_components.shapes import AnyText, described_as, fits, read_as
from grpo_components.trajectory import Prompt

_ALONE, _CHUNK = 4096, 256
"""Maximum rows that this process tokenizes alone, and rows that a worker process gets at a time."""
_work: Callable[[Any], Any]
"""Function that forked processes inherit and call, because a tokenizer may not be picklable."""
ReadRow = Callable[[Row], tuple[Question, str]]
"""Function from a row to its question and known answer; raises a ValueError that names the row."""


class PromptDataset(Dataset[Prompt]):
    """Data set of prompts, in the order of their source.

    Args:
        prompts: each with prompt_index, prompt_ids [P], prompt_text, answer and the other columns
            of its row; a column that a row lacks is None.
        note: line that tells the user how many rows were left out and why; empty if none were.
    """

    def __init__(self, prompts: list[Prompt], note: str = "") -> None:
        self._prompts, self.note = prompts, note
        self.max_prompt_length = max((len(prompt["prompt_ids"]) for prompt in prompts), default=0)
        """Length of the longest prompt, in tokens."""

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]


def question_and_answer(row: Row) -> tuple[Question, str]:
    """Return a row's `question` and `answer`; an answer that is a number becomes text."""
    return row.question("question"), row.text_or_number("answer")


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
    chat_template_kwargs: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
    max_prompt_tokens: int | None = None,
    too_long: str = "error",
    tools: Sequence[Mapping[str, Any]] = (),
    rows: Iterable[Any] | None = None,
) -> PromptDataset:
    """Load a data set whose rows have a `question` and an `answer` (a text or a number).

    A question is a text, or a chat: a list of messages with `role` and `content`.

    Args:
        tokenizer: torchtune's tokenizer.
        source: a .jsonl, .json, .parquet or .csv file, or the name of a Hugging Face data set.
        name: configuration of a Hugging Face data set.
        split: split of a Hugging Face data set.
        read: function that returns a row's question and answer; set by builders of other formats.
        columns: for each field with another name in the source, the name of its column there;
            `a.b` is the entry `b` of the column `a`.
        filters: conditions on each column of the source, by column name; see `RowFilters`.
        partition: parts of the rows to use, such as `1-9/10`, see `Partition`.
        num_rows: how many of the remaining rows to use, from the first one; None uses all.
        prompt_template: text of the prompt; contains `{question}` once.
        chat_template: None (plain text), `torchtune` (the tokenizer's format), or a model folder.
        chat_template_kwargs: variables of the chat template, such as `enable_thinking: false`.
        system_prompt: system message of chats that have none of their own.
        max_prompt_tokens: longest allowed prompt, in tokens.
        too_long: what happens to a longer prompt: `error` raises, `drop` leaves out its row.
        tools: JSON schemas of the tools that prompts describe; default: those of environment.world.
        rows: the rows, if a builder generates them; `source` is then their name in messages.

    Returns:
        The prompts, each with the other columns of its row. Each prompt_index is the row number in
        the source, counted from 0 before any row is left out.

    Raises:
        ValueError: a setting or row is wrong; names the key, or the source, row (from 1) and field.
    """
    chat = {"chat_template": chat_template, "system_prompt": system_prompt, "columns": columns}
    chat["chat_template_kwargs"] = chat_template_kwargs
    lengths = {"num_rows": num_rows, "max_prompt_tokens": max_prompt_tokens, "too_long": too_long}
    read_as(_KEYS, {"source": source, "split": split, "name": name, **chat, **lengths}, "dataset")
    rows = read_rows(source, name, split) if rows is None else rows
    columns, where = columns or {}, f"dataset {source}"
    encode = prompt_encoder(
        tokenizer, prompt_template, chat_template, system_prompt, tools, chat_template_kwargs
    )
    keep = RowFilters({} if filters is None else filters)
    in_part = Partition("1/1" if partition is None else partition)
    too_many = f"longer than {max_prompt_tokens} tokens"
    left_out = dict.fromkeys(("filtered out", "in other parts", too_many), 0)
    num_read, asked = 0, set[str]()

    def questions() -> Iterator[tuple[Prompt, tuple[int, Question]]]:
        """Yield each selected row's prompt, without tokens or text, its number and its question."""
        nonlocal num_read
        for number, values in enumerate(_shown(rows, "reading", source, "rows"), start=1):
            num_read, place = number, f"{where}, row {number}"
            if not keep(Row(values, place, None)):
                left_out["filtered out"] += 1
                continue
            row = Row(values, place, columns)
            question, answer = read(row)
            asked.update(row.asked)
            if not (is_question(question) and isinstance(answer, str)):
                given = f"{question!r} and {answer!r}"
                raise ValueError(f"{place}: read as {given}; allowed: question and answer as texts")
            if in_part(question if isinstance(question, str) else json.dumps(question)):
                others = _others(values, columns) | {"prompt_index": number - 1, "answer": answer}
                yield others, (number, question)
            else:
                left_out["in other parts"] += 1

    def encoded(given: tuple[int, Question]) -> Prompt:
        try:
            ids, text = encode(given[1])
        except ConfigError as error:
            problem = f"{where}, row {given[0]}: {error.problem}"
            raise ConfigError(error.key, problem, error.allowed) from error
        return {"prompt_ids": ids, "prompt_text": text}

    prompts: list[Prompt] = []
    unread = questions()  # rows that are not used are not read
    while pairs := [*islice(unread, None if num_rows is None else num_rows - len(prompts))]:
        results = _in_processes(encoded, [given for _, given in pairs], source)
        for (others, _), prompt in zip(pairs, results, strict=True):
            length = len(prompt["prompt_ids"])
            if length <= (max_prompt_tokens or length):
                prompts.append({**others, **prompt})
            elif too_long == "drop":
                left_out[too_many] += 1
            else:
                problem = f"the prompt has {length} tokens"
                allowed = f"max_prompt_tokens, {max_prompt_tokens}"
                place = f"{where}, row {others['prompt_index'] + 1}, field question"
                raise ValueError(f"{place}: {problem}; allowed: {allowed}")
    why = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
    if not prompts:
        ranges = (f"{name} is {low:g} to {high:g}" for name, (low, high) in keep.ranges.items())
        why = ", ".join(filter(None, (why, *ranges)))
        raise ValueError(f"{where}: no rows{f' left: {why}' if why else ''}")
    for name in sorted(columns.keys() - asked):
        allowed = ", ".join(sorted(asked))
        if (field := columns[name]) in asked:
            allowed = f"`columns` is field: column; did you mean {{{field}: {name}}}?"
        raise ConfigError(f"dataset.columns.{name}", "unknown field", allowed)
    note = f"{where}: {len(prompts)} prompts of {num_read} rows; {why}" if why else ""
    notes = filter(None, (note, _unnamed_tools(where, prompts[0], tools)))
    return PromptDataset(filled(prompts), "\n".join(notes))


def passes_on_to_prompt_dataset(data_set: Callable[..., PromptDataset]) -> Any:
    """Decorator: replace `**prompts` in a signature by the arguments of `prompt_dataset`.

    So the check of a config finds a mistyped argument, and shows the nearest name.
    """
    own = inspect.signature(data_set)
    given = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    set_here = {*own.parameters, "source", "name", "split", "read", "columns", "rows"}
    passed = inspect.signature(prompt_dataset).parameters.values()
    both = [*given, *(p for p in passed if p.name not in set_here)]
    cast(Any, data_set).__signature__ = own.replace(parameters=both)
    return data_set


def _in_processes(work: Callable[[Any], Any], items: list[Any], name: str) -> Iterator[Any]:
    """Apply `work` to items: in worker processes, or in this process if the items are few."""
    global _work
    _work = work
    with contextlib.ExitStack() as stack:
        results = map(work, items)
        if len(items) > _ALONE:
            # Forked, and before Ray starts: spawned processes would have to get the tokenizer.
            forked, count = multiprocessing.get_context("fork"), usable_cpus()
            pool = stack.enter_context(ProcessPoolExecutor(count, mp_context=forked))
            results = pool.map(_work_here, items, chunksize=_CHUNK)
        yield from _shown(results, "tokenizing", name, "prompts", len(items))


def _shown(items: Iterable[Any], doing: str, name: str, unit: str, total: int | None = None) -> Any:
    """Yield the items unchanged; show a progress bar if this takes longer than 5 s."""
    return tqdm(items, f"{doing} {name}", total, unit=f" {unit}", delay=5, mininterval=1)


def _work_here(item: Any) -> Any:
    return _work(item)


def _others(values: Any, columns: Mapping[str, str]) -> Prompt:
    """Return a row's columns except question and answer, under the names in the source."""
    if not isinstance(values, dict):
        return {}
    used = {*OWN_FIELDS, *(columns.get(name, name) for name in ("question", "answer"))}
    return {name: plain_value(values[name]) for name in values if name not in used}


def _unnamed_tools(where: str, prompt: Prompt, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a warning about the first tool that a prompt does not name; empty if it names all."""
    names = [tool["function"]["name"] for tool in tools]
    missing = next((name for name in names if name not in prompt["prompt_text"]), "")
    note = f"{where}: its prompts do not name the tool {missing}; "
    note += "{tools} in dataset.system_prompt or dataset.prompt_template describes all tools"
    return note if missing else ""


_Text = Annotated[AnyText, described_as("a text")]
_TextOrNull = Annotated[AnyText | None, described_as("a text, or null")]
_Count = Annotated[Annotated[int, Field(gt=0)] | None, described_as("a whole number above 0")]


@with_config(ConfigDict(strict=True))
class _Keys(TypedDict):
    source: _Text
    split: _Text
    name: _TextOrNull
    chat_template: _TextOrNull
    system_prompt: _TextOrNull
    columns: Annotated[
        Mapping[Any, AnyText] | None, described_as("a column of the source by field")
    ]
    chat_template_kwargs: Annotated[
        Mapping[str, Any] | None, described_as("variables of the chat template, by name")
    ]
    num_rows: _Count
    max_prompt_tokens: _Count
    too_long: Annotated[Literal["error", "drop"], described_as("error | drop")]


_KEYS = TypeAdapter(Annotated[_Keys, described_as("the arguments of `prompt_dataset`")])


# One number with perhaps a sign, a currency or a unit: in `(1,234)` the comma may part two numbers.
_WITH_SEPARATORS = re.compile(r"[^\d()\[\]{},]*\d{1,3}(?:,\d{3})+(?:\.\d+)?[^\d()\[\]{},]*")


def _after_hashes(row: Row) -> tuple[Question, str]:
    question = row.question("question")
    _, marker, answer = row.text_or_number("answer").rpartition("####")
    answer = answer.strip()
    if _WITH_SEPARATORS.fullmatch(answer):
        answer = answer.replace(",", "")
    if not marker or not answer:
        plain = "dataset._component_=grpo_components.data.datasets.prompt_dataset for plain answers"
        row.refuse("answer", f"does not end with `#### <answer>`; allowed: {plain}")
    return question, answer


gsm8k_dataset = partial(prompt_dataset, read=_after_hashes)
"""Data set in GSM8K's format: `question`, and an `answer` that ends with `#### 42`."""


def _boxed_answer(row: Row) -> tuple[Question, str]:
    problem, solution = row.question("problem"), row.text("solution")
    if content := last_boxed(solution):
        return problem, content
    row.refuse("solution", r"contains no answer in \boxed{}")


math_dataset = partial(
    prompt_dataset,
    read=_boxed_answer,
    prompt_template="{question}\nReason step by step, and put the final answer in \\boxed{}.\n",
)
"""Data set in MATH's format: `problem`, and a `solution` whose last `\\boxed{}` is the answer."""


_WholeNumbers = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


def _numbers_and_target(row: Row) -> tuple[str, str]:
    numbers, target = row.parsed("numbers"), row.parsed("target")
    if not fits(numbers, _WholeNumbers):
        row.refuse("numbers", "must be a list of whole numbers, none of them negative")
    if not fits(target, int):
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
"""Data set of countdown tasks: rows with `numbers` and `target`. The `answer` is both, as JSON."""


class _Case(TypedDict):
    input: AnyText
    output: AnyText
    testtype: NotRequired[Literal["stdin"]]  # in LiveCodeBench


_Assert = Annotated[AnyText, AfterValidator(str.strip), Field(min_length=1)]
_TESTS = {
    "stdin_stdout": Annotated[list[_Case], Field(min_length=1)],
    "asserts": Annotated[list[_Assert], Field(min_length=1)],
}
_SETUP = {
    "test_imports": (list[AnyText], "a list of texts"),
    "test_setup_code": (AnyText, "a text"),
}


def _prompt_and_tests(row: Row) -> tuple[Question, str]:
    prompt, tests = row.question("prompt"), row.parsed("tests")
    if isinstance(tests, list):
        tests = {"asserts" if fits(tests, list[AnyText]) else "stdin_stdout": tests}
    # A Parquet table fills missing keys with null.
    tests = {k: v for k, v in tests.items() if v is not None} if isinstance(tests, dict) else {}
    setup = {key: value for key in _SETUP if (value := _setup(row, key, tests.pop(key, None)))}
    match tests:
        case {"inputs": [*inputs], "outputs": [*outputs]} if len(inputs) == len(outputs):
            pairs = zip(inputs, outputs, strict=True)
            tests = {"stdin_stdout": [{"input": i, "output": o} for i, o in pairs]}
    kind, cases = next(iter(tests.items()), ("", ()))
    if len(tests) != 1 or kind not in _TESTS or not fits(cases, _TESTS[kind]):
        row.refuse(
            "tests",
            'must be {"stdin_stdout": [{"input": text, "output": text}, ...]} or '
            '{"asserts": [text, ...]}, with at least one test',
        )
    if kind == "stdin_stdout":
        if setup:
            row.refuse(min(setup), "works only with asserts, but the tests are stdin_stdout")
        cases = [{name: case[name] for name in ("input", "output")} for case in cases]
    return prompt, json.dumps({kind: cases, **setup, **_solution(row)})


def _solution(row: Row) -> dict[str, str]:
    """Return a row's `solution`, the first if it is a list (as in APPS); {} if there is none."""
    value = row.value("solution") if row.has("solution") else None
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = row.parsed("solution")
    value = value[0] if value and isinstance(value, list) else value
    if value and not fits(value, AnyText):
        row.refuse("solution", "must be a program as a text, or a list of them")
    return {"solution": value} if value else {}


def _setup(row: Row, key: str, value: Any) -> Any:
    """Check and return setup code that runs before a row's asserts: `value`, else column `key`."""
    value = value or (row.value(key) if row.has(key) else None)
    if key == "test_imports" and isinstance(value, str) and value.strip():
        is_list = value.lstrip().startswith("[")  # a CSV file has lists as JSON text
        value = row.parsed(key) if is_list else [value]
    shape, what = _SETUP[key]
    if value and not fits(value, shape):
        row.refuse(key, f"must be {what}")
    return value


code_dataset = partial(
    prompt_dataset,
    read=_prompt_and_tests,
    prompt_template="{question}\nWrite the program in Python, in a ```python block.\n",
)
"""Data set of programming tasks: rows with a `prompt`, and `tests` as a mapping or as JSON text.

The `answer` holds the tests as JSON text, in one of two forms: `{"stdin_stdout": [{"input": text,
"output": text}, ...]}` or `{"asserts": [text, ...]}`. Lists of such tests, and `{"inputs": [...],
"outputs": [...]}`, are converted. If a row has `test_imports` (a list of statements) or
`test_setup_code`, they run before the asserts. A `solution` (a program, or a list, of which the
first is taken) is tested before the run."""
