"""Where a judge's reply has its grade."""

import pytest

from grpo_components.rewards.verdicts import verdict_format

NUMBER, JSON = verdict_format({}), verdict_format({"format": "json", "scale": [1, 5]})


NUMBERS = [
    ("7", 0.7),
    ("Score: 7", 0.7),
    ("I give 3 points for style.\n\nScore: 7/10\n", 0.7),
    ("**Score:** **7.5**", 0.75),
    ("Final grade = 0.", 0.0),
    ("Score: 10", 1.0),
    ("Score: 11", None),
    ("Score: -1", None),
    ("Score: 7 or 8", None),
    ("Score: seven", None),
    ("Score: 7\nOr more?", None),
    ("I cannot grade 5 answers", None),
    ("Score: nan", None),
    ("", None),
    ("\n \n", None),
]
FIELDS = [
    ('{"score": 5}', 1.0),
    ('Thus:\n```json\n{"why": "{right}", "score": 3.0}\n```', 0.5),
    ('{"score": 1} is too low. {"score": 2}', 0.25),
    ('{"score": 3, "parts": {"score": 5}}', 0.5),
    ('{"score": 3} {"other": 5}', None),
    ('{"score": "3"}', None),
    ('{"score": true}', None),
    ('{"score": NaN}', None),
    ('{"score": 6}', None),
    ('{"score": 3', None),
    ('{"grade": 3}', None),
    ("[" * 5000 + '{"a":' * 5000, None),
    ("{" * 5000, None),
    ("3", None),
]


@pytest.mark.parametrize(
    ("verdict", "reply", "grade"),
    [*((NUMBER, *each) for each in NUMBERS), *((JSON, *each) for each in FIELDS)],
)
def test_a_number_is_alone_in_the_last_line_and_a_field_in_the_last_outermost_object(
    verdict, reply, grade
):
    assert verdict.read(reply) == grade


def test_a_long_reply_is_read_from_its_end():
    assert NUMBER.read("{" * 10**6 + "\nScore: 7") == 0.7
    assert JSON.read("{" * 10**6 + '{"score": 5}') is not None
