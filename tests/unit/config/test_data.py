"""Data sets, their prompts and columns: what a run could not use is refused by its key."""

import json
from pathlib import Path

import numpy as np
import pytest
from lib.config_errors import refusal_of, refused_key
from lib.rows import write_rows
from omegaconf import OmegaConf

from grpo_components.config.components import SHIPPED_ENVIRONMENT
from grpo_components.config.data import build_data, build_prompts
from grpo_components.data.curriculum import MAX_PROMPTS, PromptCurriculum
from grpo_components.data.prompt_stream import PromptStream
from grpo_components.settings import CurriculumSettings

GSM8K = "grpo_components.data.datasets.gsm8k_dataset"
MIXED = "grpo_components.data.prompt_mix.mixed_dataset"
KEYS = ("dataset", "eval_dataset")
BOTH = pytest.mark.parametrize("key", KEYS)
MY_DATA = """
from datetime import date
import numpy as np

class CharacterTokenizer:
    stop_tokens = [0]

    def __init__(self, prompt_template=None):
        pass

    def encode(self, text, add_bos, add_eos):
        return [ord(character) for character in text]

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))

class Rows(list):
    max_prompt_length = 3

P = {"prompt_index": 4, "prompt_ids": [1], "prompt_text": "", "answer": "1"}

def made(tokenizer, kind):
    return eval(kind)

def raises(tokenizer):
    raise RuntimeError("no data here")

class World:
    tool_schemas = [{"type": "function", "function": {"name": "lookup", "parameters": {}}}]

    def __call__(self, prompt, seed):
        raise AssertionError("no conversation begins")
"""


@pytest.fixture
def cfg(tmp_path, monkeypatch):
    (tmp_path / "my_data.py").write_text(MY_DATA)
    monkeypatch.syspath_prepend(tmp_path)
    write_model(tmp_path, max_position_embeddings=100)
    rows = [{"question": "x" * size, "answer": "#### 1"} for size in (5, 20, 7)]
    sources = {key: str(write_rows(tmp_path / f"{key}.jsonl", *rows)) for key in KEYS}
    gsm8k = {key: {"_component_": GSM8K, "source": source} for key, source in sources.items()}
    lengths = {"max_response_tokens": 10, "max_model_len": None, "stop_token_ids": None}
    return OmegaConf.create(
        {
            **{"base_model_path": str(tmp_path), "model": {"_component_": "a.Model"}, **gsm8k},
            **{"tokenizer": {"_component_": "my_data.CharacterTokenizer"}, "generator": lengths},
            **{"tokens_per_micro_batch": 100, "train_from": None, "eval_only": None},
            "rollout_only": False,
            **{"rewards": {}, "environment": dict(SHIPPED_ENVIRONMENT), "ptx": None},
        }
    )


def write_model(folder, **sizes):
    Path(folder, "config.json").write_text(json.dumps(sizes))


def limit_to(cfg, limit, most):
    """Set what limits the tokens of a sample."""
    if limit in ("max_position_embeddings", "sliding_window"):
        write_model(cfg.base_model_path, **{"max_position_embeddings": 100, limit: most})
    else:
        OmegaConf.update(cfg, limit, most, force_add=True)


LIMITS = """max_position_embeddings sliding_window model.max_seq_len generator.max_model_len
tokens_per_micro_batch"""


@pytest.mark.parametrize("limit", LIMITS.split())
@BOTH
def test_a_prompt_that_leaves_no_room_for_its_response_is_refused_with_its_row(cfg, limit, key):
    limit_to(cfg, limit, 30)
    _, dataset, held_out = build_data(cfg)
    assert len(dataset) == len(held_out) == 3
    limit_to(cfg, limit, 29)
    cfg["eval_dataset" if key == "dataset" else "dataset"].num_rows = 1
    error = refusal_of(build_data, cfg)
    assert error.key == key and limit in error.allowed
    assert f"{cfg[key].source}, row 2, " in error.problem


def test_without_a_data_set_to_evaluate_on_there_are_no_held_out_prompts(cfg):
    cfg.eval_dataset = None
    _, dataset, held_out = build_data(cfg)
    assert (len(dataset), len(held_out), held_out.max_prompt_length) == (3, 0, 0)


