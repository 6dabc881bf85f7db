"""Held-out prompts have the form of those trained on, or the config says that they shall not."""

from __future__ import annotations

import pytest

from grpo_components.config.prompt_match import check_same_prompts

GSM8K = "grpo_components.data.datasets.gsm8k_dataset"
MATH = "grpo_components.data.datasets.math_dataset"
PLAIN = {"_component_": GSM8K, "source": "a.jsonl", "prompt_template": "Q: {question}\n"}
CHAT = {**PLAIN, "chat_template": "torchtune", "system_prompt": "Be brief."}
MY_DATA = """
def mine(tokenizer, *, prompts, system_message="", enable_thinking=False):
    return None


def anything(tokenizer, **options):
    return None
"""


@pytest.fixture
def check(settings_with):
    def check(dataset, eval_dataset, **changes):
        changes = {"dataset": dataset, "eval_dataset": eval_dataset, **changes}
        check_same_prompts(settings_with(**changes))

    return check


@pytest.fixture
def refusal(check):
    def refusal(*args, **changes):
        with pytest.raises(ValueError) as refused:
            check(*args, **changes)
        return str(refused.value)

    return refusal


def mix(**parts):
    return {"_component_": "grpo_components.data.prompt_mix.mixed_dataset", "parts": parts}


def test_other_rows_of_one_form_pass(check):
    rows = {"source": "b.jsonl", "num_rows": 9, "max_prompt_tokens": 8, "too_long": "drop"}
    check(CHAT, {**CHAT, **rows})
    check(PLAIN, {**PLAIN, "chat_template": None, "system_prompt": None})


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("prompt_template", "{question}!"), ("chat_template", "/model"), ("system_prompt", "Go on.")],
)
@pytest.mark.parametrize("absent", [False, True])
def test_a_form_that_is_not_followed_is_refused_with_both_keys(refusal, name, theirs, absent):
    """Given otherwise, or not given while `dataset` has it."""
    held_out = {**CHAT, name: theirs}
    if absent:
        del held_out[name]
    message = refusal(CHAT, held_out)
    assert message.startswith(f"eval_dataset.{name}: ")
    assert f"and dataset.{name} is " in message
    assert message.endswith(f"allowed: ${{dataset.{name}}}, or eval.allow_other_prompts: true")


def test_what_is_meant_can_be_said(check):
    check(CHAT, PLAIN, eval={"allow_other_prompts": True})


@pytest.mark.parametrize(
    "half", [{"eval_only": True}, {"rollout_only": True}, {"train_from": "file.jsonl"}]
)
def test_half_a_run_has_nothing_to_compare(check, half):
    check(CHAT, PLAIN, **half)


def test_the_defaults_of_builders_are_compared(check, refusal):
    math = {"_component_": MATH, "source": "a.jsonl"}
    assert refusal(math, {**PLAIN}).startswith("eval_dataset.prompt_template: ")
    default = "{question}\nReason step by step, and put the final answer in \\boxed{}.\n"
    check(math, {**PLAIN, "prompt_template": default})


def test_a_held_out_prompt_may_have_the_form_of_any_part_of_a_mix(check, refusal):
    check(mix(words=PLAIN, chats=CHAT), CHAT)
    check(mix(words=PLAIN, chats=CHAT), mix(a=CHAT, b={**PLAIN, "source": "b.jsonl"}))
    message = refusal(mix(words=PLAIN, chats=CHAT), {**CHAT, "system_prompt": "Go on."})
    assert "dataset.parts.chats.system_prompt" in message
    message = refusal(CHAT, mix(a=CHAT, b=PLAIN))
    assert message.startswith("eval_dataset.parts.b.")


def test_data_sets_of_users_are_compared_by_the_form_of_prompts(
    check, refusal, tmp_path, monkeypatch
):
    (tmp_path / "my_prompts.py").write_text(MY_DATA)
    monkeypatch.syspath_prepend(tmp_path)
    mine = {"_component_": "my_prompts.mine", "prompts": "train.txt"}
    check(mine, {**mine, "prompts": "held_out.txt"})
    check(mine, PLAIN)  # they share no argument
    for name, value in (("system_message", "Go."), ("enable_thinking", True)):
        assert refusal({**mine, name: value}, mine).startswith(f"eval_dataset.{name}: ")
    loose = {"_component_": "my_prompts.anything", "chat_template": "x"}
    for other in ({**loose, "chat_template": "y"}, {"_component_": loose["_component_"]}):
        assert refusal(loose, other).startswith("eval_dataset.chat_template: ")
