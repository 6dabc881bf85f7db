"""The reward for mathematics: compares the final answer of a response with the known one."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable
from typing import Any

from grpo_components.rewards.math_bounds import is_costly, is_slow_to_read

RESPONSE_CPU_S = 4.0
"""Most CPU seconds that one of our rewards spends on a response; beyond them, the reward is 0."""

_NUMBERS_SIDE_BY_SIDE = re.compile(r"\d[\s()]+\d+(?!\s*/|\d)")
_CURRENCY = re.compile(r"^(?:(?:USD?|EUR|GBP)\b\s*(?:\\\$)?|[€£¥])\s*|\s*[€£¥¢]$")
# A unit after a number: a degree sign, `m^2`, `m/s`, `dollars`, `square units`. Words that change
# the value (`million`, `pi`) or continue the text (`or`, `and`) are not units.
_UNIT = re.compile(
    r"(?<=[\d}])\s*(?:°\s?[CF]?|\^\{?\\circ\}?\s*(?:\\(?:text|mathrm)\{)?\s*[CF]?\}?"
    r"|\s[kcdm]?m\^?\{?[23]\}?|\sL|\s[A-Za-z]{1,3}/[A-Za-z]+"
    r"|\s(?!(?:or|and|to|pi|plus|minus|over|times|squared|cubed|factorial|root|sqrt|negative"
    r"|hal(?:f|ves)|thirds?|(?:fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s?"
    r"|(?:dozen|score|hundred|thousand|lakh|crore|[mbtr]+illion)s?)\b)"
    r"[A-Za-z]{2,}(?: [A-Za-z]{2,})?(?: per [A-Za-z]+| ?/ ?[A-Za-z]+)?)$"
)
_PERCENT = re.compile(r"\s*\\?%$")
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mbox)\{\s*\(?([A-Za-z][A-Za-z .'-]*?)\)?\s*\}")
_UNEVALUATED = ("Sum", "Product", "Integral", "Limit")
_INFINITIES = ("Infinity", "NegativeInfinity", "ComplexInfinity", "NaN")
_MAX_EXTRA_CHARS = 1000
"""Most characters by which an answer may exceed the known one: a long text is slow to parse."""

_SYMBOLS = str.maketrans(
    {
        **{"–": "-", "−": "-", "~": " ", "⁄": "/", "×": r"\times ", "∞": r"\infty "},  # noqa: RUF001
        **{"²": "^{2}", "³": "^{3}", "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge "},
        **{"½": r" \frac{1}{2}", "¼": r" \frac{1}{4}", "¾": r" \frac{3}{4}"},
    }
)


def _repeating(match: re.Match[str]) -> str:
    whole, once, again = match.groups()
    nines = 10 ** len(once + again) - 10 ** len(once)
    return rf"\frac{{{int(whole + once + again) - int(whole + once)}}}{{{nines}}}"


# Spellings that math-verify misreads or cannot read, each with a replacement that it reads.
_REWRITES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"(?<!\\)\$|\n"), " "),
    (re.compile(r"^\\\[(.*)\\\]$|^=\s*(.*)$", re.DOTALL), lambda m: m[1] or m[2] or ""),
    (re.compile(r"(?<=\d)(?:\\[,! ]|\{,\}|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))"), ""),
    # `1 000 000`, unless another number follows
    (re.compile(r"^\D{0,2}\d{1,3}(?: \d{3})+(?![ \d]*\d)"), lambda m: m[0].replace(" ", "")),
    (re.compile(r"\\[dtc]?frac\s*(\d)\s+(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"(?<![\w./}])(\d+)\s+(\d+)\s*/\s*(\d+)"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<=\d)[eE]([+-]?\d{1,3})(?![\w.])"), r"\\times 10^{\1}"),
    (re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)"), r"\\times "),
    (re.compile(r"\^\s*(-?\d+)"), r"^{\1}"),
    (re.compile(r"(\d+)\.(\d*)\\(?:overline|bar)\{?(\d+)\}?"), _repeating),
    (re.compile(r"\s*percent$"), r"\\%"),
    (re.compile(r"\\(?:text|math)(?:rm|bf)?\{([^{}A-Za-z]*\d[^{}A-Za-z]*)\}"), r"\1"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\sqrt (?=\d{2})(\d+)"), r"\\sqrt{\1}"),
]

_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_HASHES = re.compile(r"####([^\n]*)")


def _last(pattern: re.Pattern[str]) -> Callable[[str], str]:
    return lambda text: (pattern.findall(text) or [""])[-1]


def last_boxed(text: str) -> str:
    """Return the content of the last complete `\\boxed{...}`; empty if there is none."""
    for piece in reversed(re.split(r"\\boxed\s*\{", text)[1:]):
        depth = 1
        for match in re.finditer(r"\\.|[{}]", piece, re.DOTALL):  # `\{` is text, not a LaTeX brace
            depth += (match[0] == "{") - (match[0] == "}")
            if depth == 0:
                return piece[: match.start()]
    return ""


_FIND: dict[str, Callable[[str], str]] = {
    "tag": _last(_TAG),
    "boxed": last_boxed,
    "gsm8k": _last(_HASHES),
    "plain": str,
}


class MathCorrectness:
    """1 if the final answer of the response is mathematically equal to the known one, else 0.

    Only the last marked answer counts, and all of it: if 5 is known, `15` and `5 or 6` are wrong.
    math-verify decides equality (`1/2` equals `0.5`, `1,000` equals `1000`), with one exception: if
    the known answer is a number, `3+4` does not equal 7. Otherwise a policy would learn to write
    the sum instead of computing it.
    A unit next to a number is ignored in both answers: `18 apples`, `5\\text{ cm}`, `90^\\circ`,
    `$5` and `€5` count as plain numbers. `50%` equals both 50 and 0.5. A known answer in words,
    `\\text{even}`, is compared as text, ignoring case.

    Args:
        answer_format: where to find the answer: `tag` (<answer>5</answer>), `boxed` (\\boxed{5}),
            `gsm8k` (#### 5), or `plain` (the whole response).

    Raises:
        ValueError: `answer_format` is none of these.
    """

    max_reward = 1.0
    response_cpu_s = RESPONSE_CPU_S

    def __init__(self, answer_format: str = "tag") -> None:
        if answer_format not in tuple(_FIND):
            allowed = ", ".join(_FIND)
            raise ValueError(f"answer_format: {answer_format!r} given; allowed: {allowed}")
        self._find = _FIND[answer_format]
        # Imported here because it takes seconds.
        self._math_verify = importlib.import_module("math_verify")
        for part in ("parser", "grader"):
            logging.getLogger(f"math_verify.{part}").addFilter(_is_news)

    def __call__(
        self, *, prompt_text: str, response_text: str, answer: str, finish_reason: str
    ) -> float:
        """Score one response.

        Args:
            prompt_text: not used.
            response_text: searched for the answer.
            answer: the known answer.
            finish_reason: not used.

        Raises:
            ValueError: the known answer cannot be parsed as mathematics.
        """
        given, answer = self._find(response_text).strip(), answer.strip()
        if not given or len(given) > len(answer) + _MAX_EXTRA_CHARS or is_slow_to_read(given):
            return 0.0
        if given == answer:
            return 1.0
        if words := _WORDS.fullmatch(answer):  # as mathematics, `on` would equal `no`
            return float(_words(given) == words[1].casefold())
        known, given = _rewritten(answer), _rewritten(given)
        bare = _PERCENT.sub("", known), _PERCENT.sub("", given)
        return float(self._equal(*bare) or (bare != (known, given) and self._equal(known, given)))

    def _equal(self, known: str, given: str) -> bool:
        if _NUMBERS_SIDE_BY_SIDE.search(given):  # math-verify would add up `12 13` and `(12)(13)`
            return False
        gold = self._parse(_without_unit(known))
        if not gold:
            raise ValueError(
                f"answer: cannot parse {known!r} as mathematics; allowed: a LaTeX formula"
            )
        try:
            return self._equals(gold, known, given)
        except (ArithmeticError, RecursionError, MemoryError):  # caused by the response
            return False

    def _equals(self, gold: list[Any], known: str, given: str) -> bool:
        is_number = getattr(gold[0], "is_Number", False)
        read = self._parse(_without_unit(given) if is_number else given)
        if any(map(is_costly, [*gold, *read])):  # 9^{9^9}: compare the text
            return known == given or gold[0] in read[:1]
        if is_number and any(map(_is_unfinished, read)):
            return False
        is_constant = getattr(gold[0], "is_number", False)  # a root, for example
        if is_constant and any(map(_is_infinite, read)) and not _is_infinite(gold[0]):
            return False  # sympy may call an infinite product equal to 5
        # math-verify's own time-out needs signals; the reward pool enforces the deadline instead.
        return self._math_verify.verify(gold, read, timeout_seconds=None)

    def _parse(self, text: str) -> list[Any]:
        return self._math_verify.parse(
            f"${text.rstrip('.').strip()}$",
            extraction_config=[self._math_verify.LatexExtractionConfig()],
            parsing_timeout=None,
        )


def _is_news(record: logging.LogRecord) -> bool:
    # Each process would say so: our pool limits the time.
    return not record.getMessage().startswith("Timeout is disabled")


def _rewritten(text: str) -> str:
    """Return the same answer in a spelling that math-verify reads."""
    text = text.strip("*` \n$").rstrip(",;").translate(_SYMBOLS).strip()
    for pattern, into in _REWRITES:
        text = pattern.sub(into, text)
    return text.strip()


def _words(text: str) -> str:
    inside = _WORDS.fullmatch(text)
    return (inside[1] if inside else text.strip("*`$() .")).casefold()


def _without_unit(text: str) -> str:
    return _UNIT.sub("", _CURRENCY.sub("", text.rstrip(".")))


def _is_unfinished(expression: Any) -> bool:
    """Whether a sympy expression still has unknowns, or operations to carry out."""
    expression = getattr(expression, "rhs", expression)  # the 7 of `3+4=7` and `x=7`
    parts = getattr(expression, "args", ())
    numbers = [part for part in parts if part.is_Number and part != -1]
    joins = getattr(expression, "is_Add", False) or getattr(expression, "is_Mul", False)
    is_open = getattr(expression, "is_Symbol", False) or type(expression).__name__ in _UNEVALUATED
    return is_open or (joins and len(numbers) > 1) or any(map(_is_unfinished, parts))


def _is_infinite(expression: Any) -> bool:
    """Whether a sympy expression contains an infinity or a division by zero."""
    parts: tuple[Any, ...] = getattr(expression, "args", ())
    is_power_of_0 = getattr(expression, "is_Pow", False) and parts[0] == 0  # 1/0 is 0**-1
    is_infinity = type(expression).__name__ in _INFINITIES
    return is_infinity or is_power_of_0 or any(map(_is_infinite, parts))
