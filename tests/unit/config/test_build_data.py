"""What is not a data set, or does not fit into the policy's context, is named with its place."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpo_components.config.building import build_data, shared_prompts

MY_DATA = """
class CharacterTokenizer:
    def __init__(self, prompt_template=None):
        pass

    def encode(self, text, add_bos, add_eos):
        return [ord(character) for character in text]


class Rows(list):
    max_prompt_length = 3


PROMPT = {"prompt_index": 4, "prompt_ids": [], "prompt_text": "", "answer": "1"}


def empty_prompts(tokenizer):
    return Rows([PROMPT])


def no_rows(tokenizer):
    return Rows()


def no_length(tokenizer):
    return [PROMPT]


def no_answers(tokenizer):
    return Rows([{**PROMPT, "answer": "1"}, {"prompt_index": 1, "prompt_ids": [1]}])


def same_index(tokenizer):
    return Rows([PROMPT, PROMPT])


def texts(tokenizer):
    return Rows(["1 + 1?"])


def nothing(tokenizer):
    return None


class World:
    tool_schemas = [{"type": "function", "function": {"name": "lookup", "parameters": {}}}]

    def __call__(self, prompt, seed):
        raise AssertionError("no conversation begins")
"""


@pytest.fixture
def data_cfg(tmp_path, monkeypatch):
    (tmp_path / "my_data.py").write_text(MY_DATA)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 100}))
    rows = [{"question": "x" * size, "answer": "#### 1"} for size in (5, 20, 7)]
    for name in ("train", "held_out"):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    gsm8k = "grpo_components.data.datasets.gsm8k_dataset"
    return OmegaConf.create(
        {
            "base_model_path": str(tmp_path),
            "tokenizer": {"_component_": "my_data.CharacterTokenizer"},
            "model": {"_component_": "a.Model"},
            "dataset": {"_component_": gsm8k, "source": str(tmp_path / "train.jsonl")},
            "eval_dataset": {"_component_": gsm8k, "source": str(tmp_path / "held_out.jsonl")},
            "generator": {"max_response_tokens": 10, "max_model_len": None},
            "tokens_per_micro_batch": 100,
            "train_from": None,
            "eval_only": None,
            "rewards": {},
            "environment": {"_component_": "an.Environment"},
            "ptx": None,
        }
    )


LIMITS = {
    "max_position_embeddings": lambda cfg, most: Path(
        cfg.base_model_path, "config.json"
    ).write_text(json.dumps({"max_position_embeddings": most})),
    "sliding_window": lambda cfg, most: Path(cfg.base_model_path, "config.json").write_text(
        json.dumps({"max_position_embeddings": 100, "sliding_window": most})
    ),
    "model.max_seq_len": lambda cfg, most: cfg.model.update(max_seq_len=most),
    "generator.max_model_len": lambda cfg, most: cfg.generator.update(max_model_len=most),
    "tokens_per_micro_batch": lambda cfg, most: cfg.update(tokens_per_micro_batch=most),
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("key", ["dataset", "eval_dataset"])
def test_a_prompt_that_leaves_no_room_for_its_response_is_named_by_file_row_and_field(
    data_cfg, limit, key
):
    LIMITS[limit](data_cfg, 30)
    _, dataset, held_out = build_data(data_cfg)
    assert len(dataset) == len(held_out) == 3
    LIMITS[limit](data_cfg, 29)
    other = {"dataset": "eval_dataset", "eval_dataset": "dataset"}[key]
    data_cfg[other].num_rows = 1
    with pytest.raises(ValueError) as refused:
        build_data(data_cfg)
    start = f"{key} {data_cfg[key].source}, row 2, field question: the prompt has 20 tokens"
    assert str(refused.value).startswith(start)
    assert "1 to 19" in str(refused.value) and limit in str(refused.value)


def test_an_empty_prompt_of_anyones_data_set_is_named(data_cfg):
    data_cfg.dataset = {"_component_": "my_data.empty_prompts"}
    with pytest.raises(ValueError, match=r"empty_prompts, row 5, field question.* has 0 tokens"):
        build_data(data_cfg)


@pytest.mark.parametrize("key", ["dataset", "eval_dataset"])
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no_rows", "gives no rows"),
        ("no_length", "gives no prompts, AttributeError: "),
        ("no_answers", "gives no prompts, KeyError: 'prompt_text'"),
        ("same_index", "gives two rows with the same prompt_index"),
        ("texts", "gives no prompts, TypeError: "),
        ("nothing", "gives no prompts, TypeError: "),
    ],
)
def test_what_is_no_data_set_is_told(data_cfg, key, name, problem):
    data_cfg[key] = {"_component_": f"my_data.{name}"}
    with pytest.raises(ValueError) as refused:
        build_data(data_cfg)
    assert str(refused.value).startswith(f"{key}: my_data.{name} {problem}")
    assert "; allowed: rows by index, each with prompt_index, prompt_ids" in str(refused.value)


def test_a_token_that_the_policy_has_not_is_named_before_the_engine_sees_it(data_cfg):
    """As with the chat template of a folder with a larger vocabulary."""
    for vocab_size, fits in ((ord("x") + 1, True), (ord("x"), False)):
        known = {"max_position_embeddings": 100, "vocab_size": vocab_size}
        Path(data_cfg.base_model_path, "config.json").write_text(json.dumps(known))
        if fits:
            build_data(data_cfg)
            continue
        with pytest.raises(ValueError) as refused:
            build_data(data_cfg)
        start = (
            f"dataset {data_cfg.dataset.source}, row 1, field question: the prompt has the token"
        )
        assert str(refused.value).startswith(f"{start} {ord('x')}; allowed: below {ord('x')}")


def test_a_prompt_template_of_the_tokenizer_that_no_prompt_would_have_is_refused(data_cfg):
    data_cfg.tokenizer.prompt_template = {"user": ["Q: ", "A: "]}
    with pytest.raises(ValueError) as refused:
        build_data(data_cfg)
    assert str(refused.value).startswith("dataset.chat_template: null given")
    assert str(refused.value).endswith("allowed: torchtune, or tokenizer.prompt_template: null")


@pytest.mark.parametrize(
    "change",
    [
        {"max_prompt_tokens": 6},
        {"filters": {"question": {"min": 1}}},
        {"filters": {"question": {"most": 1}}},
        {"columns": {"gold": "answer"}},
        {"partition": "2/1"},
        {"chat_template": "torchtune"},
    ],
)
def test_what_is_wrong_with_the_evaluation_data_names_no_key_of_the_other(data_cfg, change):
    data_cfg.eval_dataset.update(change)
    with pytest.raises(ValueError) as refused:
        build_data(data_cfg)
    message = str(refused.value)
    assert message.startswith("eval_dataset")
    assert "dataset." not in message.removeprefix("eval_dataset.")


def test_prompts_that_are_trained_on_and_held_out_are_counted():
    trained, held_out = ([{"prompt_ids": [i, 0]} for i in numbers] for numbers in ((1, 2), (2, 3)))
    note = shared_prompts(trained, held_out)
    assert note.startswith("eval_dataset: 1 of its 2 prompts ")
    assert shared_prompts(trained[:1], held_out) == ""


def test_recorded_groups_need_room_for_what_was_said_and_no_more(data_cfg, tmp_path):
    """The prompt's 20 tokens and the longest response would not fit; the recorded token does."""
    response = {"response_ids": [4], "response_mask": [True], "generator_logprobs": [-1.0]}
    response |= {"token_versions": [0], "temperature": 1.0, "finish_reason": "stop", "reward": 1.0}
    response |= {"reward_terms": {}, "success": True, "error": None}
    group = {"prompt_index": 0, "prompt_ids": [3] * 20, "responses": [response]}
    (tmp_path / "trajectories.jsonl").write_text(json.dumps(group))
    data_cfg.train_from = str(tmp_path / "trajectories.jsonl")
    data_cfg.eval_dataset.num_rows = 1
    data_cfg.tokens_per_micro_batch = 21
    assert len(build_data(data_cfg)[1]) == 1
    data_cfg.tokens_per_micro_batch = 20
    with pytest.raises(ValueError, match=r"^train_from: .* 21 tokens; .* 20, tokens_per_micro_"):
        build_data(data_cfg)


