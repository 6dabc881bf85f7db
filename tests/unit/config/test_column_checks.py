"""A reward that takes a column by name is refused if a row that it would judge lacks it."""

import pytest

from grpo_components.config.column_checks import check_columns, columns_taken

PROMPT = {"prompt_index": 0, "prompt_ids": [1], "prompt_text": "?", "answer": "1"}


class ByName:
    def __call__(self, *, prompt_text, response_text, answer, finish_reason, level, hint=""):
        return float(level)


class AllColumns:
    def __call__(self, *, prompt_text, response_text, answer, finish_reason, **columns):
        return float(len(columns))


@pytest.fixture
def settings(settings_with):
    def settings(component, **changes):
        node = {"_component_": f"{__name__}.{component}"}
        return settings_with(rewards={"own": node}, **changes)

    return settings


def test_columns_are_taken_by_parameters_without_a_default():
    assert columns_taken(ByName) == ["level"]
    assert columns_taken(AllColumns) == columns_taken(len) == []


@pytest.mark.parametrize("lacking", ["dataset", "eval_dataset"])
def test_a_column_that_a_row_lacks_is_refused_with_those_that_it_has(settings, lacking):
    data = {key: [PROMPT | {"level": 1, "kind": "x"}] * 2 for key in ("dataset", "eval_dataset")}
    check_columns(settings("ByName"), data)
    data[lacking] = [*data[lacking], PROMPT | {"prompt_index": 7, "kind": "x"}]
    with pytest.raises(ValueError) as refused:
        check_columns(settings("ByName"), data)
    message = str(refused.value)
    assert message.startswith("rewards.own: ") and message.endswith(": kind")
    assert f"takes level, which row 8 of {lacking} lacks" in message
    check_columns(settings("AllColumns"), data)


def test_rewards_that_are_not_called_need_no_columns(settings):
    data = {"dataset": [PROMPT], "eval_dataset": [PROMPT | {"level": 1}]}
    check_columns(settings("ByName", train_from="/somewhere/trajectories.jsonl"), data)
    check_columns(settings("ByName", eval_only=True), data)
