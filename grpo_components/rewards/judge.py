"""The reward of a judge: a language model behind an OpenAI-compatible address grades responses."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from jinja2 import StrictUndefined, TemplateError, UndefinedError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import SandboxedEnvironment
from pydantic import BaseModel, ValidationError

from grpo_components.errors import fail, shown
from grpo_components.plain_text import shortened
from grpo_components.rewards.rate_limit import RateLimit
from grpo_components.rewards.reply_cache import ReplyCache
from grpo_components.rewards.verdicts import verdict_format

_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 30.0
_MAX_RETRIES = 20
_WAITING = 0.5
"""Share of `wall_s` in which another process that asks the same may get the reply."""
_OWN_FIELDS = ("model", "messages", "stream", "n")
"""Fields of a request that the judge sets."""
_TEMPORARY = (408, 409, 425, 429)
"""Statuses below 500 after which another request may succeed."""
_WHOLE = ("stop", None)
"""Reasons of a reply's end with which it is whole: `Score: 1` may be the start of `Score: 10`."""
_PRICES = ("prompt", "completion")
_USED_TOKENS = tuple(f"{each}_tokens" for each in _PRICES)
_MOST_TOKENS = 2**40
"""Most tokens of one request; a larger number in `usage` is none."""
_TOKENS_PER_PRICE = 1e6
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
        cache: folder that keeps the replies by the hash of address, model, message and sampling;
            None keeps none.
        prices: costs of a million `prompt` and `completion` tokens, for the metrics.
        wall_s: seconds for all requests of one response, with their delays; must be below
            `timeouts.reward_s`.
        request_s: seconds for one request.
        retries: number of further requests after one that failed.
        requests_per_minute: limit of all reward processes together: those on all machines that see
            `cache`, else those of each machine. None sets no limit.

    Raises:
        ValueError: an argument is wrong.
    """

    max_reward = 1.0
    varies = True

    def __init__(
        self,
        base_url: str,
        model: str,
        rubric: str,
        verdict: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        api_key_env: str | None = None,
        cache: str | None = None,
        prices: Mapping[str, float] | None = None,
        wall_s: float = 8.0,
        request_s: float = 8.0,
        retries: int = 3,
        requests_per_minute: float | None = None,
    ) -> None:
        self._base_url, self._model = _checked_address(base_url), _checked_text("model", model)
        self._rubric = _template(_checked_text("rubric", rubric))
        self._verdict = verdict_format(_mapping("verdict", verdict or {}))
        self._sampling = {"temperature": 0, **_mapping("sampling", sampling or {})}
        if wrong := [name for name in self._sampling if name in _OWN_FIELDS]:
            fail(f"sampling.{wrong[0]}", "given, and the judge sets it", "without it")
        self._api_key = _api_key(api_key_env)
        self._prices = _checked_prices(_mapping("prices", prices or {}))
        self.wall_s = _positive("wall_s", wall_s)
        self._request_s = _positive("request_s", request_s)
        if not (type(retries) is int and 0 <= retries <= _MAX_RETRIES):
            fail("retries", f"{shown(retries)} given", f"a whole number from 0 to {_MAX_RETRIES}")
        self._retries = retries
        if cache is not None and Path(_checked_text("cache", cache)).is_file():
            fail("cache", f"{shown(cache)} is a file", "a folder, or null")
        self._cache = ReplyCache(cache)
        self.requests_per_minute = requests_per_minute
        """Limit of all reward processes together, in requests per minute; None without one."""
        self._limit: RateLimit | None = None
        if requests_per_minute is not None:
            _positive("requests_per_minute", requests_per_minute)
            name = hashlib.sha256(f"{self._base_url} {os.getuid()}".encode()).hexdigest()[:16]
            folder = Path(tempfile.gettempdir() if cache is None else cache)
            self._limit = RateLimit(folder / f"judge-rate-{name}", requests_per_minute)
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
        request = {
            **self._sampling,
            "model": self._model,
            "messages": [{"role": "user", "content": message}],
        }
        named = json.dumps([self._base_url, request], sort_keys=True)
        key = hashlib.sha256(named.encode()).hexdigest()
        grade, deadline = self._cached_grade(key), time.monotonic() + self.wall_s
        if grade is not None:
            return grade
        with self._cache.asking(key, _WAITING * self.wall_s):
            grade = self._cached_grade(key)  # another process may have asked meanwhile
            return self._new_grade(key, request, deadline) if grade is None else grade

    def _cached_grade(self, key: str) -> float | None:
        known = self._cache.find(key)
        grade = None if known is None else self._verdict.read(known)
        self._used["cached"] += grade is not None
        return grade

    def _new_grade(self, key: str, request: dict[str, Any], deadline: float) -> float:
        """Ask the judge, and keep its reply."""
        without_grade = self._cache.find(key) is not None
        if self._connection is None:
            self._connection = asyncio.Runner(), httpx.AsyncClient()
        runner, client = self._connection
        try:
            reply = runner.run(self._graded_reply(client, key, request, deadline))
        except JudgeError:
            self._used["failures"] += 1
            raise
        stored = self._cache.store(key, reply, replace=without_grade)
        grades = map(self._verdict.read, (stored, reply))  # another `verdict` may have stored it
        return next(grade for grade in grades if grade is not None)

    def take_use(self) -> dict[str, float]:
        """Return what was used since the last call: requests, tokens, cost, and what failed."""
        names = ("requests", "cached", "failures", "prompt_tokens", "completion_tokens")
        taken, self._used = self._used, Counter()
        cost = sum(self._prices[each] * taken[f"{each}_tokens"] for each in _PRICES)
        return {name: float(taken[name]) for name in names} | {"cost": cost / _TOKENS_PER_PRICE}

    async def _graded_reply(
        self, client: httpx.AsyncClient, key: str, request: dict[str, Any], deadline: float
    ) -> str:
        """Ask until a reply has a grade; delays depend on the request only, not on the process."""
        problem, tries, chance = "", 0, random.Random(key)
        while True:
            left_s = deadline - time.monotonic()
            wait_s = self._limit.reserve(left_s) if self._limit else 0.0
            if wait_s is None:
                problem = problem or "no request was allowed in time (requests_per_minute)"
                break
            await asyncio.sleep(wait_s)
            limit_s = min(self._request_s, deadline - time.monotonic())
            reply, problem, asked_delay_s = await self._ask(client, request, limit_s)
            if reply is not None:
                return reply
            tries += 1
            delay_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** (tries - 1)) * chance.uniform(0.5, 1)
            delay_s = max(delay_s, asked_delay_s)
            if tries > self._retries or time.monotonic() + delay_s >= deadline:
                break
            await asyncio.sleep(delay_s)
        tried = f"last of {tries} requests within wall_s of {self.wall_s:g} s"
        why = f"{shortened(problem, _MAX_ERROR_CHARS)} ({tried})"
        raise JudgeError(f"{self._model} at {self._base_url} gave no grade: {why}")

    async def _ask(
        self, client: httpx.AsyncClient, request: dict[str, Any], limit_s: float
    ) -> tuple[str | None, str, float]:
        """Make one request."""
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        self._used["requests"] += 1
        try:
            # The client's own time-out is per read: one that sends byte by byte never meets it.
            async with asyncio.timeout(limit_s):
                answer = await client.post(
                    f"{self._base_url}/chat/completions",
                    json=request,
                    headers=headers,
                    timeout=self.wall_s,
                )
        except (TimeoutError, httpx.TimeoutException):
            return None, f"no answer within {limit_s:.3g} s", 0.0
        except httpx.HTTPError as error:
            return None, f"{type(error).__name__}: {self._without_key(str(error))}", 0.0
        body = self._without_key(answer.text)
        if answer.is_error:
            status = answer.status_code
            again = status in _TEMPORARY or status >= 500
            delay_s = _retry_after_s(answer.headers) if again else math.inf
            return None, f"HTTP status {status}: {body}", delay_s
        return *self._read(body), 0.0

    def _read(self, body: str) -> tuple[str | None, str]:
        """Return the reply in an answer if it has a grade, and else why not."""
        try:
            answer = _Completion.model_validate_json(body)
        except ValidationError:
            return None, f"the answer is no chat completion: {shown(body)}"
        for name, count in answer.usage.items() if isinstance(answer.usage, dict) else ():
            if name in _USED_TOKENS and type(count) is int and 0 <= count <= _MOST_TOKENS:
                self._used[name] += count
        reply = (answer.choices[0].message.content or "") if answer.choices else ""
        ended = answer.choices[0].finish_reason if answer.choices else "nothing"
        if ended in _WHOLE and self._verdict.read(reply) is not None:
            return reply, ""
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


def _template(rubric: str) -> Any:
    allowed = "a text with {{ prompt }} and {{ response }}"
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


def _checked_address(address: Any) -> str:
    allowed = "an http or https address such as http://localhost:8000/v1, without a key in it"
    parts = urlsplit(address) if isinstance(address, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        fail("base_url", "no such address", allowed)
    if parts.username or parts.password or parts.query:
        fail("base_url", "has a user, a password or a query", allowed)
    return address.rstrip("/")


def _checked_text(key: str, value: Any) -> str:
    if not (isinstance(value, str) and value.strip()):
        fail(key, f"{shown(value)} given", "a text")
    return value


def _positive(key: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 < value < math.inf):
        fail(key, f"{shown(value)} given", "a number above 0")
    return float(value)


def _checked_prices(prices: dict[str, Any]) -> dict[str, float]:
    for name, price in prices.items():
        if name not in _PRICES:
            fail(f"prices.{name}", "unknown key", ", ".join(_PRICES))
        is_number = isinstance(price, int | float) and not isinstance(price, bool)
        if not (is_number and 0 <= price < math.inf):
            fail(f"prices.{name}", f"{shown(price)} given", "the cost of a million tokens")
    return {name: float(prices.get(name, 0)) for name in _PRICES}


def _mapping(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        fail(key, f"{shown(value)} given", "a mapping")
    return _plain(value)


def _plain(value: Any) -> Any:
    """Return a config's nested values as dictionaries and lists, which JSON can write."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(each) for each in value]
    return value