def test_a_window_that_qwen2_does_not_use_limits_nothing(cfg):
    sizes = {"model_type": "qwen2", "max_position_embeddings": 100, "sliding_window": 29}
    write_model(cfg.base_model_path, **sizes)
    build_data(cfg)
    write_model(cfg.base_model_path, **sizes, use_sliding_window=True)
    assert refused_key(build_data, cfg) == "dataset"


NONE = """Rows([P | {'prompt_ids': []}]); Rows([P | {'prompt_index': '1'}])
Rows([P | {'prompt_ids': [1.5]}]); Rows([P, {'prompt_index': 1, 'prompt_ids': [1]}])
Rows([P, P]); Rows(['1 + 1?']); Rows(); [P]; None"""


@pytest.mark.parametrize("kind", NONE.replace("\n", "; ").split("; "))
@BOTH
def test_what_is_no_data_set_is_refused(cfg, key, kind):
    cfg[key] = {"_component_": "my_data.made", "kind": "Rows([P])"}
    build_data(cfg)
    cfg[key].kind = kind
    assert refused_key(build_data, cfg) == key


@pytest.mark.parametrize("value", ["date.today()", "[date.today()]", "np.array([{}])"])
def test_a_column_that_no_checkpoint_can_store_is_refused_in_training_prompts_only(cfg, value):
    for key in KEYS:
        cfg[key] = {"_component_": "my_data.made", "kind": "Rows([P | {'when': np.ones(2)}])"}
    cfg.eval_dataset.kind = f"Rows([P | {{'when': {value}}}])"
    build_data(cfg)
    cfg.dataset.kind = f"Rows([P, P | {{'prompt_index': 9, 'when': {value}}}])"
    error = refusal_of(build_data, cfg)
    assert error.key == "dataset" and "prompt_index 9: row.when" in error.problem


WRONG = """
tokenizer                    tokenizer._component_=builtins.object
dataset                      dataset._component_=my_data.raises
dataset.chat_template        dataset.chat_template=torchtune
dataset.chat_template        tokenizer.prompt_template.user=['Q: ','A: ']
eval_dataset                 eval_dataset.max_prompt_tokens=6
eval_dataset                 eval_dataset.filters.question.min=1
eval_dataset.filters.question.most  eval_dataset.filters.question.most=1
eval_dataset.columns.gold    eval_dataset.columns.gold=answer
eval_dataset.partition       eval_dataset.partition=2/1
eval_dataset.chat_template   eval_dataset.chat_template=torchtune
eval_dataset                 eval_dataset.source=/no/file.jsonl
"""


@pytest.mark.parametrize("row", WRONG.strip().splitlines())
def test_a_wrong_argument_of_a_data_set_is_refused(cfg, row):
    key, *overrides = row.split(maxsplit=1)
    error = refusal_of(build_data, OmegaConf.merge(cfg, OmegaConf.from_dotlist(overrides)))
    assert error.key == key
    if key.startswith("eval_"):
        assert not error.allowed.startswith("dataset.")


def test_a_token_that_the_policy_has_not_is_refused_before_the_engine_sees_it(cfg):
    """As with the chat template of a folder with a larger vocabulary."""
    known = {"max_position_embeddings": 100, "vocab_size": ord("x") + 1}
    write_model(cfg.base_model_path, **known)
    build_data(cfg)
    write_model(cfg.base_model_path, **known | {"vocab_size": ord("x")})
    assert refused_key(build_data, cfg) == "dataset"


def test_recorded_groups_need_room_for_what_was_said_and_no_more(cfg, tmp_path):
    """The prompt's 20 tokens and the longest response would not fit; the recorded token does."""
    response = {"response_ids": [4], "response_mask": [True], "generator_logprobs": [-1.0]}
    response |= {"token_versions": [0], "temperature": 1.0, "finish_reason": "stop", "reward": 1.0}
    response |= {"reward_terms": {}, "success": True, "error": None}
    group = {"prompt_index": 0, "prompt_ids": [3] * 20, "responses": [response]}
    (tmp_path / "trajectories.jsonl").write_text(json.dumps(group))
    cfg.train_from = str(tmp_path / "trajectories.jsonl")
    cfg.eval_dataset.num_rows = 1
    cfg.tokens_per_micro_batch = 21
    assert len(build_data(cfg)[1]) == 1
    cfg.tokens_per_micro_batch = 20
    assert refused_key(build_data, cfg) == "train_from"


