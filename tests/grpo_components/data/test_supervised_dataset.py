"""Supervised examples come from a file's two fields, and what is wrong with it is named."""

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
    ("rows", "arguments", "problem"),
    [
        ([{"prompt": "a", "response": "b"}, {"prompt": "a"}], {}, "row 2: has no field response"),
        ([{"prompt": "a" * 5, "response": "b" * 3}], {}, "row 1: has 10 tokens, ptx.max_tokens"),
        ([], {}, "has no rows"),
        ([], {"prompt_template": "a"}, "ptx.prompt_template: must contain"),
        ([], {"prompt_template": None}, "ptx.prompt_template: must contain"),
        ([], {"max_tokens": "80"}, "ptx.max_tokens: '80' given; allowed: a whole number"),
    ],
)
def test_what_cannot_be_used_is_named(load, rows, arguments, problem):
    with pytest.raises(ValueError, match=problem):
        load(*rows, **arguments)