def test_supervised_examples_have_to_fit_into_the_policys_context(data_cfg):
    """Or the run would end in its first step."""
    data_cfg.ptx = {"_component_": "my_data.examples", "max_tokens": 30}
    LIMITS["model.max_seq_len"](data_cfg, 30)
    build_data(data_cfg)
    LIMITS["model.max_seq_len"](data_cfg, 29)
    data_cfg.dataset.num_rows = data_cfg.eval_dataset.num_rows = 1
    with pytest.raises(ValueError, match=r"^ptx\.max_tokens: 30 given; .* 29, model.max_seq_len"):
        build_data(data_cfg)


MIXED = "grpo_components.data.prompt_mix.mixed_dataset"


def test_a_part_of_a_mix_is_named_with_the_row_of_its_own_file(data_cfg):
    parts = {"a": dict(data_cfg.dataset, num_rows=1), "b.c": dict(data_cfg.eval_dataset, weight=2)}
    data_cfg.dataset = {"_component_": MIXED, "parts": parts}
    data_cfg.eval_dataset.num_rows = 1
    _, dataset, _ = build_data(data_cfg)
    assert [dataset[i]["prompt_index"] for i in range(len(dataset))] == [0, 1, 2, 3]
    data_cfg.generator.max_model_len = 29
    with pytest.raises(ValueError) as refused:
        build_data(data_cfg)
    source = data_cfg.dataset.parts["b.c"].source
    assert str(refused.value).startswith(f"dataset.parts.b.c {source}, row 2, field question: the ")


