"""Reward from a judge: a language model at an OpenAI-compatible address grades each response."""

from __future__ import annotations

import json
import math
import os
import random
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from jinja2 import StrictUndefined, UndefinedError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import SandboxedEnvironment
from omegaconf import OmegaConf

from grpo_components.errors import fail, shown
from grpo_components.plain_text import shortened

_FIRST_DELAY_S = 0.5
_TEMPORARY = (408, 409, 425, 429)
"""HTTP statuses below 500 after which another request may succeed."""
_WHOLE = ("stop", None)
"""Finish reasons of a complete reply; a cut-off `Score: 1` may be the start of `Score: 10`."""
_TOKENS = ("prompt_tokens", "completion_tokens")
_MAX_ERROR_CHARS = 300
_MAX_REPLY_CHARS = 20_000
"""How many characters at the end of a reply are searched for a grade."""
# A line that is a number: `7`, `Score: 7`, `**Score:** 7/10`.
_NUMBER_LINE = re.compile(r"(?:.*[:=])?[\s*]*([-+]?\d+(?:\.\d+)?)\s*(?:/\s*(\d+))?[\s*.]*")
_OBJECT = re.compile(r"\{\s*[\"}]")
_TEMPLATES = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


class JudgeError(RuntimeError):
    """A judge gave no grade."""


@dataclass(frozen=True)
class Verdict:
    """Format of the grade in a judge's reply, and the lowest and highest grade."""

    format: str = "number"
    key: str = "score"
    scale: tuple[float, float] = (0.0, 10.0)

    def __post_init__(self) -> None:
        if self.format not in ("number", "json"):
            fail("verdict.format", f"{shown(self.format)} given", "number, json")
        if not self.scale[0] < self.scale[1]:
            fail("verdict.scale", f"{shown(self.scale)} given", "the lowest and the highest grade")

    def read(self, reply: str) -> float | None:
        """Return the grade in a reply, scaled to 0 (lowest) to 1 (highest); None if it has none."""
        end, (lowest, highest) = reply[-_MAX_REPLY_CHARS:], self.scale
        grade = _last_line(end, highest) if self.format == "number" else _last_object(end, self.key)
        if grade is None or not lowest <= grade <= highest:  # refuses NaN, too
            return None
        return (grade - lowest) / (highest - lowest)


def _last_line(text: str, highest: float) -> float | None:
    """Return the number in the last line; None if it has none, or one of another scale (`7/5`)."""
    lines = [line for line in text.splitlines() if line.strip()]
    match = _NUMBER_LINE.fullmatch(lines[-1]) if lines else None
    return float(match[1]) if match and float(match[2] or highest) == highest else None


def _last_object(text: str, key: str) -> float | None:
    """Return the number under `key` in the last outermost JSON object; None if there is none."""
    grade, start = None, _OBJECT.search(text)
    while start:
        try:
            value, end = json.JSONDecoder().raw_decode(text, start.start())
        except RecursionError:
            return None
        except ValueError:  # a brace that starts no JSON
            end = start.end()
        else:
            grade = value.get(key)
        start = _OBJECT.search(text, end)
    return grade if type(grade) in (int, float) else None


