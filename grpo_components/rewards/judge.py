"""The reward of a judge: a language model behind an OpenAI-compatible address grades responses."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
from jinja2 import StrictUndefined, TemplateError, UndefinedError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import SandboxedEnvironment
from pydantic import BaseModel, ValidationError

from grpo_components.errors import fail, shown
from grpo_components.plain_text import shortened
from grpo_components.rewards.verdicts import verdict_format

_FIRST_DELAY_S = 0.5
_OWN_FIELDS = ("model", "messages", "stream", "n")
"""Fields of a request that the judge sets."""
_TEMPORARY = (408, 409, 425, 429)
"""Statuses below 500 after which another request may succeed."""
_WHOLE = ("stop", None)
"""Reasons of a reply's end with which it is whole: `Score: 1` may be the start of `Score: 10`."""
_PRICES = {"prompt": "prompt_tokens", "completion": "completion_tokens"}
_USED = ("requests", "failures", *_PRICES.values())
_MOST_TOKENS = 2**40
"""Most tokens of one request; a larger number in `usage` is none."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_ERROR_CHARS = 300
_TEMPLATES = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


class JudgeError(RuntimeError):
    """A judge gave no grade."""


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Completion(BaseModel):
    """What is read of a chat completion; a server may send more."""

    choices: list[_Choice]
    usage: Any = None


class LLMJudge:
    """The grade that a language model gives a response, from 0 (lowest) to 1 (highest).

    The model is behind any OpenAI-compatible address (`/chat/completions`). It gets the rubric as
    the message of a user. A request that fails, or whose reply has no grade, is made again after
    an exponential delay with jitter. A judge that gives no grade is a failed sample, not a grade of
    0. In a replay, the recorded grades are used and no request is made.

    Args:
        base_url: address up to `/v1`, http or https.
        model: name of the model at that address.
        rubric: Jinja template of the message; may use prompt, response, answer, finish_reason and
            the other columns of the row.
        verdict: where the reply has its grade: `format` is `number` (the last line, as in
            `Score: 7`) or `json` (field `key` of the last JSON object); `scale` is the lowest and
            the highest grade.
        sampling: further fields of the request, such as temperature and max_tokens.
        api_key_env: name of the environment variable that has the key; None sends no key.
        prices: costs of a million `prompt` and `completion` tokens, for the metrics.
        wall_s: seconds for all requests of one response, with their delays; must be below
            `timeouts.reward_s`.
        retries: number of further requests after one that failed.

    Raises:
        ValueError: an argument is wrong.
    """

    max_reward = 1.0

    def __init__(
        self,
        base_url: str,
        model: str,
        rubric: str,
        verdict: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        api_key_env: str | None = None,
        prices: Mapping[str, float] | None = None,
        wall_s: float = 8.0,
        retries: int = 3,
    ) -> None:
        self._base_url, self._model, self._rubric = _address(base_url), model, _template(rubric)
        self._verdict = verdict_format(_mapping("verdict", verdict))
        self._sampling = {"temperature": 0, **_mapping("sampling", sampling)}
        if wrong := [name for name in self._sampling if name in _OWN_FIELDS]:
            fail(f"sampling.{wrong[0]}", "given, and the judge sets it", "without it")
        self._api_key, self._prices = _api_key(api_key_env), _mapping("prices", prices)
        if not (set(self._prices) <= set(_PRICES) and all(map(_is_number, self._prices.values()))):
            fail("prices", f"{shown(self._prices)} given", f"numbers for {', '.join(_PRICES)}")
        if not _is_number(wall_s) or wall_s == 0:
            fail("wall_s", f"{shown(wall_s)} given", "a number above 0")
        if type(retries) is not int or retries < 0:
            fail("retries", f"{shown(retries)} given", "a whole number of at least 0")
        self.wall_s, self._retries = float(wall_s), retries
        self._used: Counter[str] = Counter()
        self._connection: tuple[asyncio.Runner, httpx.AsyncClient] | None = None
        """The loop and the client of all requests, from the first one on."""

    def __call__(
        self,
        *,
        prompt_text: str,
        response_text: str,
        answer: str,
        finish_reason: str,
        **columns: Any,
    ) -> float:
        """Return the judge's grade of a response, from 0 to 1."""
        own = {"prompt": prompt_text, "response": response_text, "answer": answer}
        names = {**columns, **own, "finish_reason": finish_reason}
        try:
            message = self._rubric.render(names)
        except UndefinedError as error:
            fail("rubric", f"{error.message}", f"{', '.join(names)}")
        message = message.encode(errors="replace").decode()  # half of a character cannot be sent
        if self._connection is None:
            self._connection = asyncio.Runner(), httpx.AsyncClient(timeout=None)
        runner, client = self._connection
        return runner.run(self._grade(client, message))

    def take_use(self) -> dict[str, float]:
        """Return what was used since the last call: requests, tokens, cost, and what failed."""
        taken, self._used = self._used, Counter()
        cost = sum(price * taken[_PRICES[name]] for name, price in self._prices.items())
        return {name: float(taken[name]) for name in _USED} | {"cost": cost / 1e6}

    async def _grade(self, client: httpx.AsyncClient, message: str) -> float:
        """Ask until a reply has a grade."""
        loop, problem, tries = asyncio.get_running_loop(), "", 0
        deadline = loop.time() + self.wall_s
        try:
            # The client's own time-out is per read: one that sends byte by byte never meets it.
            async with asyncio.timeout_at(deadline):
                while True:
                    tries += 1
                    grade, problem, delay_s = await self._ask(client, message)
                    if grade is not None:
                        return grade
                    jitter = random.uniform(0.5, 1)
                    delay_s = max(delay_s, _FIRST_DELAY_S * 2 ** (tries - 1) * jitter)
                    if tries > self._retries or loop.time() + delay_s >= deadline:
                        break
                    await asyncio.sleep(delay_s)
        except TimeoutError:
            problem = f"{problem}, then no answer in time" if problem else "no answer in time"
        self._used["failures"] += 1
        why = f"{shortened(problem, _MAX_ERROR_CHARS)} (last of {tries} requests"
        why += f" within wall_s of {self.wall_s:g} s)"
        raise JudgeError(f"{self._model} at {self._base_url} gave no grade: {why}")

    async def _ask(
        self, client: httpx.AsyncClient, message: str
    ) -> tuple[float | None, str, float]:
        """Make one request."""
        body = {"model": self._model, "messages": [{"role": "user", "content": message}]}
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        self._used["requests"] += 1
        try:
            answer = await client.post(
                f"{self._base_url}/chat/completions",
                json={**self._sampling, **body},
                headers=headers,
            )
        except httpx.HTTPError as error:
            return None, f"{type(error).__name__}: {self._without_key(str(error))}", 0.0
        text = self._without_key(answer.text)
        if answer.is_error:
            status = answer.status_code
            again = status in _TEMPORARY or status >= 500
            delay_s = _retry_after_s(answer.headers) if again else math.inf
            return None, f"HTTP status {status}: {text}", delay_s
        return *self._read(text), 0.0

    def _read(self, body: str) -> tuple[float | None, str]:
        """Return the grade in an answer if it has one, and else why not."""
        try:
            answer = _Completion.model_validate_json(body)
        except ValidationError:
            return None, f"the answer is no chat completion: {shown(body)}"
        for name, count in answer.usage.items() if isinstance(answer.usage, dict) else ():
            if name in _PRICES.values() and type(count) is int and 0 <= count <= _MOST_TOKENS:
                self._used[name] += count
        reply = (answer.choices[0].message.content or "") if answer.choices else ""
        ended = answer.choices[0].finish_reason if answer.choices else "nothing"
        grade = self._verdict.read(reply)
        if ended in _WHOLE and grade is not None:
            return grade, ""
        where = f"verdict.format {self._verdict.format}, finish_reason {ended}"
        end = f"...{reply[-50:]}" if len(reply) > 50 else reply
        return None, f"the reply has no grade in the scale ({where}): {end!r}"

    def _without_key(self, text: str) -> str:
        """Return what a server sent without the key, which its errors may repeat."""
        return text.replace(self._api_key, "***") if self._api_key else text


