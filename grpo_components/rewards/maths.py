"""The reward for mathematics: compares the final answer of a response with the known one."""

from __future__ import annotations

import importlib
import itertools
import logging
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

RESPONSE_CPU_S = 4.0
"""Most CPU seconds that one of our rewards spends on a response; beyond them, the reward is 0."""

_MAX_EXTRA_CHARS = 1000
"""Most characters by which an answer may exceed the known one: a long text is slow to parse."""
_TOLERANCE = Fraction(1, 10**9)
"""Largest relative difference if a side is a decimal; else numbers must be equal."""
_MAX_BITS, _MAX_DEPTH = 200_000, 40
"""Largest number that is evaluated (60,000 digits), and deepest nesting of brackets."""

_SYMBOLS = str.maketrans(
    {
        **{"–": "-", "−": "-", "—": "-", "⁄": "/", "×": r"\times ", "·": r"\cdot "},  # noqa: RUF001
        **{"∞": r"\infty ", "π": r"\pi ", "∪": r"\cup ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}"},  # noqa: RUF001
        **{"²": "^{2}", "³": "^{3}", "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne "},
        **{"½": r" \frac{1}{2}", "¼": r" \frac{1}{4}", "¾": r" \frac{3}{4}", "±": r"\pm "},
        **{"⅓": r" \frac{1}{3}", "⅔": r" \frac{2}{3}", "~": " ", "。": " ", "✓": " ", "、": ","},
        **{"€": "«euro»", "£": "«gbp»", "₹": "«rupee»", "¢": "«cent»", "°": r"^\circ ", "«": "<"},
        **{"≈": " ", "¥": " ", "￥": " ", "»": ">", "’": "'", "′": "'", "″": "''", '"': "''"},  # noqa: RUF001
        **{0xFF01 + n: chr(0x21 + n) for n in range(94)},  # full-width forms
    }
)
_DIMENSIONS: dict[str, dict[str, Any]] = {
    "time": {"s sec second": 1, "min minute": 60, "h hr hour": 3600, "day": 86400, "week": 604800},
    "length": {"m meter metre": 1, "mm": "1/1000", "cm centimeter centimetre": "1/100"}
    | {"km kilometer kilometre": 1000, "in inch inche": "254/10000", "ft foot feet": "3048/10000"}
    | {"yd yard": "9144/10000", "mi mile": "1609344/1000", "dm": "1/10"},
    "mass": {"g gram": 1, "mg": "1/1000", "kg kilogram": 1000, "t ton tonne": 10**6},
    "volume": {"l liter litre": 1, "ml milliliter millilitre": "1/1000"},
    "dollar": {"dollar usd buck": 1, "cent": "1/100"},
    "angle": {"deg degree": 1},
}
_UNITS = {
    name: (dimension, Fraction(size))
    for dimension, units in _DIMENSIONS.items()
    for names, size in units.items()
    for name in names.split()
}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "k": 10**3, "lakh": 10**5}
_SCALES |= {"million": 10**6, "crore": 10**7, "billion": 10**9, "trillion": 10**12}
_NUMBER_WORDS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]
_IGNORED = {
    "the",
    "a",
    "an",
    "answer",
    "is",
    "are",
    "final",
    "result",
    "approximately",
    "approx",
    "about",
    "of",
    "so",
    "or",
    "all",
}
_IGNORED |= {"therefore", "exactly", "roughly", "around", "option", "choice", "per", "equals"}
_CHANGES = {
    "not",
    "half",
    "halve",
    "halves",
    "tenth",
    "third",
    "fourth",
    "fifth",
    "hundredth",
    "squared",
    "cubed",
    "plus",
    "minus",
    "times",
    "root",
    "factorial",
    "over",
    "x",
    "no",
}
"""Words that change a number, so that it cannot stand for the one without them."""
_FUNCTIONS = {
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "arcsin",
    "arccos",
    "arctan",
    "log",
    "ln",
    "exp",
    "sqrt",
    "max",
    "lcm",
    "gcd",
    "det",
}
_FUNCTIONS |= {"lim", "pi", "mod", "frac", "infty", "binom", "sinh", "cosh", "tanh", "deg"}
_SHORT = {*_UNITS, *_SCALES, *_NUMBER_WORDS, *_IGNORED, *_CHANGES, "and", "am", "pm", "mph", "rs"}
_SHORT |= {"sq", "st", "nd", "rd", "th", "usd", "eur", "gbp", "inr", "lb", "lbs", "oz", "to", "hz"}

