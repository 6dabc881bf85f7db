"""Prompt data sets: what a row becomes, and what is said of one that cannot be used."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from grpo_components.rollout.datasets import gsm8k_dataset

ROWS = [
    {"question": "1 + 1?", "answer": "Count them.\n1+1=<<1+1=2>>2\n#### 2"},
    {"question": "How {many}?", "answer": "#### is a mark.\n#### -1,234,567 "},
    {"question": "Half?", "answer": "#### 0.5"},
]


class CharacterTokenizer:
    """One token per character, after a token 0 that marks the beginning."""

    def encode(self, text, add_bos, add_eos):
        return [0] * add_bos + [ord(character) for character in text] + [1] * add_eos


def load(source, **kwargs):
    return gsm8k_dataset(CharacterTokenizer(), source=str(source), **kwargs)


def write_lines(path, *lines):
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


@pytest.fixture
def jsonl(tmp_path):
    return write_lines(tmp_path / "rows.jsonl", *(json.dumps(row).encode() for row in ROWS))


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_row_becomes_a_prompt_and_its_final_answer(kind, request):
    prompts = load(request.getfixturevalue(kind), prompt_template="Q: {question}\nA:")
    texts = ["Q: 1 + 1?\nA:", "Q: How {many}?\nA:", "Q: Half?\nA:"]
    assert [prompt["prompt_text"] for prompt in prompts] == texts
    assert [prompt["answer"] for prompt in prompts] == ["2", "-1234567", "0.5"]
    assert [prompt["prompt_index"] for prompt in prompts] == [0, 1, 2]
    assert [prompt["prompt_ids"] for prompt in prompts] == [[0, *map(ord, text)] for text in texts]
    assert prompts.max_prompt_length == max(len(prompt["prompt_ids"]) for prompt in prompts)


def test_the_first_rows_can_be_used_alone(jsonl):
    assert len(load(jsonl, num_rows=2)) == 2
    assert len(load(jsonl, num_rows=100)) == 3


def test_braces_in_a_template_other_than_the_question_stay(jsonl):
    (prompt, *_) = load(jsonl, prompt_template=r"\boxed{} {x} {question}")
    assert prompt["prompt_text"] == r"\boxed{} {x} 1 + 1?"


@pytest.mark.parametrize("template", ["", "{}", "{question} {question}", "{questions}"])
def test_a_template_must_hold_the_question_once(jsonl, template):
    with pytest.raises(ValueError, match=r"prompt_template.*\{question\}"):
        load(jsonl, prompt_template=template)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "row 2"),
        (b"", "row 2"),
        (b"\xff\xfe", "row 2"),
        (b"[" * 100_000, "row 2"),
        (b"\x1f\x8b\x08\x00gzip", "row 2"),
        (b'{"question": "a\\ud800?", "answer": "#### 2"}', "row 2.*question.*no Unicode"),
        (b'{"question": "a?", "answer": "#### 2\\udfff"}', "row 2.*answer.*no Unicode"),
        (b"[]", "row 2.*question"),
        (b'{"answer": "#### 2"}', "row 2.*question"),
        (b'{"question": "a?"}', "row 2.*answer"),
        (b'{"question": "", "answer": "#### 2"}', "row 2.*question"),
        (b'{"question": " \\n", "answer": "#### 2"}', "row 2.*question"),
        (b'{"question": 5, "answer": "#### 2"}', "row 2.*question"),
        (b'{"question": "a?", "answer": null}', "row 2.*answer"),
        (b'{"question": "a?", "answer": "2"}', "row 2.*answer.*####"),
        (b'{"question": "a?", "answer": "2 ####"}', "row 2.*answer.*####"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_its_file_and_field(tmp_path, line, problem):
    good = json.dumps(ROWS[0]).encode()
    path = write_lines(tmp_path / "bad.jsonl", good, line, good)
    with pytest.raises(ValueError, match=rf"bad\.jsonl, {problem}"):
        load(path)


def test_a_prompt_that_is_too_long_is_named_with_both_lengths(jsonl):
    longest = load(jsonl).max_prompt_length
    assert len(load(jsonl, max_prompt_tokens=longest)) == 3
    problem = rf"rows\.jsonl, row 2.*question.*{longest} tokens.*max_prompt_tokens.*{longest - 1}"
    with pytest.raises(ValueError, match=problem):
        load(jsonl, max_prompt_tokens=longest - 1)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(ValueError, match=name):
        load(tmp_path / "nowhere" / name)


def test_a_file_without_rows_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"empty\.jsonl.*no rows"):
        load(write_lines(tmp_path / "empty.jsonl"))


@pytest.mark.parametrize("content", [b"question,answer", b"", b"PAR1" + bytes(64) + b"PAR1"])
def test_a_file_that_is_no_parquet_is_named(tmp_path, content):
    with pytest.raises(ValueError, match=r"bad\.parquet"):
        load(write_lines(tmp_path / "bad.parquet", content))


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "no rows"),
        ([{"question": "a?"}], "row 1.*no field answer"),
        ([ROWS[0], {"question": None, "answer": "#### 1"}], "row 2, field question"),
        ([{"question": 1, "answer": 2}], "row 1, field question"),
    ],
)
def test_a_parquet_row_that_cannot_be_used_is_named_with_its_file_and_field(
    tmp_path, rows, problem
):
    path = tmp_path / "bad.parquet"
    schema = None if rows else pyarrow.schema([("question", pyarrow.string())])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path)
    with pytest.raises(ValueError, match=rf"bad\.parquet.*{problem}"):
        load(path)


def test_a_hub_data_set_is_asked_for_by_name_configuration_and_split(monkeypatch):
    asked = []

    def load_dataset(path, name, split):
        asked.append((path, name, split))
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert len(load("openai/gsm8k", name="main", split="test")) == 3
    assert asked == [("openai/gsm8k", "main", "test")]


def test_a_hub_data_set_that_cannot_be_had_is_named(monkeypatch):
    def load_dataset(path, name, split):
        raise ConnectionError("no way out")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"some/where.*no way out"):
        load("some/where")