def _retry_after_s(headers: Mapping[str, str]) -> float:
    try:
        return max(0.0, float(headers.get("retry-after", 0)))
    except ValueError:  # a date
        return 0.0


def _template(rubric: Any) -> Any:
    allowed = "a text with {{ prompt }} and {{ response }}"
    if not isinstance(rubric, str):
        fail("rubric", f"{shown(rubric)} given", allowed)
    try:
        used = find_undeclared_variables(_TEMPLATES.parse(rubric))
        template = _TEMPLATES.from_string(rubric)
    except TemplateError as error:
        fail("rubric", f"no Jinja template: {error}", allowed)
    if "response" not in used:
        fail("rubric", "it does not use {{ response }}", allowed)
    return template


def _api_key(variable: str | None) -> str | None:
    """Return the key in an environment variable; never show what is given: it may be the key."""
    if variable is None:
        return None
    if not (isinstance(variable, str) and _VARIABLE.fullmatch(variable)):
        fail("api_key_env", "no name of a variable", "the name of an environment variable")
    key = os.environ.get(variable, "").strip()
    if not key:
        fail("api_key_env", "no such environment variable", "the name of one that holds the key")
    if not (key.isascii() and key.isprintable()):  # a header cannot have it
        fail("api_key_env", "its value is no key", "printable ASCII")
    return key


def _address(address: Any) -> str:
    allowed = "an http or https address such as http://localhost:8000/v1, without a key in it"
    parts = urlsplit(address) if isinstance(address, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        fail("base_url", "no such address", allowed)
    if parts.username or parts.password or parts.query:
        fail("base_url", "has a user, a password or a query", allowed)
    return address.rstrip("/")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _mapping(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping | None):
        fail(key, f"{shown(value)} given", "a mapping")
    return _plain(value or {})


def _plain(value: Any) -> Any:
    """Return a config's nested values as dictionaries and lists, which JSON can write."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return value
