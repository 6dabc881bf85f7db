"""Every key has a type and bounds; what breaks them is refused by its key, with what is allowed."""

import math
import pickle
import re
from operator import attrgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lib.config_errors import refusal_of, refused_key
from lib.settings_schema import leaves
from lib.tracked import tracked
from omegaconf import DictConfig, OmegaConf

from grpo_components.config.reading import _OURS, read_settings
from grpo_components.errors import MAX_MESSAGE, ConfigError
from grpo_components.plain_text import one_line
from grpo_components.settings import Settings

CONFIGS = tracked("recipes/configs/*.yaml")
LINEAR = {"schedule": "linear", "start": 0.3, "end": 0.1, "num_steps": 10}
SCHEDULED = [
    *("loss.clip_low", "loss.clip_high", "loss.kl_coeff", "optimizer.lr"),
    *("generator.temperature", "reward_shaping.kl_coeff"),
]

NUMBERS = {key: schema for key, schema in leaves() if schema.get("type") in ("integer", "number")}
NULL = {
    "lora": {"rank": 8, "alpha": 16},
    "teacher": {"path": "a/folder"},
    "curriculum": {"decay": 0.9},
    "replay_generation": {"share": 0.5},
}
"""Sections that are null in the tiny config, each with what it needs."""


@pytest.fixture
def read_at(settings_with):
    """Read the tiny config with another value at a key."""

    def read_at(key, value):
        section = key.partition(".")[0]
        needed = {section: dict(NULL[section])} if section in NULL else {}
        return settings_with(**needed, **{key.replace(".", "__"): value})

    return read_at


def test_every_number_is_bounded_from_both_sides():
    assert len(NUMBERS) > 60
    for key, schema in NUMBERS.items():
        assert "minimum" in schema or "exclusiveMinimum" in schema, key


@pytest.mark.parametrize("key", NUMBERS)
def test_a_bound_is_accepted_and_more_is_refused_with_the_bound(key, read_at):
    schema = NUMBERS[key]
    step = 1 if schema["type"] == "integer" else 0.01 * abs(schema["maximum"])
    place, _, name = key.rpartition(".")

    def read(number):
        at = (place, {**LINEAR, name: number}) if place in SCHEDULED else (key, number)
        return read_at(*at)

    try:
        read(schema["maximum"])
    except ConfigError as beside:  # it does not fit other values of the tiny config
        assert "less than" not in beside.allowed
    error = refusal_of(read, schema["maximum"] + step)
    assert error.key == key and "less than or equal to" in error.allowed
    lows = [schema[bound] for bound in ("minimum", "exclusiveMinimum") if bound in schema]
    for wrong in (*(low - step for low in lows), "8", True, math.nan):
        assert refused_key(read, wrong) == key


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_shipped_configs_are_read_and_come_back(path):
    given = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    settings = read_settings(given)
    whole = settings.model_dump()
    assert [key for key in whole if key in given] == list(given), "the order of keys is kept"
    assert given["generator"].pop("backend") is None, "which is filled in"
    assert OmegaConf.merge(whole, given) == whole, "no value is changed"
    assert read_settings(whole) == settings
    assert isinstance(settings.model, DictConfig)


@pytest.mark.parametrize("wrong", [{}, [{"_component_": "a"}]])
def test_rewards_are_a_section_with_some_in_it(wrong, read_at):
    assert refused_key(read_at, "rewards", wrong) == "rewards"


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


@pytest.mark.parametrize("key", SCHEDULED)
def test_a_schedule_may_stand_where_its_number_may(key, read_at):
    for value in (LINEAR, 1):
        assert attrgetter(key)(read_at(key, value)) == value


def test_these_are_all_that_may_follow_a_schedule():
    assert sorted(SCHEDULED) == sorted({key[:-9] for key, _ in leaves() if ".schedule" in key})


def test_each_name_of_others_is_hinted_at_by_a_key_that_exists():
    known = {*Settings.model_fields, *(key for key, _ in leaves())}
    assert {*_OURS.values()} <= known and not known & _OURS.keys()


# ---- a refusal: fields, and one line of text ---------------------------------------------------

TEXT = st.text(min_size=1, max_size=20) | st.text("ab \n\x1b\u202e", min_size=200, max_size=400)
TEXT = TEXT.filter(one_line)  # with something to say


@given(TEXT, TEXT, TEXT)
def test_a_refusal_is_one_line_with_key_problem_and_what_is_allowed(key, problem, allowed):
    text = str(ConfigError(key, problem, allowed))
    assert text == one_line(text) and len(text) <= MAX_MESSAGE == 285
    assert str(ConfigError("a.b", "is\nwrong", "c | d")) == "a.b: is wrong; allowed: c | d"
    assert str(ConfigError("a", "unknown", "did you mean b?")) == "a: unknown; did you mean b?"
    assert str(ConfigError("a", "no data", "")) == "a: no data"  # a component's own error
    assert ": " in text and "; allowed: " in text


@given(st.tuples(TEXT, TEXT, TEXT, st.text(max_size=9)))
def test_a_process_can_send_a_refusal_to_another(fields):
    error = pickle.loads(pickle.dumps(ConfigError(*fields)))
    assert (error.key, error.problem, error.allowed, error.user_traceback) == fields
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("key", ["seed", "rewards.correctness.weight", "generator.temperature"])
def test_the_first_wrong_value_of_a_config_is_refused_in_this_form(read_at, key):
    assert str(refusal_of(read_at, key, "x" * 500)).startswith(f"{key}: 'xxx")


@pytest.mark.parametrize(
    ("more", "backend"),
    [
        ({}, "transformers"),
        ({"device": "cuda"}, "vllm"),
        ({"lora": {"rank": 4, "alpha": 8}}, "vllm"),
    ],
)
def test_vllm_samples_on_gpus_and_where_only_it_will_do(settings_with, more, backend):
    assert settings_with(**more).generator.backend == backend


@pytest.mark.parametrize(("nbytes", "backend"), [(2**28, "transformers"), (2**28 + 1, "vllm")])
def test_on_a_cpu_vllm_samples_from_large_models(settings_with, tmp_path, nbytes, backend):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(nbytes)  # takes no room on the disk
    assert settings_with(base_model_path=str(tmp_path)).generator.backend == backend


def test_each_config_for_gpus_says_in_its_first_line_where_it_was_run():
    for path in CONFIGS:
        text = path.read_text()
        if "\ndevice: cuda" in text:
            assert re.match(r"# Config \((not run on a GPU|run on a GPU .+)\) for ", text), path
