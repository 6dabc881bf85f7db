"""Rows keep their other columns, from the file to the rewards."""

from datetime import date

import pytest
from lib.rows import Characters, write_rows
from omegaconf import OmegaConf

from grpo_components.data.columns import other_columns, plain_value, reward_input
from grpo_components.data.datasets import prompt_dataset
from grpo_components.data.prompt_mix import mixed_dataset
from grpo_components.data.prompt_stream import PromptStream
from grpo_components.state_files import read_state, write_state

ROW = {"question": "1+1", "answer": "2"}


@pytest.fixture
def source(tmp_path):
    return lambda name, *rows: str(write_rows(tmp_path / name, *rows))


def test_all_columns_but_question_and_answer_are_kept_and_a_missing_one_is_none(source):
    rows = (
        {"question": "1+1", "answer": "2", "level": 3, "tags": ["a", {"b": None}]},
        {"question": "1+2", "answer": 3, "Problem ID": "x"},
    )
    data = prompt_dataset(Characters(), source=source("rows.jsonl", *rows))
    assert other_columns(data[0]) == {"level": 3, "tags": ["a", {"b": None}], "Problem ID": None}
    assert other_columns(data[1]) == {"level": None, "tags": None, "Problem ID": "x"}


def test_a_column_cannot_take_the_place_of_what_the_recipe_sets(source):
    row = {"question": "1", "answer": "2", "prompt_index": 9, "seed": 1, "response_text": "x"}
    (prompt,) = prompt_dataset(Characters(), source=source("taken.jsonl", row))
    assert prompt["prompt_index"] == 0 and other_columns(prompt) == {}
    judged = reward_input(prompt | {"seed": 5}, "said", "stop")
    texts = {"prompt_text": "1", "response_text": "said", "answer": "2"}
    assert judged == {**texts, "finish_reason": "stop", "seed": 5}


def test_the_parts_of_a_mix_have_the_same_columns(source):
    component = {"_component_": "grpo_components.data.datasets.prompt_dataset"}
    parts = {
        name: {**component, "source": source(f"{name}.jsonl", {**ROW, **own})}
        for name, own in (("a", {"level": 1}), ("b", {"kind": "x"}))
    }
    mix = mixed_dataset(Characters(), parts=OmegaConf.create(parts))
    found = [other_columns(mix[row]) for row in range(2)]
    assert found == [{"level": 1, "kind": None}, {"level": None, "kind": "x"}]
    assert other_columns(next(PromptStream(mix, shuffle=True, seed=0))[0]) in found


def test_a_column_survives_the_stream_of_prompts_and_a_checkpoint(source, tmp_path):
    columns = {"level": 1.5, "tags": ["a", {"b": [None, True]}]}
    data = prompt_dataset(Characters(), source=source("rows.jsonl", {**ROW, **columns}))
    prompt, _ = next(PromptStream(data, shuffle=True, seed=0))
    write_state(tmp_path, "driver", {"reissued": [(prompt, 0)]})
    restored = read_state(tmp_path, "driver")["reissued"][0][0]
    assert other_columns(prompt) == other_columns(restored) == columns


def test_other_types_become_text():
    assert plain_value({"day": date(2026, 1, 2), 3: (1, 2)}) == {"day": "2026-01-02", "3": [1, 2]}
