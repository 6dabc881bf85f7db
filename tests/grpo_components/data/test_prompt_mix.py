"""A mix is its parts one after the other, and says which part cannot be built."""

import json
import re

import pytest

from grpo_components.data.prompt_mix import mixed_dataset

GSM8K = "grpo_components.data.datasets.gsm8k_dataset"


class CharacterTokenizer:
    def encode(self, text, add_bos, add_eos):
        return [ord(character) for character in text]


@pytest.fixture
def parts(tmp_path):
    """Two data sets, of which the first leaves out a row."""
    for name, questions in (("a", ("one?", "too long?", "2?")), ("b", ("three?", "4?"))):
        rows = [{"question": question, "answer": "#### 1"} for question in questions]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    limits = {"max_prompt_tokens": 6, "too_long": "drop"}
    return {
        name: {"_component_": GSM8K, "source": str(tmp_path / f"{name}.jsonl"), **limits}
        for name in ("a", "b")
    }


def build(parts):
    return mixed_dataset(CharacterTokenizer(), parts=parts)


def test_every_prompt_has_an_index_of_its_own_that_tells_part_and_row(parts):
    mix = build(parts)
    prompts = [mix[index] for index in range(len(mix))]
    assert [prompt["prompt_text"] for prompt in prompts] == ["one?", "2?", "three?", "4?"]
    assert [prompt["prompt_index"] for prompt in prompts] == [0, 2, 3, 4]
    assert mix.parts["b"].first_index == 3
    assert mix.max_prompt_length == 6
    with pytest.raises(IndexError):
        mix[4]


def test_weights_are_one_where_nothing_is_said(parts):
    parts["b"]["weight"] = 3
    mix = build(parts)
    assert [part.weight for part in mix.parts.values()] == [1.0, 3]


def test_the_notes_of_all_parts_are_told(parts):
    (line,) = build(parts).note.splitlines()
    assert line.endswith("a.jsonl: 2 prompts of 3 rows; 1 longer than 6 tokens")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"weight": 0}, "dataset.parts.b.weight: 0 given; allowed: a number above 0"),
        ({"weight": "2"}, "dataset.parts.b.weight: 2 given; allowed"),
        ({"weight": True}, "dataset.parts.b.weight: True given"),
        ({"weight": float("inf")}, "dataset.parts.b.weight: inf given"),
        ({"prompt_template": "x"}, "dataset.parts.b.prompt_template: 'x' given; allowed: a text"),
        ({"source": "nowhere.csv"}, "dataset.parts.b: dataset nowhere.csv: no such file"),
        ({"sauce": "x"}, f"dataset.parts.b: {GSM8K} cannot be built: TypeError: "),
        ({"num_rows": 0}, "dataset.parts.b.num_rows: 0 given; allowed: a whole number above 0"),
        ({"_component_": "no.such"}, "dataset.parts.b: no.such cannot be built: "),
    ],
)
def test_a_part_that_cannot_be_built_is_named(parts, change, problem):
    parts["b"].update(change)
    with pytest.raises(ValueError, match=re.escape(problem)):
        build(parts)


def test_a_mix_in_a_mix_is_refused_for_its_weights_would_count_for_nothing(parts):
    mixed = f"{mixed_dataset.__module__}.{mixed_dataset.__name__}"
    with pytest.raises(
        ValueError, match=r"^dataset\.parts\.c: is a mix itself; allowed: its parts"
    ):
        build({**parts, "c": {"_component_": mixed, "parts": parts}})


@pytest.mark.parametrize("wrong", [None, [], {}, {"a": None}, {"a": {"source": "x"}}])
def test_parts_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match=r"^dataset\.parts.*allowed: .*_component_"):
        build(wrong)
