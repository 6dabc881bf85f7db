"""Normalizes an answer's text: one spelling for symbols, words and units, and exact numbers."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

_SYMBOLS = str.maketrans(
    {
        **{"–": "-", "−": "-", "—": "-", "⁄": "/", "×": r"\times ", "·": r"\cdot "},  # noqa: RUF001
        **{"∞": r"\infty ", "π": r"\pi ", "∪": r"\cup ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}"},  # noqa: RUF001
        **{"²": "^{2}", "³": "^{3}", "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne "},
        **{"½": r" \frac{1}{2}", "¼": r" \frac{1}{4}", "¾": r" \frac{3}{4}", "±": r"\pm "},
        **{"⅓": r" \frac{1}{3}", "⅔": r" \frac{2}{3}", "~": " ", "。": " ", "✓": " ", "、": ","},
        **{"€": "«euro»", "£": "«gbp»", "₹": "«rupee»", "¢": "«cent»", "°": r"^\circ ", "«": "<"},
        **{"≈": " ", "¥": "«yen»", "￥": "«yen»", "₩": "«won»", "»": ">", "’": "'", "′": "'"},  # noqa: RUF001
        **{"″": "''", '"': "''", "÷": "/"},
        **{0xFF01 + n: chr(0x21 + n) for n in range(94)},  # full-width forms
    }
)
_DIMENSIONS = {
    "time": "s sec second=1 min minute=60 h hr hour=3600 day=86400 week=604800",
    "calendar": "month=1 yr year=12",
    "length": "m meter metre=1 mm=1/1000 cm centimeter centimetre=1/100 dm=1/10 km kilometer "
    "kilometre=1000 in inch inche=254/10000 ft foot feet=3048/10000 yd yard=9144/10000 "
    "mi mile=1609344/1000",
    "mass": "g gram=1 mg=1/1000 kg kilogram=1000 t ton tonne=1000000 lb pound=45359237/100000 "
    "oz ounce=45359237/1600000",
    "volume": "l L liter litre=1 ml milliliter millilitre=1/1000",
    "dollar": "dollar usd buck=1 cent=1/100",
    "euro": "euro eur=1",
    "rupee": "rupee rs inr=1",
    "yen": "yen yuan 元=1",
    **{name: f"{name}=1" for name in ("gbp", "won", "percent")},
    "angle": "deg degree=1",
}
_UNITS = {
    name: (dimension, Fraction(size))
    for dimension, units in _DIMENSIONS.items()
    for names, size in re.findall(r"([^\d=]+)=([\d/]+)", units)
    for name in names.split()
}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "k": 10**3, "lakh": 10**5}
_SCALES |= {"million": 10**6, "crore": 10**7, "billion": 10**9, "trillion": 10**12}
_COUNTS, _IGNORED, _CHANGES, _FUNCTIONS, _ABBREVIATIONS = (
    re.findall(r"\w+", names)
    for names in (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
        "fifteen sixteen seventeen eighteen nineteen twenty",
        "and the a an answer is are final result approximately approx about of so or all therefore "
        "exactly roughly around option choice equals",
        # These change a number, so that it cannot stand for the one without them:
        "not half halve halves tenth third fourth fifth hundredth squared cubed plus minus times "
        "root factorial over x no than",
        "sin cos tan cot sec csc arcsin arccos arctan log ln exp sqrt max lcm gcd det lim pi mod "
        "frac infty binom sinh cosh tanh deg",
        "am pm mph kph sq st nd rd th lbs to hz per",
    )
)
_SHORT = {*_UNITS, *_SCALES, *_COUNTS, *_IGNORED, *_CHANGES, *_ABBREVIATIONS}

_RUN = re.compile(r"(?<!\\overline\{)[^\W\d_]+(?:-[^\W\d_]{4,}|['.][^\W\d_]+)*\.?")
_ALL_WORDS = re.compile(r"[^\W\d_]+(?:[\s,.'!?:()-]+[^\W\d_]+)*[.!]?")
_TEXT = re.compile(
    r"\\(text(?!color)\w*|mathrm|mbox|operatorname|mathbf|mathit|mathsf|boldsymbol|bm|bold|underline|boxed"
    r"|fbox|emph|(?:text)?color\{\w+\})\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_POWER = r"(?:\^\{?-?\d\}?)?"
_LETTER_UNIT = re.compile(
    rf"(?<=[\d}}])(\s*)([NmgsJVKLWhATCFHB]{_POWER}(?:\s*[/ ]\s*[A-Za-z]{{1,3}}{_POWER})*)"
    r"(?=\s*(?:$|[,;)\]]))"
)
_UNIT = re.compile(rf"(«[^»]*»{_POWER}(?:\s*[/·]?\s*«[^»]*»{_POWER})*)")
_Rules = list[tuple[str, str | Callable[[re.Match[str]], str]]]


def _repeating(match: re.Match[str]) -> str:
    whole, once, again = match.groups()
    nines = 10 ** len(once + again) - 10 ** len(once)
    return rf"\frac{{{int(whole + once + again) - int(whole + once)}}}{{{nines}}}"


def _letters(match: re.Match[str]) -> str:
    letters = re.findall("[A-J]", match[0])
    return ", ".join(letters) if letters == sorted({*letters}) else match[0]


# Patterns of variant spellings, each with the one spelling that the rules below expect.
_SPELLINGS: _Rules = [
    (r"\\([lg])t(?![A-Za-z])", lambda m: "<" if m[1] == "l" else ">"),
    (  # between relations
        r"\\(?:(lor|vee)|land|wedge)(?![A-Za-z])(?=.*(?:[<>=]|\\[lgn]e))",
        lambda m: " «or» " if m[1] else " «and» ",
    ),
    (  # equations only, so these are no cases of a function
        r"\\begin\{cases\}((?:[^&<>]|&(?=\s*=))*?)\\end\{cases\}",
        lambda m: m[1].replace(r"\\", ",").replace("&", " "),
    ),
    (r"<\|[\w-]+\|>|</s>|\s*####\s*$|[*`]{1,3}(?![\d(a-z\\*])|(?<![\w)*])[*`]+|\\\\\s*$", ""),
    (r"^\s*=|\bUS(?=\$)", ""),
    (r"\\(?:left|right|displaystyle|large|Large|quad|qquad|limits)(?![A-Za-z])", " "),
    (r"\\color\{\w+\}(?!\{)|\\approx(?![a-z])|\\[()\[\]]|(?<!\\)\$|\n", " "),
    (r"(?<=\d)(?:,|\{,\})\\!\s*(?=\d{3}(?!\d))", ","),  # 70,\!000 in MATH
    (r"(?<=\d)(?:\\[,! ]|\{,\}|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))", ""),
    (
        # not in the point (3,121), but in (1,000)
        r"((?:[(\[]|\\\{|\\langle)[\s-]*)?(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])",
        lambda m: m[0] if m[1] and ",0" not in m[0] else m[0].replace(",", ""),
    ),
    (r"(?<!\\)\\[,;:! ]", " "),
    (r"^\D{0,9}\d{1,3}(?: \d{3})+(?![ \d]*\d)", lambda m: re.sub(r"(?<=\d) ", "", m[0])),
    (r"(?:US)?\\\$|\bUSD\b", " «dollar» "),
    (r"\\?%", " «percent» "),
    (r"\\[dtc]frac(?![a-z])", r"\\frac"),
    (r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}"),
    (r"\\(?:emptyset|varnothing)(?![a-z])|\\\{\s*\\\}", "«no» «solution»"),
    (r"\^\s*\{?\\circ\s*\}?\s*(?:([CF])(?![a-z]))?", lambda m: f" «deg{m[1] or ''}» "),
    (r"(?<=\d)\s*\\(mu|Omega)(?:\s*«?m\b»?)?", r" «\1» "),
    (r"(?<=\d)\s*h(?=\s*\d+\s*(?:min|$))", "«h» "),
    (r"(?<=\d)\s*''", "«in» "),
    (r"(?<=\d)\s*'", "«ft» "),
    (r"(?<=\d)\s+«?R»?\s*(?=\d)", " «remainder» "),
    (r"\b0x([0-9a-fA-F]{1,99})\b", lambda m: str(int(m[1], 16))),
    (r"(?<=\d)[eE]([+-]?\d{1,3})(?![\w.])", r"\\times 10^{\1}"),
    (r"(?<=\d)\s*[xX*]\s*(?=10\s*\^)", r"\\times "),
    (r"\*\*", "^"),
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
    (r"\^\s*(-?\d+)", r"^{\1}"),
    (r"(?<![\d.])(\d+)\.(\d*)\\(?:overline|bar)\{?(\d+)\}?", _repeating),
    (r"(?<![\d.])(\d+)\.(\d*?)(\d+?)\3{2,}(?:\.\.\.|\\[lc]?dots)", _repeating),
    (r"(?<![\w./})^])(?:(\d+)\s+)?(\d+)\s*/\s*(\d+)(?![\d._^])", r"\1\\frac{\2}{\3}"),
    (r"\\sqrt\s*(?=\d)(\d+)", r"\\sqrt{\1}"),
    (r"\(?\\?\b(?:p?mod|bmod)\s*\{?(\w+)\}?\)?", r" «mod\1» "),
    (r"\\equiv", " «congruent» "),
    (r"\(?(?<!\w)(\d[0-9A-F]*)\)?_\{?\s*(\d+)\s*\}?", r"\1 «base\2» "),
    (r"^(?:[A-J ]|\([A-J]\)){2,9}$", _letters),
    (r"^\\\{\s*\w\s*(?:\\mid|:|\|)(.*)\\\}$", r"\1"),  # {x | x > 2}
    (r"^\w\s*\\in(?![a-z])", ""),
    (r",?\s*(?:\(?\w\s*\\in\s*\\(?:mathbb|mathbf)\{?\s*[ZN]\}?\)?)$", ""),
    (r"\\langle(?![a-z])(.*)\\rangle", r"(\1)"),
    (r"\\begin\{[pb]matrix\}([^&]*|(?:(?!\\\\).)*)\\end\{[pb]matrix\}", r"(\1)"),
    (r"\\\\(?!.*\\end)", ","),
]
# The same for words, which `read` has marked as «word».
_WORDINGS: _Rules = [
    (r"(\\(?:sin|cos|tan|cot|sec|csc)[^«]*?)([\d.]+)\s*«deg»", r"\1\\frac{\2\\pi}{180}"),
    (r"(?<=»)\s+(?=\^)", ""),
    (r"(?i)«no»\s*«solutions?»|«empty» «set»|^«none»$", "«no solution»"),
    (r"(?i)(?:«all» )?«reals?» «numbers?»|«all» «reals?»", r"\\mathbb{R}"),
    (r"«(?:negative|minus)»\s*(?=[\d\\])", "-"),
    (r"(\d+) «out» «of» (\d+)", r"\\frac{\1}{\2}"),
    (r"(?<=\d)\s*\^?\s*\{?\s*«(?:st|nd|rd|th)»\s*\}?", ""),
    (r"«(sq|square|cubic)»\s*(«[^»]*»)", lambda m: f"{m[2]}^{3 if m[1] == 'cubic' else 2}"),
    (r"«mph»", "«mile»/«hour»"),
    (r"«kph»", "«km»/«hour»"),
    (r"\s*«per»\s*", "/"),
    (r"(?<=»)/([A-Za-z])\b", r"/«\1»"),
    (r"\\frac\{\s*(«[^{}]*)\}\{\s*(«[^{}]*(?:\{-?\d\})?)\}", r"\1/\2"),
    (r"(?<=[^\s(])\s*\((?=[^()]*«[^»]{2,})(?![^()]*«or»)[^()]*\)\s*$|\s*«since».*$", ""),
    (r"(«(?:dollar|euro|gbp|rupee|rs|yen|won)»)\s*(-?\d+(?:\.\d+)?)", r"\2 \1"),
]
_COMPILED = [
    [(re.compile(pattern), into) for pattern, into in rules] for rules in (_SPELLINGS, _WORDINGS)
]


def read(text: str, loose: bool = False) -> str:
    """Normalize an answer and mark each word as «word»; `loose` reads `5m` as 5 metres, not 5*m."""
    text = text.translate(_SYMBOLS)
    while _TEXT.search(text):
        text = _TEXT.sub(_unwrapped, text)
    for pattern, into in _COMPILED[0]:
        text = pattern.sub(into, text)
    text = _LETTER_UNIT.sub(
        lambda m: re.sub(r"[A-Za-z]+", r"«\g<0>»", m[0]) if loose or m[1] or "/" in m[0] else m[0],
        bare(text),
    )
    if loose:
        text = re.sub(r"(?<=\d)\s*\\frac\{([A-Za-z]+)\}\{([A-Za-z]+)", r" \\frac{«\1»}{«\2»", text)
        text = re.sub(r"(?<=\d)k$", "«k»", text)
    wordy = _ALL_WORDS.fullmatch(text.strip()) is not None
    parts = re.split(r"(«[^»]*»|\\[A-Za-z]+(?:\{[a-z]?matrix\})?)", text)
    for n in range(0, len(parts), 2):
        parts[n] = _RUN.sub(lambda m: _word(m) if _is_word(m[0], wordy) else m[0], parts[n])
    text = re.sub(r"»\s*«", "» «", "".join(parts))
    text = re.sub(rf"(?i)«({'|'.join(_COUNTS)})»", lambda m: str(_COUNTS.index(m[1].lower())), text)
    for pattern, into in _COMPILED[1]:
        text = pattern.sub(into, text)
    return bare(re.sub(r"\s+", " ", text))


def bare(text: str) -> str:
    """Return a text without the blanks and punctuation around it."""
    return text.lstrip(" ,;:").rstrip(" .,;:")


def _unwrapped(match: re.Match[str]) -> str:
    is_style = not re.match("text|mathrm|mbox|operatorname|emph", match[1])
    is_choice = re.fullmatch(r"[\W_]*[A-J](?:[^\w{}]+[A-J])*[\W_]*", match[2])
    is_unit = match.string[: match.start()].rstrip()[-1:].isdigit()
    if is_style or (is_choice and not is_unit) or match[2] in ("e", "i", "d", *_FUNCTIONS):
        return match[2]
    return f" {_RUN.sub(_word, re.sub('[{}]', '', match[2]))} "


def _word(match: re.Match[str]) -> str:
    return f"«{match[0].replace('.', '')}»"


def _is_word(run: str, wordy: bool) -> bool:
    run, is_ascii = run.rstrip(".").lower(), run.isascii()
    if (len(run) < 2 and is_ascii) or not {*run.split("-")}.isdisjoint(_FUNCTIONS):
        return False
    has_vowel = not {*"aeiou"}.isdisjoint(run)
    return len(run) > 3 or run in _SHORT or not is_ascii or (has_vowel and (wordy or len(run) == 3))


def words(text: str) -> list[str]:
    """Return a text's words, without fillers such as `the`; [] if it has any mathematics."""
    if re.search(r"[\w\\=<>^+*/]", re.sub(r"«[^»]*»", "", text)):
        return []
    found = [word for run in re.findall(r"«([^»]*)»", text) for word in run.lower().split()]
    return [word for word in found if word not in _IGNORED] or found