def test_supervised_examples_have_to_fit_into_the_policys_context(cfg):
    """Or the run would end in its first step."""
    cfg.ptx = {"_component_": "my_data.examples", "max_tokens": 30}
    limit_to(cfg, "model.max_seq_len", 30)
    build_data(cfg)
    limit_to(cfg, "model.max_seq_len", 29)
    cfg.dataset.num_rows = cfg.eval_dataset.num_rows = 1
    assert refused_key(build_data, cfg) == "ptx.max_tokens"


@pytest.mark.parametrize("limit", [each for each in LIMITS.split() if "model_len" not in each])
def test_an_agents_longest_conversation_has_to_fit_into_what_the_trainer_takes(cfg, limit):
    """Else one would fail in the trainer, or take more memory than is granted."""
    cfg.generator.max_model_len = 60
    limit_to(cfg, limit, 59)
    build_data(cfg)
    agents = "grpo_components.agents.environment.AgentEnvironment"
    cfg.environment = {"_component_": agents, "agent": "a.b"}
    error = refusal_of(build_data, cfg)
    assert error.key == "generator.max_model_len" and limit in error.allowed
    limit_to(cfg, limit, 60)
    build_data(cfg)


def test_a_part_of_a_mix_is_refused_with_the_row_of_its_own_file(cfg):
    parts = {"a": dict(cfg.dataset, num_rows=1), "b.c": dict(cfg.eval_dataset, weight=2)}
    cfg.dataset = {"_component_": MIXED, "parts": parts}
    cfg.eval_dataset.num_rows = 1
    _, dataset, _ = build_data(cfg)
    assert [dataset[i]["prompt_index"] for i in range(len(dataset))] == [0, 1, 2, 3]
    cfg.generator.max_model_len = 29
    error = refusal_of(build_data, cfg)
    assert error.key == "dataset.parts.b.c" and ", row 2, " in error.problem


@pytest.mark.parametrize("mixed", [False, True])
def test_the_tools_of_the_world_reach_the_prompts(cfg, mixed):
    cfg.environment.world = {"_component_": "my_data.World"}
    cfg.dataset.prompt_template = "{tools} {question}"
    limit_to(cfg, "max_position_embeddings", 1000)
    cfg.tokens_per_micro_batch = 1000
    if mixed:
        cfg.dataset = {"_component_": MIXED, "parts": {"one": dict(cfg.dataset)}}
    _, dataset, held_out = build_data(cfg)
    assert '"name": "lookup"' in dataset[0]["prompt_text"]
    assert "lookup" in held_out.note and "lookup" not in dataset.note


@BOTH
@pytest.mark.parametrize("mixed", [False, True])
def test_a_missing_column_is_answered_with_the_key_that_names_it(cfg, key, mixed):
    write_rows(Path(cfg[key].source), {"prompt": "1+1?", "answer": "#### 2"})
    naming = f"{key}.columns.question"
    if mixed:
        cfg[key] = {"_component_": MIXED, "parts": {"one": dict(cfg[key])}}
        naming = f"{key}.parts.one.columns.question"
    error = refusal_of(build_data, cfg)
    assert error.key == (f"{key}.parts.one" if mixed else key)
    assert error.allowed.startswith(naming) and "prompt" in error.allowed
    OmegaConf.update(cfg, naming, "prompt", force_add=True)
    build_data(cfg)


def test_the_config_gives_rule_and_seed_of_the_draws(settings_with):
    rows = [{"prompt_index": i} for i in range(3)]
    assert isinstance(build_prompts(settings_with(), rows), PromptStream)
    stream = build_prompts(settings_with(seed=7, curriculum={"low": 0.5}), rows)
    assert isinstance(stream, PromptCurriculum)
    assert stream.rule == CurriculumSettings(low=0.5, high=0.8, floor=0.1, decay=0.95)
    assert stream.seed == 7
    endless = np.broadcast_to(np.arange(1), MAX_PROMPTS + 1)
    assert refused_key(build_prompts, settings_with(curriculum={}), endless) == "curriculum"
