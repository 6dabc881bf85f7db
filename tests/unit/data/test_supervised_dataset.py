"""Supervised examples are read from two fields of a file, and errors name what is wrong."""

import json

import pytest

from grpo_components.data.supervised_dataset import supervised_dataset


class Characters:
    def encode(self, text, add_bos, add_eos):
        return [1] * add_bos + [ord(character) for character in text] + [2] * add_eos


@pytest.fixture
def load(tmp_path):
    def load(*rows, **arguments):
        path = tmp_path / "examples.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = {"source": str(path), "coeff": 0.1, "max_tokens": 9, **arguments}
        return supervised_dataset(Characters(), **given)

    return load


def test_a_prompt_has_no_end_and_a_response_has_one(load):
    row = {"q": "a", "a": "bc"}
    template = {"prompt_template": "<{prompt}>", "examples_per_update": 1}
    (sample,) = load(row, prompt_field="q", response_field="a", **template).batch(0)
    assert sample.trajectory.prompt_ids.tolist() == [1, *b"<a>"]
    assert sample.trajectory.response_ids.tolist() == [*b"bc", 2]


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