_NUMBER = re.compile(
    r"([+-]?)\s*(?:(\d*)\s*\\frac\{\s*([+-]?\d+)\s*\}\{\s*([+-]?\d+)\s*\}"
    r"|(\d+\.?\d*|\.\d+)(\s*\\(?:times|cdot)\s*10(?=\^))?(?:\^\{([+-]?\d{1,4})\})?)"
)


def number(text: str) -> Fraction | None:
    """Parse a whole number, decimal, fraction, mixed number or power; None for any other text."""
    match = _NUMBER.fullmatch(text.strip())
    if not match or len(text) > 900:
        return None
    sign, whole, top, bottom, digits, ten, power = match.groups()
    exponent = int(power or 1)
    try:
        if top:
            value = Fraction(int(top), int(bottom))
            if value.denominator == 1 and abs(int(bottom)) != 1:
                return None  # a division that is not carried out
            value += int(whole or 0)
        elif len("10" if ten else digits) * abs(exponent) > 2000:
            return None
        else:
            value = Fraction("10" if ten else digits.rstrip(".")) ** exponent
            value *= Fraction(digits.rstrip(".")) if ten else 1
    except ZeroDivisionError:
        return None
    return -value if sign == "-" else value


def times(text: str, factor: Fraction) -> str:
    """Multiply a formula by a number; compute the product if the formula is a plain number."""
    if factor == 1:
        return text
    value = number(text)
    product = factor if value is None else value * factor
    fraction = rf"\frac{{{product.numerator}}}{{{product.denominator}}}"
    return fraction if value is not None else f"({text})*{fraction}"


