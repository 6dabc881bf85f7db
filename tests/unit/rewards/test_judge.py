"""A judge's grades and failures, against a server that does what a test says."""

import json
import math
from contextlib import closing

import pytest
from lib.judge_server import judge_server
from omegaconf import OmegaConf

from grpo_components.rewards import judge as module
from grpo_components.rewards.judge import JudgeError, LLMJudge, Verdict
from grpo_components.rewards.pool import RewardPool, RewardSpec

RUBRIC = "Grade {{ response }} as an answer to {{ prompt }} ({{ answer }})."
KEY = "sk-very-secret-0123456789"
CALL = {"prompt_text": "1 + 1", "response_text": "2", "answer": "two", "finish_reason": "stop"}


@pytest.fixture
def server():
    with judge_server() as server:
        yield server


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr(module, "_FIRST_DELAY_S", 0.02)


@pytest.fixture
def make(server):
    return lambda rubric=RUBRIC, **given: LLMJudge(server.url, "judge", rubric, **given)


def test_the_grade_is_asked_for_with_the_rubric_and_scaled(server, make):
    server.answers = ["It is right.\n**Score: 8/10**"]
    rubric = '{{ prompt }}|{{ response }}|{{ answer }}|{{ level }}|{"score": 3}|{{ finish_reason }}'
    assert make(rubric, sampling={"max_tokens": 9})(**CALL, level=[3]) == 0.8
    (request,) = server.requests
    assert request == {
        **{"model": "judge", "temperature": 0, "max_tokens": 9},
        "messages": [{"role": "user", "content": '1 + 1|2|two|[3]|{"score": 3}|stop'}],
    }
    assert "Authorization" not in server.headers[0]


def test_a_request_is_made_again_while_the_judge_may_recover(server, make):
    server.answers = [(429, b'{"error": "slow down"}', {}), (500, b"oops", {})]
    server.answers += [(200, b"<html>", {"Content-Type": "text/html"}), "no idea", "Score: 5"]
    judge = make(retries=4)
    assert judge(**CALL) == 0.5
    used = {"requests": 5, "failures": 0, "prompt_tokens": 20, "completion_tokens": 4}
    assert judge.take_use() == used
    assert set(judge.take_use().values()) == {0.0}
    assert server.times[-1] - server.times[-2] > 0.02 * 2**3 / 2


def sent(reply, **more):
    choice = {"message": {"content": reply}, "finish_reason": more.pop("finish_reason", "stop")}
    return 200, json.dumps({"choices": [choice], **more}).encode(), {}


CUT_OFF = ("length", "content_filter", "tool_calls", "abort", "")


@pytest.mark.parametrize(
    ("answer", "tries", "said"),
    [
        ((401, b'{"error": "bad key"}', {}), 1, "HTTP status 401: .*bad key"),
        *(((404, b"", {}), 1, "HTTP status 404"), ((503, b"down", {}), 2, "HTTP status 503: down")),
        ((429, b"", {"Retry-After": "60"}), 1, "HTTP status 429"),
        ((200, b'{"choices": []}', {}), 2, "no chat completion"),
        ("Score: 11", 2, "no grade in the scale .*Score: 11"),
        *((None, 2, "no grade"), (30.0, 1, "ReadTimeout")),
        *((sent("Score: 1", finish_reason=reason), 2, "no grade") for reason in CUT_OFF),
    ],
)
def test_no_grade_is_an_error_and_no_grade_of_0(server, make, answer, tries, said):
    server.default = answer
    judge = make(retries=1, wall_s=0.1 if answer == 30.0 else 59.0)
    with pytest.raises(JudgeError, match=said):
        judge(**CALL)
    used = judge.take_use()
    assert (used["requests"], used["failures"]) == (tries, 1)


def test_the_key_is_sent_and_shown_nowhere(server, make, monkeypatch, caplog):
    monkeypatch.setenv("MY_KEY", f" {KEY}\n")
    server.answers = [(500, f"you sent {KEY}".encode(), {}), f"{KEY} Score: 5\nno", "Score: 5"]
    judge = make(api_key_env="MY_KEY", retries=0)
    for _ in range(2):
        with pytest.raises(JudgeError) as failed:
            judge(**CALL)
        assert KEY not in str(failed.value) and "***" in str(failed.value)
    assert judge(**CALL) == 0.5
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert KEY not in caplog.text


def test_a_key_that_is_part_of_the_reply_changes_no_grade(server, make, monkeypatch):
    monkeypatch.setenv("MY_KEY", "1")
    server.answers = ["Score: 10"]
    assert make(api_key_env="MY_KEY")(**CALL) == 1.0


def test_a_judge_that_is_down_is_a_failed_sample(server):
    server.answers = ["Score: 1", (400, b"", {}), "Score: 3"]
    arguments = {"base_url": server.url, "model": "m", "rubric": RUBRIC}
    spec = RewardSpec("grpo_components.rewards.judge.LLMJudge", arguments, 1.0, False)
    with closing(RewardPool({"judge": spec}, num_workers=1, timeout_s=60)) as pool:
        scores = [pool([CALL])[0] for _ in range(3)]
    assert [score.reward for score in scores] == pytest.approx([0.1, math.nan, 0.3], nan_ok=True)
    down = scores[1]
    assert down.error and down.error.startswith("reward judge: JudgeError")
    assert (down.terms, down.success, down.used["judge_failures"]) == ({}, False, 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rubric": "Grade {{ prompt }}."}, "rubric: it does not use {{ response }}"),
        ({"verdict": {"format": "xml"}}, "verdict.format: 'xml' given; allowed: number, json"),
        ({"api_key_env": KEY}, "api_key_env: no key; allowed: the name of an environment variable"),
    ],
)
def test_a_wrong_argument_is_refused_by_its_name(arguments, said):
    right = {"base_url": "http://localhost/v1", "model": "m", "rubric": RUBRIC}
    with pytest.raises(ValueError, match=f"^{said}") as refused:
        LLMJudge(**{**right, **arguments})
    assert KEY not in str(refused.value)


def test_an_address_or_a_key_of_verdict_that_there_is_not_is_named(server, make):
    with pytest.raises(JudgeError, match="UnsupportedProtocol"):
        LLMJudge("localhost:8000", "m", RUBRIC, retries=0)(**CALL)
    with pytest.raises(TypeError, match="form"):
        make(verdict={"form": 1})


def test_arguments_may_be_parts_of_a_config(server):
    given = {"verdict": {"scale": [1, 5]}, "sampling": {"chat_template_kwargs": {"think": [False]}}}
    config = OmegaConf.create({"base_url": server.url, "model": "m", "rubric": RUBRIC, **given})
    assert LLMJudge(**config)(**CALL) == 1.0
    assert server.requests[0]["chat_template_kwargs"] == {"think": [False]}


def test_a_column_that_the_row_lacks_is_named(make):
    said = "rubric: 'level' is undefined; allowed: answer, finish_reason, kind, prompt, response"
    with pytest.raises(ValueError, match=said):
        make("{{ response }} {{ level }}")(**CALL, kind=1)


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
