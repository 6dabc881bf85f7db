"""All kinds of files give the same rows, and errors name the file and row."""

import math
from decimal import Decimal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lib.properties import many
from lib.rows import write_rows

from grpo_components.config.files import SUFFIXES
from grpo_components.data.rows import _READERS, Row, read_rows


def read(path):
    return list(read_rows(str(path), None, "train"))


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@settings(max_examples=many(40))
@given(
    rows=st.lists(st.fixed_dictionaries({"question": TEXTS, "my answer": TEXTS}), min_size=1),
    suffix=st.sampled_from(SUFFIXES),
)
@example(rows=[{"question": 'a, "b"\r\nc?', "my answer": "1"}], suffix=".csv")
def test_texts_come_back_from_every_kind_of_file(tmp_path_factory, rows, suffix):
    path = tmp_path_factory.mktemp("rows") / f"rows{suffix}"
    assert read(write_rows(path, *rows)) == rows


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '\n{"a": "1"}\n \t\n{"a": "2"}\n\n'),
        ("a.jsonl", '\ufeff{"a": "1"}\r\n\r\n{"a": "2"}\r\n\r\n'),
        ("a.json", '\ufeff[{"a": "1"}, {"a": "2"}]'),
        ("a.csv", "\n\na\n1\n\n2\n\n"),
        ("a.csv", '\ufeffa\r\n"1"\r\n2\r\n'),
    ],
)
def test_empty_lines_and_byte_order_marks_are_not_rows(tmp_path, name, content):
    (tmp_path / name).write_bytes(content.encode())
    assert read(tmp_path / name) == [{"a": "1"}, {"a": "2"}]


def test_the_config_is_checked_for_the_kinds_of_files_that_can_be_read():
    assert tuple(_READERS) == SUFFIXES


def test_a_field_may_be_of_any_length(tmp_path):
    (tmp_path / "a.csv").write_text(f"a,b\n{'x' * 2**20},1\n")
    assert read(tmp_path / "a.csv") == [{"a": "x" * 2**20, "b": "1"}]


UNREADABLE = [
    ("json", b"{", ""),
    ("jsonl", b'{"a": 1}\n\n\n{\n', "row 2"),
    ("json", b'{"a": []}', ""),
]
UNREADABLE += [("parquet", b"PAR1" + bytes(64) + b"PAR1", ""), ("csv", b"a,a\n1,2\n", "")]
UNREADABLE += [("csv", b"a,b\n1,2\n1,2,3\n", "row 2"), ("csv", b'a,b\n1,"2\n', "")]


@pytest.mark.parametrize(("kind", "content", "place"), UNREADABLE)
def test_a_file_that_cannot_be_read_is_named_with_its_row(tmp_path, kind, content, place):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^dataset {path}.*{place}"):
        read(path)


def test_a_missing_file_and_an_unknown_kind_are_named_and_not_looked_up_on_the_hub(tmp_path):
    (tmp_path / "rows.tsv").touch()
    unknown = [tmp_path / "rows.tsv", tmp_path, tmp_path / "nowhere"]
    for source in (*unknown, *(tmp_path / f"nowhere{suffix}" for suffix in SUFFIXES)):
        with pytest.raises(ValueError, match=rf"^dataset {source}: "):
            read(source)


def test_a_field_is_read_from_its_column_and_errors_name_the_column():
    row = Row({"problem": "1 + 1?", "nums": "[1, 2", "level": 3}, "row 7", {"question": "problem"})
    assert row.text("question") == "1 + 1?"
    assert row.parsed("level") == 3
    with pytest.raises(ValueError, match=r"^row 7: .*answer;.* problem, nums, level$"):
        row.text("answer")
    with pytest.raises(ValueError, match=r"^row 9: .*answer"):
        Row(None, "row 9", {}).text("answer")
    mapped = Row({"nums": "[1, 2", "n": [1]}, "row 8", {"numbers": "nums", "list": "n"})
    assert mapped.parsed("list") == [1]
    with pytest.raises(ValueError, match=r"^row 8, field nums: .*JSON"):
        mapped.parsed("numbers")


def test_a_number_is_read_as_its_usual_text_and_what_is_neither_is_refused():
    texts = {"42": "42", " 1,234": " 1,234", 42: "42", -7: "-7", 0: "0", 0.5: "0.5", -0.25: "-0.25"}
    for value, text in [*texts.items(), (42.0, "42")]:
        assert Row({"answer": value}, "row 1", {}).text_or_number("answer") == text
    for value in (None, True, " ", math.nan, [1], Decimal("0.5")):
        allowed = "" if value == " " else ".* given; allowed: a text .*, or a finite number"
        with pytest.raises(ValueError, match=rf"^row 1, field answer: {allowed}"):
            Row({"answer": value}, "row 1", {}).text_or_number("answer")
