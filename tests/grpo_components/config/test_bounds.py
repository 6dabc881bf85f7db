"""Every number has an upper bound with a reason; what no run can have never reaches an engine."""

import math
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from grpo_components.config.bounds import BOUNDS, PRODUCTS, check_against_model, check_bounds
from grpo_components.config.schema import SCHEMA, Rule, read_section

CONFIGS = sorted((Path(__file__).parents[3] / "recipes/configs").glob("*.yaml"))
TINY = next(path for path in CONFIGS if path.stem == "tiny_async_grpo")


def numbers(schema=SCHEMA, prefix=""):
    """Every key that holds a number, with its rule."""
    for name, rule in schema.items():
        if not isinstance(rule, Rule):
            yield from numbers(rule, f"{prefix}{name}.")
        elif rule.kind in (int, float):
            yield f"{prefix}{name}", rule


def values(**changes):
    """The tiny config's values with others at some keys, whose dots are written `__`."""
    given = OmegaConf.to_container(OmegaConf.load(TINY), resolve=True)
    for key, value in changes.items():
        *sections, name = key.split("__")
        section = given
        for part in sections:
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
        section[name] = value
    return read_section(SCHEMA, given, "")


def refusal(**changes):
    """The message with which values are refused."""
    with pytest.raises(ValueError) as refused:
        check_bounds(values(**changes))
    message = str(refused.value)
    assert len(message) <= 285 and "; allowed: " in message
    return message


def test_every_number_has_an_upper_bound_with_a_reason():
    bounded_elsewhere = {"object_store_memory"}  # by the memory of the machine
    for key, rule in numbers():
        assert key in BOUNDS or rule.high < math.inf or key in bounded_elsewhere, key
    assert all(math.isfinite(b.high) and b.why for b in [*BOUNDS.values(), *PRODUCTS.values()])


def test_the_table_names_keys_that_exist():
    known = {key for key, _ in numbers()}
    own = {key for key in BOUNDS if not key.startswith(("model.", "loss.e", "optimizer."))}
    assert own <= known
    assert {key for keys in PRODUCTS for key in keys} <= known


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_shipped_configs_are_within(path):
    given = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    check_bounds(read_section(SCHEMA, given, "") | {"device": "cuda"})