_RUN = re.compile(r"(?<!\\overline\{)[^\W\d_]+(?:[.'-][^\W\d_]+)*\.?")
_ALL_WORDS = re.compile(r"[^\W\d_]+(?:[\s,.'!?:()-]+[^\W\d_]+)*[.!]?")
_TEXT = re.compile(
    r"\\(text\w*|mathrm|mbox|operatorname|mathbf|mathit|mathsf|boldsymbol|bm|bold|underline|boxed"
    r"|fbox|emph|(?:text)?color\{\w+\})\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_POWER = r"(?:\^\{?-?\d\}?)?"
_LETTER_UNIT = re.compile(
    rf"(?<=[\d}}])(\s*)([NmgsJVKLWhAT]{_POWER}(?:\s*[/ ]\s*[A-Za-z]{{1,3}}{_POWER})*)"
    r"(?=\s*(?:$|[,;)\]]))"
)
_UNIT = re.compile(rf"«[^»]*»{_POWER}(?:\s*[/·]?\s*«[^»]*»{_POWER})*")
_CHOICE = re.compile(
    r"(?:option|choice|answer)?\s*(?:[(\[]\s*([A-J])\s*[)\]][.:]?|([A-J])\s*(?:[).:](?=\D|$)|$))\s*(.*)",
    re.IGNORECASE | re.DOTALL,
)


def _repeating(match: re.Match[str]) -> str:
    whole, once, again = match.groups()
    nines = 10 ** len(once + again) - 10 ** len(once)
    return rf"\frac{{{int(whole + once + again) - int(whole + once)}}}{{{nines}}}"


# Spellings of one thing, each with the one that the rules below read.
_DECORATION: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (
        re.compile(
            r"<\|[\w-]+\|>|</s>|\s*####\s*$|[*`]{1,3}(?![\d(a-z\\])|(?<![\w)])[*`]+|\\\\\s*$"
        ),
        "",
    ),
    (re.compile(r"^\s*=|\bUS(?=\$)"), ""),
    (re.compile(r"\d"), lambda m: str(int(m[0]))),  # digits of other scripts
    (re.compile(r"\\(?:left|right|displaystyle|large|Large|quad|qquad|limits)(?![A-Za-z])"), " "),
    (re.compile(r"\\color\{\w+\}(?!\{)|\\approx(?![a-z])|\\[()\[\]]|(?<!\\)\$|\n"), " "),
    (re.compile(r"(?<=\d)(?:\\[,! ]|\{,\}|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])"), lambda m: m[0].replace(",", "")),
    (re.compile(r"(?<!\\)\\[,;:! ]"), " "),
    (
        re.compile(r"^\D{0,9}\d{1,3}(?: \d{3})+(?![ \d]*\d)"),
        lambda m: re.sub(r"(?<=\d) ", "", m[0]),
    ),
    (re.compile(r"(?:US)?\\\$|\bUSD\b"), " «dollar» "),
    (re.compile(r"\bRs\.?(?=\s*\d)"), "«rupee» "),
    (re.compile(r"\\[dtc]frac(?![a-z])"), r"\\frac"),
    (re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\(?:emptyset|varnothing)(?![a-z])|\\\{\s*\\\}"), "«no» «solution»"),
    (re.compile(r"\^\s*\{?\\circ\s*\}?\s*(?:([CF])(?![a-z]))?"), lambda m: f" «deg{m[1] or ''}» "),
    (re.compile(r"(?<=\d)\s*\\mu\s*«?m\b»?"), "«μm»"),
    (re.compile(r"(?<=\d)\s*\\Omega"), "«ohm»"),
    (re.compile(r"(?<=\d)\s*h(?=\s*\d+\s*(?:min|$))"), "«h» "),
    (re.compile(r"(?<=\d)\s*''"), "«in» "),
    (re.compile(r"(?<=\d)\s*'"), "«ft» "),
    (re.compile(r"(?<=\d)\s+R\s*(?=\d)"), " «remainder» "),
    (re.compile(r"\bi\.e\..*$"), ""),
    (re.compile(r"\b0x([0-9a-fA-F]{1,99})\b"), lambda m: str(int(m[1], 16))),
    (re.compile(r"(?<=\d)[eE]([+-]?\d{1,3})(?![\w.])"), r"\\times 10^{\1}"),
    (re.compile(r"(?<=\d)\s*[xX*]\s*(?=10\s*\^)"), r"\\times "),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\^\s*(-?\d+)"), r"^{\1}"),
    (re.compile(r"(?<![\d.])(\d+)\.(\d*)\\(?:overline|bar)\{?(\d+)\}?"), _repeating),
    (re.compile(r"(?<![\d.])(\d+)\.(\d*?)(\d+?)\3{2,}(?:\.\.\.|\\[lc]?dots)"), _repeating),
    (re.compile(r"(?<![\w./}])(\d+)\s+(\d+)\s*/\s*(\d+)"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"\\sqrt\s*(?=\d)(\d+)"), r"\\sqrt{\1}"),
    (re.compile(r"\\pmod\s*(\d+)"), r"\\pmod{\1}"),
    (re.compile(r"\\geq?(?:slant)?(?![a-z])"), r"\\ge "),
    (re.compile(r"\\leq?(?:slant)?(?![a-z])"), r"\\le "),
    (re.compile(r"^\\\{\s*\w\s*(?:\\mid|:|\|)(.*)\\\}$"), r"\1"),  # {x | x > 2}
    (re.compile(r"^\w\s*\\in(?![a-z])"), ""),
    (re.compile(r",?\s*(?:\(?\w\s*\\in\s*\\(?:mathbb|mathbf)\{?\s*[ZN]\}?\)?)$"), ""),
    (re.compile(r"\\langle(?![a-z])(.*)\\rangle"), r"(\1)"),
    (re.compile(r"\\begin\{[pb]matrix\}([^&]*)\\end\{[pb]matrix\}"), r"(\1)"),
    (re.compile(r"\{bmatrix\}"), "{pmatrix}"),
]
# The same for words, once they are marked: «word».
_WORDINGS: list[tuple[re.Pattern[str], str]] = [
    (re.compile(r"(?<=»)\s+(?=\^)"), ""),
    (re.compile(r"(?i)«no»\s*«solutions?»|«empty» «set»"), "«no solution»"),
    (re.compile(r"(?i)(?:«all» )?«reals?» «numbers?»|«all» «reals?»"), r"\\mathbb{R}"),
    (re.compile(r"«(?:negative|minus)»\s*(?=[\d\\])"), "-"),
    (re.compile(r"(\d+) «out» «of» (\d+)"), r"\\frac{\1}{\2}"),
    (re.compile(r"(?<=\d)\s*\^?\s*\{?«(?:st|nd|rd|th)»\}?"), ""),
    (re.compile(r"\s*«percent»"), r"\\%"),
    (re.compile(r"«pi»"), r"\\pi "),
    (re.compile(r"«(?:square|sq)»\s*(«[^»]*»)"), r"\1^2"),
    (re.compile(r"«cubic»\s*(«[^»]*»)"), r"\1^3"),
    (re.compile(r"\s*«per»\s*"), "/"),
    (re.compile(r"(?<=»)/([A-Za-z])\b"), r"/«\1»"),
    (re.compile(r"\\frac\{\s*(«[^{}]*)\}\{\s*(«[^{}]*(?:\{-?\d\})?)\}"), r"\1/\2"),
    (re.compile(r"(?<=[^\s(])\s*\((?=[^()]*«[^»]{2,})[^()]*\)\s*$|\s*«since».*$"), ""),  # a remark
    (re.compile(r"«(\w)»(?=\s*=)"), r"\1"),
]


def _marked(text: str, loose: bool = False) -> str:
    """Return an answer in one spelling, with each word as «word»; `loose`: `5m` has a unit."""
    text = text.translate(_SYMBOLS)
    for _ in range(6):
        text, changed = _TEXT.subn(_unwrapped, text)
        if not changed:
            break
    for pattern, into in _DECORATION:
        text = pattern.sub(into, text)
    if r"\begin" not in text:
        text = text.replace(r"\\", ",")
    text = _LETTER_UNIT.sub(
        lambda m: re.sub(r"[A-Za-z]+", r"«\g<0>»", m[0]) if loose or m[1] or "/" in m[0] else m[0],
        text.lstrip(" ,;:").rstrip(" .,;:"),
    )
    if loose:
        text = re.sub(r"(?<=\d)\s*\\frac\{([A-Za-z]+)\}\{([A-Za-z]+)", r" \\frac{«\1»}{«\2»", text)
        text = re.sub(r"(?<=\d)k$", "«k»", text)
    wordy = _ALL_WORDS.fullmatch(text.strip()) is not None
    parts = re.split(r"(«[^»]*»|\\[A-Za-z]+(?:\{[a-z]?matrix\})?)", text)
    for n in range(0, len(parts), 2):
        parts[n] = _RUN.sub(lambda m: _word(m[0]) if _is_word(m[0], wordy) else m[0], parts[n])
    text = re.sub(r"»\s*«", "» «", "".join(parts))
    text = re.sub(r"«(\w+)»", _number_word, text)
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = re.sub(r"([\d.]+)\s*«deg»", r"\\frac{\1\\pi}{180}", text)
    for pattern, into in _WORDINGS:
        text = pattern.sub(into, text)
    text = re.sub(r"([\d.]+)\s*«(\w+?)s?»", _scaled, text)
    return re.sub(r"\s+", " ", text).lstrip(" ,;:").rstrip(" .,;:")


def _unwrapped(match: re.Match[str]) -> str:
    is_style = not re.match("text(?!color)|mathrm|mbox|operatorname|emph", match[1])
    if is_style or match[2] in ("e", "i", "d") or match[2] in _FUNCTIONS:
        return match[2]
    return (
        f" {_RUN.sub(lambda run: _word(run[0]), match[2].translate(str.maketrans('', '', '{}')))} "
    )


def _word(run: str) -> str:
    return f"«{run.replace('.', '')}»"


def _number_word(match: re.Match[str]) -> str:
    word = match[1].lower()
    return str(_NUMBER_WORDS.index(word)) if word in _NUMBER_WORDS else match[0]


def _is_word(run: str, wordy: bool) -> bool:
    run = run.rstrip(".")
    if (len(run) < 2 and run.isascii()) or run.lower() in _FUNCTIONS:
        return False
    has_vowel = any(letter in "aeiou" for letter in run.lower())
    is_long = len(run) > 3 or (len(run) == 3 and has_vowel)
    return is_long or run.lower() in _SHORT or not run.isascii() or (wordy and has_vowel)


def _scaled(match: re.Match[str]) -> str:
    scale = _SCALES.get(match[2] if len(match[2]) == 1 else match[2].lower())
    return match[0] if scale is None else str(_plain(Fraction(match[1].rstrip(".")) * scale))


def _plain(number: Fraction) -> str:
    return str(number.numerator) if number.denominator == 1 else f"{float(number)}"


_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_HASHES = re.compile(r"####([^\n]*)")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")


def _last(pattern: re.Pattern[str]) -> Callable[[str], str]:
    return lambda text: (pattern.findall(text) or [""])[-1]


def last_boxed(text: str) -> str:
    """Return the content of the last complete `\\boxed{...}`; empty if there is none."""
    for piece in reversed(_BOX.split(text)[1:]):
        if not piece.startswith("{"):
            unbraced = re.match(r"-?\w(?:[\w.,/]*\w)?", piece)
            if unbraced:
                return unbraced[0]
            continue
        depth = 0
        for match in re.finditer(r"\\.|[{}]", piece, re.DOTALL):  # `\{` is text, not a LaTeX brace
            depth += (match[0] == "{") - (match[0] == "}")
            if depth == 0:
                if content := piece[1 : match.start()].strip():
                    return content
                break
    return ""


_FIND: dict[str, Callable[[str], str]] = {
    "tag": _last(_TAG),
    "boxed": last_boxed,
    "gsm8k": _last(_HASHES),
    "plain": str,
}
WRITE = {"tag": "<answer>{}</answer>", "boxed": r"\boxed{{{}}}", "gsm8k": "#### {}", "plain": "{}"}
"""How a response writes its answer, by `answer_format`."""


class MathCorrectness:
    """1 if the final answer of the response is mathematically equal to the known one, else 0.

    Only the last marked answer counts, and all of it: if 5 is known, `15` and `5 or 6` are wrong.
    The table in docs/rewards.md says what is accepted.

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
        self._find, self._write = _FIND[answer_format], WRITE[answer_format]
        # Imported here because they take seconds.
        self._math_verify = importlib.import_module("math_verify")
        self._sympy = importlib.import_module("sympy")
        for part in ("parser", "grader"):
            logging.getLogger(f"math_verify.{part}").addFilter(_is_news)

    def __call__(
        self, *, prompt_text: str, response_text: str, answer: str, finish_reason: str
    ) -> float:
        """Score one response."""
        given, answer = self._find(response_text).strip(), answer.strip()
        if not given or len(given) > len(answer) + _MAX_EXTRA_CHARS or _is_slow_to_read(given):
            return 0.0
        known = _marked(answer)
        if not known:
            raise ValueError(f"answer: cannot parse {answer!r} as mathematics; allowed: a formula")
        return float(given == answer or self._is_right(known, _marked(given, _is_number(known))))

    def perfect_response(self, *, answer: str) -> str:
        """Return the known answer as a response has it.

        Args:
            answer: the known answer.
        """
        return self._write.format(answer)

    def _is_right(self, known: str, given: str) -> bool:
        known_choice, given_choice = _choice(known), _choice(given)
        if known_choice:
            letter, value = known_choice
            if given_choice:
                same = letter == given_choice[0]
                return same and (
                    not (value and given_choice[1]) or self._equal(value, given_choice[1])
                )
            return bool(value) and self._equal(value, given)
        return self._equal(known, given)

    def _equal(self, known: str, given: str) -> bool:
        """Compare two marked answers by the first rule that fits."""
        if _squeezed(known) == _squeezed(given):
            return True
        if not given or _differ_in_case(known, given):
            return False
        if letters := _choices(known):
            return letters == _choices(given)
        if _is_words(known):
            return _is_words(given) and _words(known) == _words(given)
        if any(amounts := (_amount(known), _amount(given))) and all(amounts):
            if _same_dimension(*amounts):  # pyright: ignore[reportArgumentType]
                return self._same_sum(*amounts)  # pyright: ignore[reportArgumentType]
            return False
        (kind, ours), (other, theirs) = _items(known), _items(given)
        if len(ours) > 1 or len(theirs) > 1:
            return self._same_items(kind, ours, other, theirs, known, given)
        if kind and other and kind != other and "{" not in kind + other:
            return False
        one = ours[0] if ours else known
        return self._same_item(one, theirs[0] if theirs else given) or self._is_set_or_union(
            known, given
        )

    def _same_items(
        self, kind: str, ours: list[str], other: str, theirs: list[str], known: str, given: str
    ) -> bool:
        if len(ours) != len(theirs) and (len(ours) == 1 or len(theirs) == 1):
            return self._is_set_or_union(known, given)
        if len(ours) != len(theirs) or (kind and other and kind != other):
            return False
        if len({*map(_name, ours)} - {""}) == len(ours) and not any(map(_name, theirs)):
            return all(map(self._same_item, ours, theirs))  # x=1, y=2 and (1, 2)
        if kind.strip("\\{}") or other.strip("\\{}"):
            return all(map(self._equal, ours, theirs))
        left = list(theirs)
        named = any(map(_name, ours)) and len({*map(_name, ours)}) > 1
        for item in ours:
            found = (
                n
                for n, it in enumerate(left)
                if (not named or _name(it) in ("", _name(item))) and self._equal(item, it)
            )
            if (place := next(found, None)) is None:
                return self._is_set_or_union(known, given)
            del left[place]
        return True

    def _same_item(self, known: str, given: str) -> bool:
        """Compare two single items: numbers with words in between, by number and by word."""
        if "«" not in known + given:
            return self._same_formula(known, given)
        pieces, others = _pieces(known), _pieces(given)
        maths, numbers = [_strip(p) for p in pieces], [_strip(p) for p in others]
        maths, numbers = [p for p in maths if p], [p for p in numbers if p]
        if len(maths) != len(numbers) or not maths:
            return False
        ours, theirs = _words(known), _words(given)
        if len(maths) > 1 and (not ours or not theirs) and {*ours, *theirs} - _CONNECT:
            return False
        if ({*ours} ^ {*theirs}) & _CHANGES:
            return False
        if "deg" in {*ours} ^ {*theirs} and r"\pi" in known + given:  # 90 degrees and pi/2
            maths, numbers = (
                [f"({p})*\\frac{{\\pi}}{{180}}" if "deg" in w else p for p in side]
                for side, w in ((maths, ours), (numbers, theirs))
            )
        elif ours and theirs and not _compatible(ours, theirs):
            return False
        return all(map(self._same_formula, maths, numbers))

    def _same_sum(self, ours: _Amount, theirs: _Amount) -> bool:
        total, other = (sum((size for size, _ in side), Fraction(0)) for side in (ours, theirs))
        return _close(total, other, False)

    def _same_formula(self, known: str, given: str) -> bool:
        bare = _PERCENT.sub("", known), _PERCENT.sub("", given)
        if bare == (known, given):
            return self._same(known, given)
        if all(text != whole for text, whole in zip(bare, (known, given), strict=True)):
            return self._same(*bare)
        hundredth = [
            text if text == whole else _hundredth(text)
            for text, whole in zip(bare, (known, given), strict=True)
        ]
        return self._same(*bare) or self._same(*hundredth)

    def _same(self, known: str, given: str) -> bool:
        known, given = _unbracketed(known), _unbracketed(given)
        gold, number = _number(known), _number(given)
        if gold is not None and number is not None:
            return _close(gold, number, "." in known + given)
        if gold is not None and "=" in given:  # 3+4 = 7, x = 7
            sides = [_unbracketed(side) for side in given.split("=")]
            names = [side for side in sides if _NAME.fullmatch(side)]
            values = [side for side in sides if side not in names]
            found = [v for v in map(_number, values) if v is not None]
            if not found or not all(_close(gold, v, "." in given) for v in found):
                return False
            return all(_number(v) is not None or self._same_expression(known, v) for v in values)
        if (clock := _CLOCK.fullmatch(known)) and (other := _CLOCK.fullmatch(given)):
            return [*map(int, clock.groups())] == [*map(int, other.groups())]
        if ":" in known + given and (ratio := _ratio(known)) and (other := _ratio(given)):
            pairs = [itertools.pairwise(side) for side in (ratio, other)]
            return len(ratio) == len(other) and all(
                self._same_expression(rf"({a})({d})", rf"({c})({b})")
                if not all(map(_number, (a, b, c, d)))
                else _ratio_of(a, b) == _ratio_of(c, d)
                for (a, b), (c, d) in zip(*pairs, strict=True)
            )
        if gold is not None:
            modulo = re.fullmatch(r"(.*?)\s*(?:\\p?mod|\(mod).*", given)
            return modulo is not None and self._same(known, modulo[1])  # else not computed
        if base := _BASE.fullmatch(known):
            other = _BASE.fullmatch(given)
            return base.groups() == other.groups() if other else base[1] == given
        if other := _BASE.fullmatch(given):
            return False
        names = _name(known), _name(given)
        if any(names) and "=" in known + given and self._same(*map(_value, (known, given))):
            return bool(names[0]) or "=" not in known
        return self._same_expression(known, given)

    def _same_expression(self, known: str, given: str) -> bool:
        if re.search(r"\d[\s()]+\d+(?!\s*/|\d)", given):  # math-verify would add `12 13`
            return False
        gold = self._parse(known)
        if not gold:
            raise ValueError(
                f"answer: cannot parse {known!r} as mathematics; allowed: a LaTeX formula"
            )
        try:
            return self._equals(gold, self._parse(given), known, given)
        except (ArithmeticError, RecursionError, MemoryError, TypeError, AttributeError):
            return False  # caused by the response

    def _equals(self, gold: list[Any], read: list[Any], known: str, given: str) -> bool:
        if any(map(_is_costly, [*gold, *read])):  # 9^{9^9}: compare the text
            return known == given or gold[0] in read[:1]
        ours, theirs = map(self._with_i, (gold[0], read[0] if read else None))
        if getattr(ours, "is_number", False) and _is_infinite(theirs) and not _is_infinite(ours):
            return False  # sympy may call an infinite product equal to 5
        if getattr(ours, "is_number", False) and getattr(theirs, "is_number", False):
            if _is_infinite(ours) or _is_infinite(theirs):
                return bool(ours == theirs)
            return self._same_value(ours, theirs, "." in known + given)
        ours, theirs = map(self._with_one_index, (ours, theirs))
        # math-verify's own time-out needs signals; the reward pool enforces the deadline instead.
        return self._math_verify.verify(
            ours,
            theirs if theirs is not None else [],
            timeout_seconds=None,
            allow_set_relation_comp=True,
            float_rounding=12,
        )

    def _same_value(self, ours: Any, theirs: Any, is_decimal: bool) -> bool:
        """Compare two constants: to 40 digits, or within the tolerance if a side is a decimal."""
        one, two = (self._sympy.N(side, 60) for side in (ours, theirs))
        limit = float(_TOLERANCE) if is_decimal else 1e-40
        return bool(abs(one - two) <= limit * abs(one))

    def _with_i(self, expression: Any) -> Any:
        """Read an i that is the only letter of an expression as the imaginary unit."""
        symbols = getattr(expression, "free_symbols", set())
        only_i = {symbol.name for symbol in symbols} == {"i"} and hasattr(expression, "is_number")
        return expression.subs(dict.fromkeys(symbols, self._sympy.I)) if only_i else expression

    def _with_one_index(self, expression: Any) -> Any:
        """Rename an only index k, m or n: 2k+1 and 2n+1 are one family of numbers."""
        symbols = {s for s in getattr(expression, "free_symbols", ()) if s.name in "kmn"}
        if len(symbols) != 1:
            return expression
        n = self._sympy.Symbol("n", integer=True, positive=True)
        return expression.subs(symbols.pop(), n)

    def _is_set_or_union(self, known: str, given: str) -> bool:
        if not re.search(r"<|>|\\[lg]e|\\cup|\\infty|\\setminus", known + given):
            return False
        try:
            gold, read = self._set(known), self._set(given)
            return gold is not None and read is not None and gold == read
        except (ArithmeticError, RecursionError, MemoryError, TypeError, NotImplementedError):
            return False

    def _set(self, text: str) -> Any:
        """Return the real numbers of `x<2 or x>3` or an interval; None if it is neither."""
        if re.search(r"<|>|\\[lg]e", text):
            text = re.sub(r"\\cup|«or»", ",", text)
        parts = [item for part in _split(text) for item in self._parse(part)[:1]]
        sets = []
        for part in parts:
            members = part.args if type(part).__name__ == "FiniteSet" else [part]
            for item in members:
                if _is_costly(item):
                    return None
                if isinstance(item, self._sympy.logic.boolalg.Boolean):
                    if not all(map(_is_simple, item.atoms(self._sympy.core.relational.Relational))):
                        return None  # solving others may take minutes
                    item = item.as_set()
                if not isinstance(item, self._sympy.Set):
                    return None
                sets.append(item)
        return self._sympy.Union(*sets) if sets else None

    def _parse(self, text: str) -> list[Any]:
        return self._math_verify.parse(
            f"${text.rstrip('.').strip()}$",
            extraction_config=[self._math_verify.LatexExtractionConfig()],
            parsing_timeout=None,
        )


_Amount = list[tuple[Fraction, str]]
_CONNECT = {"and", "or"}
_PERCENT = re.compile(r"\s*\\?%$")
_NAME = re.compile(
    r"\\?[A-Za-z]\w{0,9}(?:_\{?\w+\}?)?(?:\s*\(\s*[A-Za-z]\s*\))?'*|\\[a-z]+\{?\s*[A-Za-z]{1,3}\}?|\([A-Za-z](?:,\s*[A-Za-z])*\)"
)
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)")
_BASE = re.compile(r"\(?([0-9A-F]+)\)?_\{?\s*(\d+)\s*\}?")
_NUMBER = re.compile(
    r"([+-]?)\s*(?:(\d+)\s*\\frac\{\s*(\d+)\s*\}\{\s*(\d+)\s*\}"
    r"|\\frac\{\s*([+-]?\d+)\s*\}\{\s*([+-]?\d+)\s*\}|(\d+)\s*/\s*(\d+)"
    r"|(\d+\.?\d*|\.\d+)(?:\s*\\(?:times|cdot)\s*10(?:\^\{([+-]?\d+)\})?)?|(\d+)\^\{([+-]?\d+)\})"
)


def _number(text: str) -> Fraction | None:
    """Return the number that a text writes out: whole, decimal, fraction, mixed, power."""
    match = _NUMBER.fullmatch(text.strip())
    if not match or len(text) > 900:
        return None
    sign, whole, part, of, top, bottom, left, right, digits, ten, base, power = match.groups()
    exponent = int(ten or power or 0)
    if abs(exponent) * len(base or "10") > 2000 or "0" in map(_stripped_zero, (of, bottom, right)):
        return None
    if base:
        value = Fraction(int(base)) ** exponent if int(base) or exponent >= 0 else None
    elif digits:
        value = Fraction(digits.rstrip(".")) * Fraction(10) ** exponent
        if "10" in text[len(digits) + len(sign) :] and ten is None:
            return None  # 12 x 10 is not computed
    elif whole:
        value = int(whole) + Fraction(int(part), int(of))
    else:
        value = Fraction(int(top or left), int(bottom or right))
        if value.denominator == 1 and abs(int(bottom or right)) != 1:
            return None  # a division that is not carried out
    return -value if sign == "-" and value is not None else value


def _stripped_zero(text: str | None) -> str:
    return (text or "1").lstrip("0+-") or "0"


def _is_number(text: str) -> bool:
    return (
        "=" not in text
        and re.search(
            r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", re.sub(r"\\[A-Za-z]+|«[^»]*»", "", text)
        )
        is None
    )


def _close(ours: Fraction, theirs: Fraction, is_decimal: bool) -> bool:
    return abs(ours - theirs) <= (_TOLERANCE * abs(ours) if is_decimal else 0)


def _hundredth(text: str) -> str:
    number = _number(text)
    return (
        rf"\frac{{{text}}}{{100}}"
        if number is None
        else rf"\frac{{{(number / 100).numerator}}}{{{(number / 100).denominator}}}"
    )


def _choice(text: str) -> tuple[str, str] | None:
    """Return letter and value of `(C) 12`, `C. 12`, `C`; None for anything else."""
    match = _CHOICE.fullmatch(re.sub(r"[«»{}]|\\[a-z]+(?=\{\()", "", text).strip())
    if not match:
        return None
    value = re.sub(r"^[\s:.)]+", "", match[3])
    if (
        re.match(r"\s*[,&]|and\b|or\b|\s*[-+*/^=_<>\\]?\s*\(?[A-J]\)?\s*(?:,|and\b|$)", value)
        and value
    ):
        return None
    return (match[1] or match[2]).upper(), _marked(value) if value else ""


def _choices(text: str) -> list[str] | None:
    """Return the letters of `A, C`, `(A) and (C)`, `ACD`; None if it is no such list."""
    text = re.sub(r"«(?:and|or)»|[«»,;()\s]+", " ", text).strip()
    letters = list(text) if re.fullmatch("[A-J]{2,5}", text) else text.split()
    is_list = len(letters) > 1 and all(re.fullmatch("[A-J]", letter) for letter in letters)
    return letters if is_list and "".join(letters) == text else sorted(letters) if is_list else None


def _squeezed(text: str) -> str:
    return re.sub(r"(?<![\d\w])\s+|\s+(?![\d\w])", "", text)


def _differ_in_case(known: str, given: str) -> bool:
    ours, theirs = (
        {
            *re.findall(
                r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", re.sub(r"\\[A-Za-z]+|«[^»]*»", " ", t)
            )
        }
        for t in (known, given)
    )
    swapped = {letter.swapcase() for letter in ours - theirs}
    return bool(swapped & (theirs - ours))


def _is_words(text: str) -> bool:
    rest = re.sub(r"«[^»]*»", "", text)
    return "«" in text and not re.search(r"[\w\\=<>^+*/]", rest)


def _words(text: str) -> list[str]:
    """Return the words of a marked text, units by one name, without plural and idle words."""
    words = [w.lower() for found in re.findall(r"«([^»]*)»", text) for w in found.split()]
    return (
        [w for w in words if w not in _IGNORED] or words
        if _is_words(text)
        else [_singular(w) for w in words if w not in _IGNORED]
    )


def _singular(word: str) -> str:
    return (
        word if word in _UNITS or len(word) < 3 or word.endswith("ss") else word.removesuffix("s")
    )


def _compatible(ours: list[str], theirs: list[str]) -> bool:
    if any(word in _UNITS for word in [*ours, *theirs]):
        ours, theirs = ([str(_UNITS.get(word, word)) for word in side] for side in (ours, theirs))
        return sorted(ours) == sorted(theirs)
    short, long = sorted(({*ours}, {*theirs}), key=len)
    return short <= long


def _pieces(text: str) -> list[str]:
    return re.split(_UNIT, text)


def _strip(text: str) -> str:
    text = re.sub(_UNIT, " ", text)
    return text.lstrip(" ,;:").rstrip(" .,;:")


def _amount(text: str) -> _Amount | None:
    """Return sizes and dimension of `3 h 20 min`, `5 cm`; None if it is no such thing."""
    text = re.sub(r"\s*(?:,|«and»)\s*(?=[\d«])", " ", text.strip())
    text = re.sub(r"«dollar»\s*(\d+(?:\.\d+)?)", r"\1 «dollar»", text)
    found = re.findall(
        rf"(\D*?)(\d+(?:\.\d+)?|\\frac\{{\d+\}}\{{\d+\}}|\d+/\d+)\s*«(\w+)»({_POWER})\s*", text
    )
    amounts: _Amount = []
    for before, number, word, power in found:
        unit, value = _UNITS.get(_singular(word.lower())) or _UNITS.get(word), _number(number)
        if before or unit is None or value is None:
            return None
        raised = int(re.sub(r"\D", "", power) or 1)
        amounts.append((value * unit[1] ** raised, f"{unit[0]}{raised}"))
    whole = "".join(f"{b}{n}{w}{p}" for b, n, w, p in found)
    return amounts if amounts and whole == re.sub(r"[\s«»]", "", text) else None


def _same_dimension(ours: _Amount, theirs: _Amount) -> bool:
    return len({dimension for _, dimension in [*ours, *theirs]}) == 1


_PAIRS = {"(": ")", "[": "]", "{": "}"}


def _items(text: str) -> tuple[str, list[str]]:
    """Split a list, tuple or set at its top level; return its brackets and its items."""
    kind, inner = "", text.strip()
    inner = re.sub(r"^\([A-Za-z, ]+\)\s*=\s*", "", inner)
    inner = (
        re.sub(r"^([^,]*?)\\pm([^,]+)$", r"\1+\2, \1-\2", inner)
        if inner.count(r"\pm") == 1
        else inner
    )
    match = re.fullmatch(r"(\\\{|[\[({])(.*?)(\\\}|[\])}])", inner, re.DOTALL)
    if match and _is_balanced(match[2]) and len(_split(match[2])) >= 1:
        kind, inner = (match[1] + match[3]).replace("\\", ""), match[2]
        if len(_split(inner)) == 1 and kind[0] in "({":
            return _items(inner)
    items = _split(inner)
    return kind if len(items) > 1 else "", items


def _is_balanced(text: str) -> bool:
    depth = 0
    for mark in text:
        depth += (mark in "([{") - (mark in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _split(text: str) -> list[str]:
    items, depth, start = [], 0, 0
    for match in re.finditer(r"[(\[{]|[)\]}]|[,;&]|«(?:and|or)»|\\begin|\\end", text):
        if match[0] in ("(", "[", "{", r"\begin"):
            depth += 1
        elif match[0] in (")", "]", "}", r"\end"):
            depth -= 1
        elif depth == 0:
            items.append(text[start : match.start()])
            start = match.end()
    return [item.strip() for item in [*items, text[start:]] if item.strip()]


def _unbracketed(text: str) -> str:
    text = text.lstrip(" ,;:").rstrip(" .,;:")
    while (match := re.fullmatch(r"(?:\(|\{|\\\{)(.*)(?:\)|\}|\\\})", text)) and _is_balanced(
        match[1]
    ):
        if _items(text)[0]:
            break
        text = match[1].rstrip("\\").strip()
    return text


def _name(text: str) -> str:
    left, equals, _ = text.partition("=")
    return left.strip() if equals and _NAME.fullmatch(left.strip()) else ""


def _value(text: str) -> str:
    return text.partition("=")[2].strip() if _name(text) else text


def _ratio_of(top: str, bottom: str) -> Fraction:
    return (_number(top) or Fraction(0)) / (_number(bottom) or Fraction(1))


def _ratio(text: str) -> list[str] | None:
    parts = [part.strip() for part in text.split(":")]
    if len(parts) == 1 and (
        match := re.fullmatch(r"\\frac\{(.*)\}\{(.*)\}|(\d+)\s*/\s*(\d+)", text)
    ):
        parts = [part for part in match.groups() if part]
    return parts if len(parts) > 1 and all(parts) else None


def _is_news(record: logging.LogRecord) -> bool:
    # Each process would say so: our pool limits the time.
    return not record.getMessage().startswith("Timeout is disabled")


def _is_infinite(expression: Any) -> bool:
    """Whether a sympy expression contains an infinity or a division by zero."""
    parts: tuple[Any, ...] = getattr(expression, "args", ())
    is_power_of_0 = getattr(expression, "is_Pow", False) and parts[0] == 0  # 1/0 is 0**-1
    names = ("Infinity", "NegativeInfinity", "ComplexInfinity", "NaN")
    return type(expression).__name__ in names or is_power_of_0 or any(map(_is_infinite, parts))


def _is_slow_to_read(text: str) -> bool:
    """Whether a text is slow to parse: deeply nested brackets, or a huge binomial."""
    depth = 0
    for mark in re.findall(r"[\[({\])}]", text):
        depth = depth + 1 if mark in "[({" else max(0, depth - 1)
        if depth > _MAX_DEPTH:
            return True
    # These are evaluated by the parser.
    return re.search(r"(?:binom|choose|gcd|lcm).{0,40}?(?:\d{6}|[\^!]|binom)", text) is not None


def _is_simple(relation: Any) -> bool:
    """Whether a relation is linear or quadratic in its one symbol."""
    if len(relation.free_symbols) != 1:
        return False
    polynomial = (relation.lhs - relation.rhs).as_poly(*relation.free_symbols)
    return polynomial is not None and polynomial.degree() <= 2


def _is_costly(expression: Any) -> bool:
    """Whether an unevaluated sympy expression has parts that are expensive to evaluate."""
    try:
        return not _bits(expression) <= _MAX_BITS
    except RecursionError:
        return True


def _bits(expression: Any) -> float:
    """Estimate the bits of the largest intermediate number; infinity if a part is costly."""
    if getattr(expression, "is_Rational", False):
        return expression.p.bit_length() + expression.q.bit_length()
    kind = type(expression).__name__
    parts: Any = getattr(expression, "args", ())
    is_matrix = getattr(expression, "is_Matrix", False)
    if is_matrix:
        parts = list(expression) if hasattr(expression, "__iter__") else parts
    sizes = [_bits(part) for part in parts]
    largest = max(sizes, default=1.0)
    if (is_matrix and len(parts) > 36) or not largest <= _MAX_BITS:
        return math.inf
    if not sizes:
        return 1.0
    if kind in ("Pow", "MatPow"):
        base, exponent = parts
        numbers = exponent.args if getattr(exponent, "is_Mul", False) else [exponent]
        times = math.prod(  # in 3x or -n, only the numbers count
            max(abs(part.p), part.q)
            if getattr(part, "is_Rational", False)
            else _at_most(_bits(part))
            if getattr(part, "is_number", False)
            else 1.0
            for part in numbers
        )
        if times > 36 and (getattr(base, "is_Matrix", False) or getattr(base, "is_Add", False)):
            return math.inf
        return max(sizes[0], 1.0) * max(times, 1.0)
    if re.search("factorial|gamma|Factorial|fibonacci|bell|catalan", kind):
        return _at_most(largest) * math.log2(_at_most(largest) + 2)
    if kind in ("Sum", "Product"):
        terms = math.prod(
            float(abs(ends[1] - ends[0]))
            if all(getattr(e, "is_Rational", False) for e in ends)
            else math.inf
            if all(getattr(e, "is_finite", False) and e.is_number for e in ends)
            else 1.0
            for _, *ends in expression.limits
            if len(ends) == 2
        )
        return math.inf if terms > 2000 else sizes[0] * max(terms, 1.0)
    if getattr(expression, "is_Function", False) and largest > 4000:
        return math.inf
    return sum(sizes)


def _at_most(bits: float) -> float:
    return 2.0**bits if bits < 64 else math.inf
