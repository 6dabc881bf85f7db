"""A mix joins its parts in order, and errors name the part that cannot be built."""

import pytest
from lib.rows import Characters, write_rows

from grpo_components.data.prompt_mix import mixed_dataset

GSM8K = "grpo_components.data.datasets.gsm8k_dataset"


@pytest.fixture
def parts(tmp_path):
    limits = {"max_prompt_tokens": 7, "too_long": "drop", "_component_": GSM8K}
    made = {}
    for name, questions in (("a", ("one?", "too long?", "2?")), ("b", ("three?", "4?"))):
        rows = [{"question": question, "answer": "#### 1"} for question in questions]
        made[name] = {"source": str(write_rows(tmp_path / f"{name}.jsonl", *rows)), **limits}
    return made


def build(parts):
    return mixed_dataset(Characters(), parts=parts)


def test_every_prompt_has_a_unique_index_and_every_part_a_weight(parts):
    parts["b"]["weight"] = 3
    mix = build(parts)
    prompts = [mix[index] for index in range(len(mix))]
    assert [prompt["prompt_text"] for prompt in prompts] == ["one?", "2?", "three?", "4?"]
    assert [prompt["prompt_index"] for prompt in prompts] == [0, 2, 3, 4]
    assert mix.max_prompt_length == 7
    assert [part.weight for part in mix.parts.values()] == [1.0, 3]
    (line,) = mix.note.splitlines()  # of all parts
    assert line.endswith("a.jsonl: 2 prompts of 3 rows; 1 longer than 7 tokens")
    with pytest.raises(IndexError):
        mix[4]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"weight": 0}, ".weight: 0 given"),
        ({"prompt_template": "x"}, ".prompt_template: 'x' given"),
        ({"source": "nowhere.csv"}, ": dataset nowhere.csv: "),
        ({"sauce": "x"}, f": {GSM8K} "),
        ({"_component_": "no.such"}, ": no.such "),
    ],
)
def test_a_part_that_cannot_be_built_is_named(parts, change, problem):
    parts["b"].update(change)
    with pytest.raises(ValueError) as refused:
        build(parts)
    assert str(refused.value).startswith(f"dataset.parts.b{problem}")


def test_a_mix_within_a_mix_is_refused_because_its_weights_would_be_ignored(parts):
    mixed = f"{mixed_dataset.__module__}.{mixed_dataset.__name__}"
    with pytest.raises(ValueError, match=r"^dataset\.parts\.c: "):
        build({**parts, "c": {"_component_": mixed, "parts": parts}})


@pytest.mark.parametrize("wrong", [None, {}, {"a": {"source": "x"}}])
def test_malformed_parts_are_refused(wrong):
    with pytest.raises(ValueError, match=r"^dataset\.parts.*allowed: .*_component_"):
        build(wrong)