class Quantity(NamedTuple):
    """A formula with its unit and any further words.

    The unit is `factor` times the base units of `dimensions`. `plain` is `value` as a number
    without a unit: 0.5 for 50%.
    """

    value: str
    plain: str
    factor: Fraction
    dimensions: frozenset[tuple[str, int]]
    words: frozenset[str]

    def may_equal(self, given: Quantity) -> bool:
        """Whether units and words of two answers agree; one answer may lack some of them."""
        if not (self.words ^ given.words).isdisjoint(_CHANGES):
            return False
        if any(re.match(r"base(?!10\b)", word) for word in given.words - self.words):
            return False
        if self.dimensions and given.dimensions and self.dimensions != given.dimensions:
            return False
        names = [side.words | {name for name, _ in side.dimensions} for side in (self, given)]
        return names[0] <= names[1] or names[1] <= names[0]


def quantities(text: str) -> list[Quantity]:
    """Split an answer into formulas; the words after each (or before the first) are its unit."""
    pieces = [*_UNIT.split(text), ""]
    found, lead = [], ""
    for formula, unit in zip(pieces[::2], pieces[1::2], strict=True):
        if bare(formula):
            found.append(_quantity(bare(formula), f"{lead} {unit}"))
            lead = ""
        else:
            lead += unit
    sizes = [q.factor for q in found]
    amounts = [v * q.factor for q in found if (v := number(q.value)) is not None]
    is_one_kind = len({q.dimensions for q in found}) == 1 < len(amounts) == len(found)
    if is_one_kind and found[0].dimensions and all(a > b for a, b in itertools.pairwise(sizes)):
        value = times("1", sum(amounts, Fraction(0)) / sizes[0])
        return [found[0]._replace(value=value, plain=value)]  # 3 h 20 min
    return found


def _quantity(formula: str, text: str) -> Quantity:
    factor, scale = Fraction(1), Fraction(1)
    dimensions: Counter[str] = Counter()
    others: set[str] = set()
    for slash, word, power in re.findall(r"(/?)\s*«([^»]*)»(?:\^\{?(-?\d))?", text):
        low = word.lower() if len(word) > 1 else word
        stem = low if len(low) < 3 or low.endswith("ss") else low.removesuffix("s")
        if unit := _UNITS.get(word) or _UNITS.get(low) or _UNITS.get(stem):
            exponent = int(power or 1) * (-1 if slash else 1)
            factor *= unit[1] ** exponent
            dimensions[unit[0]] += exponent
        elif low in _SCALES or stem in _SCALES:
            scale *= _SCALES.get(low) or _SCALES[stem]
        elif low not in _IGNORED:
            others.add(stem)
    plain = value = times(formula, scale)
    if [*dimensions] == ["percent"]:
        plain = times(value, Fraction(1, 100))
    elif [*dimensions] == ["angle"]:
        plain = rf"\frac{{({value})\pi}}{{180}}"
    return Quantity(value, plain, factor, frozenset(dimensions.items()), frozenset(others))