@pytest.mark.parametrize("mixed", [False, True])
def test_the_tools_of_the_world_reach_the_prompts(data_cfg, mixed):
    data_cfg.environment.world = {"_component_": "my_data.World"}
    data_cfg.dataset.prompt_template = "{tools} {question}"
    LIMITS["max_position_embeddings"](data_cfg, 1000)
    data_cfg.tokens_per_micro_batch = 1000
    if mixed:
        parts = {"one": dict(data_cfg.dataset)}
        component = "grpo_components.data.prompt_mix.mixed_dataset"
        data_cfg.dataset = {"_component_": component, "parts": parts}
    _, dataset, held_out = build_data(data_cfg)
    assert '"name": "lookup"' in dataset[0]["prompt_text"]
    assert "lookup" in held_out.note and "lookup" not in dataset.note
    assert "{tools}" in held_out.note


@pytest.mark.parametrize(
    ("key", "start"),
    [("dataset", "dataset.columns.question"), ("eval_dataset", "eval_dataset.columns.question")],
)
@pytest.mark.parametrize("mixed", [False, True])
def test_a_missing_column_is_answered_with_the_key_that_names_it(data_cfg, key, start, mixed):
    path = Path(data_cfg[key].source)
    path.write_text(json.dumps({"prompt": "1+1?", "answer": "#### 2"}) + "\n")
    if mixed:
        component = "grpo_components.data.prompt_mix.mixed_dataset"
        data_cfg[key] = {"_component_": component, "parts": {"one": dict(data_cfg[key])}}
        start = start.replace("columns", "parts.one.columns")
    with pytest.raises(ValueError) as refused:
        build_data(data_cfg)
    problem, _, allowed = str(refused.value).partition("; allowed: ")
    assert problem.startswith(key) and "question" in problem
    assert allowed.startswith(start) and "prompt" in allowed
    columns = {"columns": {"question": "prompt"}}
    (data_cfg[key].parts.one if mixed else data_cfg[key]).update(columns)
    build_data(data_cfg)
