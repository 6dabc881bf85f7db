"""Every key has a type and bounds; what breaks them is refused by its key, with what is allowed."""

import math

import pytest
from lib.config_errors import refusal_of
from lib.tracked import tracked
from omegaconf import DictConfig, OmegaConf

from grpo_components.config.reading import read_settings
from grpo_components.errors import ConfigError
from grpo_components.settings import Settings

CONFIGS = tracked("recipes/configs/*.yaml")
SCHEMA = Settings.model_json_schema()
LINEAR = {"schedule": "linear", "start": 0.3, "end": 0.1, "num_steps": 10}
SCHEDULED = [
    *("loss.clip_low", "loss.clip_high", "loss.kl_coeff", "optimizer.lr"),
    *("generator.temperature", "reward_shaping.kl_coeff"),
]


def leaves(schema=SCHEMA, prefix=""):
    """Every key with the JSON schemas of what it may hold."""
    if "$ref" in schema:
        yield from leaves(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], prefix)
    elif union := schema.get("anyOf") or schema.get("oneOf"):
        for part in union:
            yield from leaves(part, prefix)
    elif "minProperties" in schema:
        yield from leaves(schema["additionalProperties"], f"{prefix}correctness.")
    elif "properties" in schema:
        for name, part in schema["properties"].items():
            yield from leaves(part, f"{prefix}{name}.")
    else:
        yield prefix[:-1], schema


NUMBERS = {key: schema for key, schema in leaves() if schema.get("type") in ("integer", "number")}
NULL = {
    "lora": {"rank": 8, "alpha": 16},
    "teacher": {"path": "a/folder"},
    "curriculum": {"decay": 0.9},
    "replay_generation": {"share": 0.5},
}
"""Sections that are null in the tiny config, each with what it needs."""


@pytest.fixture
def refusal(values_with):
    return lambda changes: refusal_of(read_settings, with_changes(values_with, changes))


def with_changes(values_with, changes):
    sections = {key.partition(".")[0] for key in changes if "." in key}
    nodes = {name: dict(NULL[name]) for name in sections & NULL.keys()}
    return values_with(**nodes, **{key.replace(".", "__"): v for key, v in changes.items()})


def test_every_number_is_bounded_from_both_sides():
    assert len(NUMBERS) > 60
    for key, schema in NUMBERS.items():
        assert "minimum" in schema or "exclusiveMinimum" in schema, key


@pytest.mark.parametrize("key", NUMBERS)
def test_a_bound_is_accepted_and_more_is_refused_with_the_bound(key, refusal, values_with):
    schema = NUMBERS[key]
    step = 1 if schema["type"] == "integer" else 0.01 * abs(schema["maximum"])
    is_schedule = key.rpartition(".")[0] in SCHEDULED
    place = key.rpartition(".")[0] if is_schedule else key
    name = key.rpartition(".")[2]

    def change(number):
        return {place: {**LINEAR, name: number} if is_schedule else number}

    try:
        read_settings(with_changes(values_with, change(schema["maximum"])))
    except ConfigError as beside:  # it does not fit other values of the tiny config
        assert "less than" not in beside.allowed
    for low in (schema.get("minimum"), schema.get("exclusiveMinimum")):
        if low is not None:
            assert refusal(change(low - step)).key == key
    error = refusal(change(schema["maximum"] + step))
    assert error.key == key and "less than or equal to" in error.allowed
    for wrong in ("8", True, math.nan):
        assert refusal(change(wrong)).key == key


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_shipped_configs_are_read_and_come_back(path):
    given = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    settings = read_settings(given)
    whole = settings.model_dump()
    assert [key for key in whole if key in given] == list(given), "the order of keys is kept"
    assert OmegaConf.merge(whole, given) == whole, "no value is changed"
    assert read_settings(whole) == settings
    assert isinstance(settings.model, DictConfig)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("group_size", 1),
        ("group_size", 8.0),
        ("device", "gpu"),
        ("shuffle", 1),
        ("output_dir", ""),
        ("eval_only", ""),
        ("profiler.enabled", 1),
        ("optimizer.lr", 0),
        ("loss.clip_low", 1.5),
        ("generator.stop_token_ids", ["a"]),
        ("generator", 7),
        ("eval.temperature", 1e-5),
        ("timeouts.rollout_s", "soon"),
        ("checkpointer.model_type", "QWEN4"),
        ("rewards", None),
        ("rewards", {}),
        ("rewards", [{"_component_": "a"}]),
        ("rewards.correctness.is_success", 1),
        ("model", None),
        ("model", "Qwen"),
        ("model", {"_component_": None}),
        ("lora", {"rank": 8, "alpha": 16, "target_modules": ["q"]}),
        ("packing", True),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(key, wrong, refusal):
    assert refusal({key: wrong}).key == key + ".target_modules" * (key == "lora")