@pytest.mark.parametrize("key", [key for key, _ in numbers() if key in BOUNDS and "*" not in key])
def test_the_bound_is_accepted_and_more_is_not(key):
    high, why, _ = BOUNDS[key]
    rule = dict(numbers())[key]
    if key.startswith(("ptx.", "lr_scheduler.")) or rule.high <= high:
        return  # they may be null, or have the same bound in the schema
    over = int(high) + 1 if rule.kind is int else high * 1.01
    message = refusal(**{"device": "cuda", key.replace(".", "__"): over})
    assert message.startswith(f"{key}: ") and why in message
    at_most = values(**{key.replace(".", "__"): int(high) if rule.kind is int else high})
    try:
        check_bounds(at_most)
    except ValueError as refused:
        assert " x " in str(refused) or "this machine" in str(refused), "of a product alone"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"generator__temperature": 1e300}, "generator.temperature"),
        ({"generator__temperature": 2.1}, "generator.temperature"),
        ({"generator__temperature": 0.001}, "generator.temperature"),
        ({"eval__temperature": 3}, "eval.temperature"),
        ({"eval__temperature": 1e-5}, "eval.temperature"),
        ({"generator__top_p": 0}, "generator.top_p"),
        ({"generator__top_p": 1.5}, "generator.top_p"),
        ({"generator__top_k": -2}, "generator.top_k"),
        ({"generator__min_p": -0.1}, "generator.min_p"),
        ({"generator__presence_penalty": 3}, "generator.presence_penalty"),
        ({"generator__frequency_penalty": -3}, "generator.frequency_penalty"),
        ({"generator__repetition_penalty": 0}, "generator.repetition_penalty"),
        ({"generator__kv_cache_gib": 2**19}, "generator.kv_cache_gib"),
        ({"max_staleness": 10**30}, "max_staleness"),
        ({"group_size": 2**31}, "group_size"),
        ({"rollouts_in_flight": 10**9}, "rollouts_in_flight"),
        ({"num_generators": 2**63}, "num_generators"),
        ({"num_trainers": 2**63}, "num_trainers"),
        ({"num_references": 2**63}, "num_references"),
        ({"reward_workers": 2**63}, "reward_workers"),
        ({"model__num_layers": 10**9}, "model.num_layers"),
        ({"model__max_seq_len": 2**31}, "model.max_seq_len"),
        ({"model__num_layers": -1}, "model.num_layers"),
        ({"model__norm_eps": "x"}, "model.norm_eps"),
        ({"model__norm_eps": [1]}, "model.norm_eps"),
        ({"model__norm_eps": math.nan}, "model.norm_eps"),
        ({"model__rope_base": True}, "model.rope_base"),
        ({"model__attn_dropout": -1}, "model.attn_dropout"),
        ({"rewards__correctness__weight": 1e308}, "rewards.correctness.weight"),
        ({"rewards__correctness__weight": -1e308}, "rewards.correctness.weight"),
        ({"reward_model__weight": 1e308}, "reward_model.weight"),
        ({"timeouts__rollout_s": 1e300}, "timeouts.rollout_s"),
        ({"timeouts__rollout_s": 1e-300}, "timeouts.rollout_s"),
        ({"groups_per_step": 2**14, "group_size": 2**14}, "groups_per_step"),
        ({"max_staleness": 10**6, "groups_per_step": 100}, "max_staleness"),
        ({"rollouts_in_flight": 2**14, "group_size": 2**8}, "rollouts_in_flight"),
        ({"num_generators": 1000, "rollouts_in_flight": 1000}, "num_generators"),
        ({"ppo_epochs": 10**4, "updates_per_batch": 2**10}, "ppo_epochs"),
    ],
)
def test_what_would_fail_behind_the_engines_is_refused_before(changes, key):
    assert refusal(**changes).startswith(f"{key}: ")


@pytest.mark.parametrize("name", ["start", "end"])
def test_both_ends_of_a_schedule_are_bounded(name):
    linear = {"schedule": "linear", "start": 1.0, "end": 0.5, "num_steps": 9}
    message = refusal(generator__temperature=linear | {name: 2.5})
    assert message.startswith(f"generator.temperature.{name}: 2.5 given")
    message = refusal(optimizer__lr=linear | {"num_steps": 2**40})
    assert message.startswith("optimizer.lr.num_steps: ")
    message = refusal(loss__kl_coeff=linear | {"warmup_steps": 2**40})
    assert message.startswith("loss.kl_coeff.warmup_steps: ")


def test_a_warm_up_never_samples_colder_than_vllm_does():
    """vLLM raises a lower temperature to 0.01, and the trainer would divide by another."""
    warm = {"schedule": "constant", "start": 1.0, "warmup_steps": 101}
    assert refusal(generator__temperature=warm).startswith("generator.temperature.warmup_steps: ")
    check_bounds(values(generator__temperature=warm | {"warmup_steps": 100}))


def test_stop_tokens_and_lengths_are_those_of_the_model():
    hf_config = {"vocab_size": 384, "max_position_embeddings": 512}
    check_against_model(values(generator__stop_token_ids=[0, 383]), hf_config)
    for tokens in ([384], [1, -1], [10**30]):
        given = values(generator__stop_token_ids=tokens)
        with pytest.raises(ValueError, match=r"^generator\.stop_token_ids: .*; allowed: "):
            check_against_model(given, hf_config)
    with pytest.raises(ValueError, match=r"^generator\.max_model_len: 513 given"):
        check_against_model(values(generator__max_model_len=513), hf_config)
    check_against_model(values(generator__max_model_len=512), hf_config)
