"""A refusal has fields, and is one line of text, also after it went through pickle or pydantic."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lib.config_errors import refusal_of

from grpo_components.config.reading import read_settings
from grpo_components.errors import MAX_MESSAGE, ConfigError
from grpo_components.plain_text import one_line

TEXT = st.text(min_size=1, max_size=20) | st.text("ab \n\x1b\u202e", min_size=200, max_size=400)


@given(TEXT, TEXT, TEXT)
def test_a_refusal_is_one_line_with_key_problem_and_what_is_allowed(key, problem, allowed):
    text = str(ConfigError(key, problem, allowed))
    assert text == one_line(text) and len(text) <= MAX_MESSAGE == 285
    assert str(ConfigError("a.b", "is\nwrong", "c | d")) == "a.b: is wrong; allowed: c | d"
    assert ": " in text and "; allowed: " in text


@given(st.tuples(TEXT, TEXT, TEXT, st.text(max_size=9)))
def test_a_process_can_send_a_refusal_to_another(fields):
    error = pickle.loads(pickle.dumps(ConfigError(*fields)))
    assert (error.key, error.problem, error.allowed, error.user_traceback) == fields
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("key", ["seed", "rewards.correctness.weight", "generator.temperature"])
def test_the_first_wrong_value_of_a_config_is_refused_in_this_form(values_with, key):
    given = values_with(**{key.replace(".", "__"): "x" * 500})
    assert str(refusal_of(read_settings, given)).startswith(f"{key}: 'xxx")
