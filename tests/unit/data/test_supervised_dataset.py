"""Supervised examples are read from two fields of a file, and errors name what is wrong."""

import pytest
from lib.rows import Characters, write_rows

from grpo_components.data.supervised_dataset import supervised_dataset


@pytest.fixture
def load(tmp_path):
    def load(*rows, **arguments):
        path = write_rows(tmp_path / "examples.jsonl", *rows)
        given = {"source": str(path), "coeff": 0.1, "max_tokens": 9, **arguments}
        return supervised_dataset(Characters(), **given)

    return load


def test_a_prompt_has_no_end_and_a_response_has_one(load):
    row = {"q": "a", "a": "bc"}
    template = {"prompt_template": "<{prompt}>", "examples_per_update": 1}
    (sample,) = load(row, prompt_field="q", response_field="a", **template).batch(0)
    assert sample.trajectory.prompt_ids.tolist() == [0, *b"<a>"]
    assert sample.trajectory.response_ids.tolist() == [*b"bc", 1]


@pytest.mark.parametrize(
    ("rows", "arguments", "cause"),
    [
        ([{"prompt": "a", "response": "b"}, {"prompt": "a"}], {}, r"row 2.* response"),
        ([{"prompt": "a" * 5, "response": "b" * 3}], {}, r"row 1.*10 .*ptx\.max_tokens.* 9"),
        ([], {}, r"^ptx .*examples\.jsonl: no rows"),
        ([], {"prompt_template": "a"}, r"^ptx\.prompt_template: 'a'"),
        ([], {"prompt_template": None}, r"^ptx\.prompt_template: None"),
        ([], {"max_tokens": "80"}, r"^ptx\.max_tokens: '80'"),
    ],
)
def test_a_wrong_row_or_argument_is_named(load, rows, arguments, cause):
    with pytest.raises(ValueError, match=cause):
        load(*rows, **arguments)