def test_a_key_that_is_left_out_has_a_default_or_is_named(values_with):
    required = set()
    for key in Settings.model_fields:
        given = values_with()
        given.pop(key, None)
        try:
            assert key in read_settings(given).model_dump()
        except ConfigError as refused:
            assert (refused.key, refused.problem) == (key, "missing")
            required.add(key)
    assert {"output_dir", "model", "rewards", "group_size", "generator"} <= required
    assert not {"timeouts", "reward_model", "lr_scheduler"} & required


def test_a_default_can_be_overridden_alone(settings_with):
    settings = settings_with(timeouts={"rollout_s": 60}, reward_model=None)
    assert settings.timeouts.rollout_s == 60.0 and settings.timeouts.startup_s == 600.0
    assert settings.reward_model.path is None
    assert settings.rewards["correctness"].weight == 1.0
    empty = {"_component_": None, "num_warmup_steps": 3}  # `lr_scheduler=null` by torchtune
    assert settings_with(lr_scheduler=empty).lr_scheduler is None


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("group_sise", "did you mean group_size?"),
        ("learning_rate", "the keys that `tune cat"),
        ("temperature", "did you mean generator.temperature?"),
        ("lr", "did you mean optimizer.lr?"),
        ("generator.max_tokens", "max_response_tokens, temp"),
        ("generator.temperatures", "did you mean generator.temperature?"),
        ("timeouts.rewards_s", "did you mean timeouts.reward_s?"),
    ],
)
def test_an_unknown_key_gets_a_suggestion(key, hint, refusal):
    error = refusal({key: 1})
    assert (error.key, error.problem) == (key, "unknown key") and hint in error.allowed


def test_an_unknown_key_is_named_before_the_one_that_is_missing_for_it(values_with):
    given = values_with(group_sise=8)
    del given["group_size"]
    assert refusal_of(read_settings, given).key == "group_sise"


@pytest.mark.parametrize("key", SCHEDULED)
def test_a_schedule_may_stand_where_its_number_may(key, settings_with):
    section, name = key.split(".")
    for value in (LINEAR, 1):
        read = getattr(settings_with(**{f"{section}__{name}": value}), section)
        assert getattr(read, name) == value


def test_these_are_all_that_may_follow_a_schedule():
    assert sorted(SCHEDULED) == sorted({key[:-9] for key, _ in leaves() if ".schedule" in key})


@pytest.mark.parametrize(
    ("key", "change", "wrong"),
    [
        ("loss.kl_coeff", {"end": -0.1}, "end"),
        ("optimizer.lr", {"end": 0.0}, "end"),
        ("generator.temperature", {"end": 0}, "end"),
        ("loss.kl_coeff", {"schedule": "sudden"}, "schedule"),
        ("loss.kl_coeff", {"schedule": "constant"}, "end"),
        ("loss.kl_coeff", {"stop": 1}, "stop"),
    ],
)
def test_a_wrong_schedule_names_what_is_wrong_in_it(key, change, wrong, refusal):
    assert refusal({key: {**LINEAR, **change}}).key == f"{key}.{wrong}"


@pytest.mark.parametrize("name", ["schedule", "end", "num_steps"])
def test_a_schedule_lacks_nothing(name, refusal):
    given = {key: value for key, value in LINEAR.items() if key != name}
    assert refusal({"loss.kl_coeff": given}).key == f"loss.kl_coeff.{name}"