class LLMJudge:
    """The grade that a language model gives a response, from 0 (lowest) to 1 (highest).

    The model gets the rubric as a user message. After a temporary error, or a reply without a
    grade, the request is repeated, with exponential backoff and jitter. If no request yields a
    grade, the sample fails; it does not get 0.

    Args:
        base_url: address up to `/v1`, http or https.
        model: name of the model at that address.
        rubric: Jinja template of the message; may use prompt, response, answer, finish_reason and
            the other columns of the data set.
        verdict: where the reply has its grade: `format` is `number` (the last line, as in
            `Score: 7`) or `json` (field `key` of the last JSON object); `scale` is the lowest and
            the highest grade.
        sampling: further fields of the request, such as temperature and max_tokens.
        api_key_env: name of the environment variable that has the key; None sends no key.
        wall_s: seconds for all requests of one response, with their delays; must be below
            `timeouts.reward_s`.
        retries: number of further requests after one that failed.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        rubric: str,
        verdict: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        api_key_env: str | None = None,
        wall_s: float = 8.0,
        retries: int = 3,
    ) -> None:
        self._base_url, self._model = base_url.rstrip("/"), model
        self._rubric = _TEMPLATES.from_string(rubric)
        if "response" not in find_undeclared_variables(_TEMPLATES.parse(rubric)):
            fail("rubric", "it does not use {{ response }}", "a text with {{ response }}")
        self._verdict = Verdict(**_plain(verdict))
        self._sampling = {"temperature": 0, **_plain(sampling)}
        self._api_key = _api_key(api_key_env)
        self.wall_s, self._retries = float(wall_s), retries
        self._used: Counter[str] = Counter()
        self._client = httpx.Client()

    def __call__(self, *, prompt_text: str, response_text: str, **others: Any) -> float:
        """Return the judge's grade of a response, from 0 to 1."""
        names = {**others, "prompt": prompt_text, "response": response_text}
        try:
            message = self._rubric.render(names)
        except UndefinedError as error:
            fail("rubric", f"{error.message}", f"{', '.join(names)}")
        message = message.encode(errors="replace").decode()  # half a surrogate pair cannot be sent
        problem, tries, deadline = "", 0, time.monotonic() + self.wall_s
        for tries in range(1, self._retries + 2):
            grade, problem, delay_s = self._ask(message, deadline - time.monotonic())
            if grade is not None:
                return grade
            delay_s = max(delay_s, _FIRST_DELAY_S * 2 ** (tries - 1) * random.uniform(0.5, 1))
            if tries > self._retries or time.monotonic() + delay_s >= deadline:
                break
            time.sleep(delay_s)  # noqa: TID251  # as the server or the backoff asks for
        self._used["failures"] += 1
        why = f"{shortened(problem, _MAX_ERROR_CHARS)} (last of {tries} requests"
        why += f" within wall_s of {self.wall_s:g} s)"
        raise JudgeError(f"{self._model} at {self._base_url} gave no grade: {why}")

    def take_use(self) -> dict[str, float]:
        """Return and reset the counts of requests, failures and tokens since the last call."""
        taken, self._used = self._used, Counter()
        return {kind: float(taken[kind]) for kind in ("requests", "failures", *_TOKENS)}

    def _ask(self, message: str, left_s: float) -> tuple[float | None, str, float]:
        """Send one request; return the grade or None, the problem, and seconds before a retry."""
        body = {"model": self._model, "messages": [{"role": "user", "content": message}]}
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        self._used["requests"] += 1
        try:
            url = f"{self._base_url}/chat/completions"
            sent = {**self._sampling, **body}
            answer = self._client.post(url, json=sent, headers=headers, timeout=left_s)
        except httpx.HTTPError as error:
            return None, f"{type(error).__name__}: {self._without_key(str(error))}", 0.0
        if answer.is_error:
            status = answer.status_code
            again = status in _TEMPORARY or status >= 500
            delay_s = _retry_after_s(answer.headers) if again else math.inf
            return None, f"HTTP status {status}: {self._without_key(answer.text)}", delay_s
        return *self._read(answer.text), 0.0

    def _read(self, body: str) -> tuple[float | None, str]:
        """Count an HTTP answer's tokens; return its grade, or None and why there is none."""
        try:
            answer = json.loads(body)
            for kind in _TOKENS:
                count = (answer.get("usage") or {}).get(kind)
                if type(count) is int and 0 <= count <= 2**40:  # a larger count cannot be true
                    self._used[kind] += count
            choice = answer["choices"][0]
            reply, ended = choice["message"].get("content") or "", choice.get("finish_reason")
            grade = self._verdict.read(reply)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return None, f"the answer is no chat completion: {shown(self._without_key(body))}"
        if ended in _WHOLE and grade is not None:
            return grade, ""
        where = f"verdict.format {self._verdict.format}, finish_reason {ended}"
        reply = self._without_key(reply)  # not before: a short key may be part of the grade
        end = f"...{reply[-50:]}" if len(reply) > 50 else reply
        return None, f"the reply has no grade in the scale ({where}): {end!r}"

    def _without_key(self, text: str) -> str:
        """Return a server's text with the key removed, because an error may repeat the key."""
        return text.replace(self._api_key, "***") if self._api_key else text


def _retry_after_s(headers: Mapping[str, str]) -> float:
    try:
        return max(0.0, float(headers.get("retry-after", 0)))
    except ValueError:  # a date
        return 0.0


def _api_key(variable: str | None) -> str | None:
    """Read the API key; no error shows `variable`, since a user may have put the key there."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not (key and key.isascii() and key.isprintable()):  # else a header cannot have it
        fail("api_key_env", "no key", "the name of an environment variable that holds the key")
    return key


def _plain(section: Mapping[str, Any] | None) -> Any:
    return OmegaConf.to_container(OmegaConf.create(dict(section or {})))
