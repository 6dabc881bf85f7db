"""Where a judge's reply has its grade."""

import pytest

from grpo_components.rewards.judge import Verdict

NUMBER, JSON = Verdict(), Verdict("json", scale=(1, 5))

NUMBERS = {"7": 0.7, "Score: 7": 0.7, "**Score:** **7.5**": 0.75, "Final grade = 0.": 0.0}
NUMBERS |= {"Score: 10": 1.0, "I give 3 points for style.\n\nScore: 7/10\n": 0.7}
NO_NUMBERS = ["Score: 11", "Score: -1", "Score: 7 or 8", "Score: seven", "Score: 7\nOr more?"]
NO_NUMBERS += ["Score: 5/5", "Score: 7/100", "Score: 7/0"]
NO_NUMBERS += ["I cannot grade 5 answers", "Score: nan", "", "\n \n"]
FIELDS = {'{"score": 5}': 1.0, '{"score": 1} is too low. {"score": 2}': 0.25}
FIELDS |= {'Thus:\n```json\n{"why": "{right}", "score": 3.0}\n```': 0.5}
FIELDS |= {'{"score": 3, "parts": {"score": 5}}': 0.5}
NO_FIELDS = ['{"score": 3} {"other": 5}', '{"score": "3"}', '{"score": true}', '{"score": NaN}']
NO_FIELDS += ['{"score": 6}', '{"score": 3', '{"grade": 3}', "[" * 5000 + '{"a":' * 5000]
NO_FIELDS += ["{" * 5000, "3"]


@pytest.mark.parametrize(
    ("verdict", "grades"),
    [(NUMBER, NUMBERS | dict.fromkeys(NO_NUMBERS)), (JSON, FIELDS | dict.fromkeys(NO_FIELDS))],
)
def test_a_number_is_alone_in_the_last_line_and_a_field_in_the_last_outermost_object(
    verdict, grades
):
    assert {reply: verdict.read(reply) for reply in grades} == grades
