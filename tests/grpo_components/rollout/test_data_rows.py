"""A row is the same whatever file it comes from, and one that cannot be read is named."""

import csv
import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_components.rollout.data_rows import SUFFIXES, Row, read_rows
from grpo_components.running.preflight import SUFFIXES as CHECKED_SUFFIXES


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


def read(path):
    return list(read_rows(str(path), None, "train"))


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@given(
    rows=st.lists(st.fixed_dictionaries({"question": TEXTS, "my answer": TEXTS}), min_size=1),
    suffix=st.sampled_from(SUFFIXES),
)
def test_texts_come_back_from_every_kind_of_file(tmp_path_factory, rows, suffix):
    path = tmp_path_factory.mktemp("rows") / f"rows{suffix}"
    assert read(write(path, rows)) == rows


def test_a_csv_file_of_a_spreadsheet_has_no_mark_in_its_first_column(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes('\ufeffquestion,answer\r\n"a, ""b""\r\nc?",1\r\n'.encode())
    assert read(path) == [{"question": 'a, "b"\r\nc?', "answer": "1"}]


def test_the_config_is_checked_for_the_kinds_of_files_that_can_be_read():
    assert SUFFIXES == CHECKED_SUFFIXES


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.json", b"{", "not readable"),
        ("a.json", b'{"rows": []}', "must be one list of rows"),
        ("a.json", b"\xff", "not readable"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", "row 2: not readable: 3 values for 2 columns"),
        ("a.csv", b"a,b\n1\n", "row 1: not readable: 1 values for 2 columns"),
        ("a.csv", b"a,a\n1,2\n", "two columns have one name"),
        ("a.csv", b'a,b\n1,"2\n', "not readable: unexpected end"),
        ("a.csv", b"a,b\n1,\xff\n", "not readable"),
        ("a.csv", b"a\n" + b"x" * 200_000 + b"\n", "field larger than field limit"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_row(tmp_path, name, content, problem):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=problem) as refused:
        read(tmp_path / name)
    assert str(refused.value).startswith(f"dataset {tmp_path / name}")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_missing_file_is_named(tmp_path, suffix):
    with pytest.raises(ValueError, match=rf"nowhere{suffix}"):
        read(tmp_path / f"nowhere{suffix}")


def test_a_file_of_another_kind_is_not_looked_for_on_a_hub(tmp_path):
    (tmp_path / "rows.tsv").touch()
    for source in (tmp_path / "rows.tsv", tmp_path, tmp_path / "nowhere"):
        with pytest.raises(
            ValueError, match=rf"{source}: not readable; allowed: a file of \.jsonl"
        ):
            read(source)


def test_a_field_is_read_from_the_column_that_has_it_and_named_by_that():
    row = Row({"problem": "1 + 1?", "nums": "[1, 2", "level": 3}, "row 7", {"question": "problem"})
    assert row.text("question") == "1 + 1?"
    assert row.parsed("level") == 3
    with pytest.raises(ValueError, match="row 7: has no field answer"):
        row.text("answer")
    mapped = Row({"nums": "[1, 2", "n": [1]}, "row 8", {"numbers": "nums", "list": "n"})
    assert mapped.parsed("list") == [1]
    with pytest.raises(ValueError, match="row 8, field nums: is no JSON"):
        mapped.parsed("numbers")
