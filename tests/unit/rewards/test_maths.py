"""Which responses earn a reward."""

import importlib
import logging
from pathlib import Path

import math_verify
import pytest

from grpo_components.rewards.formats import BoxedFormat, ResponseLength, ThinkAnswerFormat
from grpo_components.rewards.maths import MathCorrectness

MARKED = {
    "tag": "It is clear. <answer>{}</answer>",
    "boxed": r"So it is $\boxed{{{}}}$, as claimed.",
    "gsm8k": "First this, then that.\n#### {}",
    "plain": "{}",
}


# Evaluating any of these would take minutes, or all memory.
HUGE = ["99999999!", "((9!)!)!", "9^{9^9}", "10**10**10", r"(\frac{1}{3})^{999999999}"]
HUGE += ["3^{-999999999}", r"\sqrt{9^{9^9}}", r"\{1, 9^{9^9}\}", "(x+y+z+1)^{500}"]
HUGE += [
    r"\sum_{i=1}^{9999}\sum_{j=1}^{9999} ij",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{99999999}",
]
HUGE += [
    r"{10^9 \choose 5^8}",
    r"\gcd(9^{99999999}, 3)",
    r"\sqrt{" * 100 + "5" + "}" * 100,
    "[(" * 400,
]
HUGE += [r"\binom{1000000000}{500000000}", r"\prod_{k=1}^{100000000} k", r"\sin(10^{9999999})"]


REWARDS = {answer_format: MathCorrectness(answer_format) for answer_format in MARKED}


def correct(response: str, known: str, answer_format: str) -> float:
    reward = REWARDS[answer_format]
    return reward(prompt_text="", response_text=response, answer=known, finish_reason="stop")


def marked(answer_format: str, given: str, known: str) -> float:
    """Score an answer inside a response of one format."""
    return correct(MARKED[answer_format].format(given), known, answer_format)


def in_formats(cases: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """All cases in the formats that depend on braces or on nothing, and some in the others."""
    chosen = {"boxed": cases, "plain": cases, "tag": cases[::5], "gsm8k": cases[2::5]}
    return [(answer_format, *case) for answer_format, some in chosen.items() for case in some]


EQUAL = [
    ("5", "5"),
    (" 5 ", "5"),
    ("5.", "5"),
    ("5.0", "5"),
    ("0.5", "1/2"),
    ("1/2", "0.5"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac12", "1/2"),
    (r"2\frac{1}{2}", "2.5"),
    ("1,000", "1000"),
    ("1,234,567", "1234567"),
    ("$18", "18"),
    ("$18.00", "18"),
    ("-3", "-3"),
    (r"-\frac{1}{2}", "-0.5"),
    ("x = 7", "7"),
    ("3+4=7", "7"),
    ("2^{10}", "1024"),
    (r"3\times10^2", "300"),
    ("50%", "50"),
    (r"\sqrt{2}", r"\sqrt{2}"),
    (r"2+\sqrt{3}", r"\sqrt{3}+2"),
    (r"\frac{1+\sqrt{\frac{5}{1}}}{2}", r"\frac{\sqrt{5}+1}{2}"),
    ("x+1", "1+x"),
    ("5 cm", "5"),
    (r"5\,\text{cm}", "5"),
    (r"5 \mathrm{~cm}", "5"),
    (r"5 \text{ m}^2", "5"),
    ("5 m^2", "5"),
    ("5 km/h", "5"),
    ("5 square units", "5"),
    ("18 apples", "18"),
    ("18 apples", "18 apples"),
    ("18", "18 apples"),
    ("1,000 dollars", "1000"),
    ("€5", "5"),
    (r"90^\circ", "90"),
    ("90°", "90"),
    (r"\frac{1}{2} cup", "0.5"),
    (r"50\%", "0.5"),
    (r"1{,}000", "1000"),
    (r"1\,000\,000", "1000000"),
    ("1\u202f000", "1000"),
    ("12,345.67", "12345.67"),
    (r"\dfrac{3}{4}", "0.75"),
    (r"\frac{-3}{4}", "-0.75"),
    (r"\{1, 2\}", r"\{2, 1\}"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("2 1/2", "2.5"),
    ("-2 1/2", "-2.5"),
    ("7/2", "3 1/2"),
    ("2½", "2.5"),
    (r"\frac 2 3", "2/3"),
    ("1 000 000", "1000000"),
    ("12 345 apples", "12345"),
    ("1.5e-3", "0.0015"),
    ("6.02E23", r"6.02\times 10^{23}"),
    ("3 x 10^2", "300"),
    ("1.2 × 10^-3", "0.0012"),  # noqa: RUF001
    ("10^20", "100000000000000000000"),
    (r"0.\overline{3}", "1/3"),
    ("3/7", r"0.\overline{428571}"),
    (r"-1.2\overline{3}", "-37/30"),
    ("–5", "-5"),  # noqa: RUF001
    ("= 5", "5"),
    ("5,", "5"),
    ("`5`", "5"),
    (r"\[ 5 \]", "5"),
    (r"\text{5}", "5"),
    ("USD 5", "5"),
    ("US$5", "5"),
    ("5", r"US\$5"),
    ("5 €", "5"),
    ("5~\\text{cm}", "5"),
    ("5 L", "5"),
    ("60 miles per hour", "60"),
    ("5 months", "5"),
    (r"20^\circ C", "20"),
    (r"20^{\circ}\text{C}", "20"),
    ("12.5%", "12.5"),
    ("0.125", "12.5%"),
    ("12.5", r"12.5\%"),
    ("50 percent", "0.5"),
    ("3√2", r"3\sqrt{2}"),
    ("√12", r"2\sqrt{3}"),
    ("x²", "x^2"),
    ("(-∞, 2)", r"(-\infty, 2)"),
    (r"\varnothing", r"\emptyset"),
    ("even", r"\text{even}"),
    (r"\text{Even}", r"\text{even}"),
    ("(C)", r"\text{(C)}"),
    ("C", r"\text{(C)}"),
    ("No real solutions.", r"\text{no real solutions}"),
]


@pytest.mark.parametrize(("answer_format", "given", "known"), in_formats(EQUAL))
def test_an_equal_answer_is_worth_one(answer_format, given, known):
    assert marked(answer_format, given, known) == 1.0


UNEQUAL = [
    ("15", "5"),
    ("5", "15"),
    ("50", "5"),
    ("5.5", "5"),
    ("-3", "3"),
    ("3", "-3"),
    ("1/3", "0.5"),
    ("1,000", "1"),
    ("1000", "100"),
    ("", "0"),
    ("none", "0"),
    ("5 or 6", "5"),
    ("5 or 6", "6"),
    ("5, 6", "6"),
    ("5 6", "11"),
    ("12 13", "25"),
    ("(3)(4)", "7"),
    ("3+4", "7"),
    ("2*5", "10"),
    ("48/2+48", "72"),
    ("x = 3+4", "7"),
    (r"\sqrt{2}", "2"),
    ("2x", "2"),
    ("x+1", "1"),
    ("???", "5"),
    (r"\frac{", "5"),
    ("{{{{", "5"),
    ("6 cm", "5"),
    ("3 hours 20 minutes", "3"),
    ("5 cm and 6 cm", "5"),
    ("3 + 4 cm", "7"),
    ("5 6 cm", "5"),
    ("5 million", "5"),
    ("5 dozen eggs", "5"),
    ("5 pi", "5"),
    ("5 x", "5"),
    (r"1\,000", "1"),
    (r"1\,00", "100"),
    (r"5\pi", "5"),
    ("(2, 1)", "(1, 2)"),
    ("[0, 1]", "[0, 1)"),
    (r"-\infty", r"\infty"),
    ("2 1/2", "1"),
    ("2 1/2", "2"),
    ("5e2", "5"),
    ("1 000 5", "1000"),
    ("100 200", "200"),
    ("5 tenths", "5"),
    ("5 millions", "5"),
    ("5 dozens", "5"),
    ("5 squared", "5"),
    ("0.5%", "50"),
    (r"0.\overline{3}", "0.3"),
    ("5^2", "52"),
    ("on", r"\text{no}"),
    ("nylevE", r"\text{Evelyn}"),
    (r"\text{odd}", r"\text{even}"),
    (r"\sum_{k=1}^{1000000000} k^k", "5"),
    ("(x+y+z+1)^{500}", "5"),
    ("x + 5 - x", "5"),
    ("many words " * 500, "5"),
    ("(" * 3000 + "5" + ")" * 3000, "5"),
    ("(" * 400 + "5" + ")" * 400, "5"),
    *((huge, "5") for huge in HUGE),
    *((huge, "x+1") for huge in HUGE),
    ("x^{17}-3x+1<0", "(0,1)"),
    *((huge, "9^{9^{9^9}}") for huge in HUGE),
]


@pytest.mark.parametrize(("answer_format", "given", "known"), in_formats(UNEQUAL))
def test_a_wrong_answer_is_worth_nothing(answer_format, given, known):
    assert marked(answer_format, given, known) == 0.0


@pytest.mark.parametrize("known", [r"9^{9^9}", r"2^{99999999} - 1", "(10^9)!"])
def test_a_known_answer_that_is_too_large_to_evaluate_is_compared_as_text(known):
    for answer_format in MARKED:
        assert marked(answer_format, known, known) == 1.0
        assert marked(answer_format, known.replace("{9^9}", "{ 9^{9} }"), known) == 1.0
        assert marked(answer_format, "5", known) == 0.0
        assert marked(answer_format, f"{known} + 1", known) == 0.0


def judged(reward, response: str, answer: str = "") -> float:
    return reward(prompt_text="", response_text=response, answer=answer, finish_reason="stop")


LONG = ["~", "`", "<answer>", "</answer>", "<think>", r"\boxed{", r"\boxed ", "{", "#### 5 ", "\n"]
LONG += [
    " ",
    "1 ",
    "1,",
    "(",
    "<tool_call>",
    "```python\n",
    "~~~\n",
    "a ",
    "=",
    "\\",
    "####",
    "1 1/",
]


@pytest.mark.parametrize("piece", LONG)
@pytest.mark.parametrize(
    "reward",
    [
        *REWARDS.values(),
        *(ThinkAnswerFormat(), BoxedFormat(), ResponseLength(10**6)),
    ],
    ids=lambda reward: type(reward).__name__,
)
def test_a_long_response_is_read_in_linear_time(reward, piece):
    """A quadratic search would take minutes."""
    response = (piece * 40_000)[:200_000]
    for end in ("", "`", "</answer>", "x"):
        assert 0.0 <= judged(reward, f"{response}{end}", answer="5") <= 1.0


@pytest.mark.parametrize(
    ("answer_format", "response"),
    [
        ("tag", "5"),
        ("tag", "<answer>5"),
        ("tag", "5</answer>"),
        ("tag", "#### 5"),
        ("boxed", "5"),
        ("boxed", r"\boxed{5"),
        ("gsm8k", "5"),
        ("gsm8k", "### 5"),
        ("gsm8k", "####\n5"),
    ],
)
def test_the_right_number_without_its_mark_is_worth_nothing(answer_format, response):
    assert correct(response, "5", answer_format) == 0.0


@pytest.mark.parametrize("answer_format", MARKED)
def test_no_response_is_worth_nothing(answer_format):
    assert correct("", "5", answer_format) == 0.0


@pytest.mark.parametrize("answer_format", ["tag", "boxed", "gsm8k"])
def test_of_several_answers_the_last_one_counts(answer_format):
    wrong, right = (MARKED[answer_format].format(number) for number in (4, 5))
    assert correct(f"{wrong}\n{right}", "5", answer_format) == 1.0
    assert correct(f"{right}\n{wrong}", "5", answer_format) == 0.0


def test_a_truncated_answer_does_not_replace_the_one_before_it():
    assert correct("<answer>5</answer> or rather <answer>6", "5", "tag") == 1.0
    assert correct(r"\boxed{5} or rather \boxed{6", "5", "boxed") == 1.0


def test_a_box_ends_at_its_own_brace():
    deep = r"\boxed{\frac{\sqrt{\frac{1}{4}}}{1}} and {more}"
    assert correct(deep, r"\sqrt{\frac{1}{4}}", "boxed") == 1.0


@pytest.mark.parametrize("known", ["5", r"2\sqrt{3}", r"\pi", "1/2"])
def test_nothing_infinite_is_a_number(monkeypatch, known):
    # sympy sometimes finds that an infinite product equals 5, depending on the hash seed.
    monkeypatch.setattr(math_verify, "verify", lambda *args, **kwargs: True)
    for given in (r"\pi\infty", r"\sqrt{2}\infty", r"\infty", r"\frac{1}{0}", r"\frac{\pi}{0}"):
        assert correct(given, known, "plain") == 0.0


def test_infinities_are_compared_with_each_other():
    assert correct(r"(-\infty, \infty)", r"(-\infty,\infty) ", "plain") == 1.0
    assert correct(r"- \infty", r"-\infty", "plain") == 1.0


def test_an_escaped_brace_does_not_end_a_box():
    half = r"\left\{ x^2 \right."
    assert correct(rf"\boxed{{{half}}}", half, "boxed") == 1.0
    assert correct(r"\boxed{\{1, 2\}} and {more}", r"\{2, 1\}", "boxed") == 1.0


def test_one_of_two_formulas_is_not_the_answer():
    for two in ("$5$ $6$", "$5$ or $6$", "$5$\n$6$", "5\n6"):
        assert correct(f"<answer>{two}</answer>", "6", "tag") == 0.0
        assert correct(f"<answer>{two}</answer>", "5", "tag") == 0.0
    assert correct("<answer>$x=1$ and $x=2$</answer>", "1, 2", "tag") == 1.0
    for one in ("$6$", "$$6$$", "\n$ 6 $\n", r"\$6", r"$\$6$", "$x=6$"):
        assert correct(f"<answer>{one}</answer>", "6", "tag") == 1.0


def test_markdown_around_an_answer_is_ignored():
    assert correct("**#### 5**", "5", "gsm8k") == 1.0
    assert correct("#### **1,000**", "1000", "gsm8k") == 1.0


def test_a_known_answer_that_cannot_be_parsed_is_an_error():
    with pytest.raises(ValueError, match=r"^answer: "):
        correct("#### 5", "", "gsm8k")


def test_an_unknown_answer_format_is_named_with_the_allowed_ones():
    with pytest.raises(ValueError, match=r"^answer_format: 'hash'.*tag, boxed, gsm8k, plain"):
        MathCorrectness(answer_format="hash")
    with pytest.raises(ValueError, match=r"^answer_format: "):
        MathCorrectness(answer_format=["tag"])  # pyright: ignore[reportArgumentType]


def test_the_library_does_not_say_that_its_own_time_limit_is_off(caplog, monkeypatch):
    """Each process would: the pool of rewards limits the time."""
    for part in ("parser", "grader"):
        library = importlib.import_module(f"math_verify.{part}")
        monkeypatch.setattr(library, "TIMEOUT_WARNING_SHOWN", False)
        logging.getLogger(library.__name__).setLevel(logging.WARNING)
    said = {"prompt_text": "", "answer": "\\frac{1}{2}", "finish_reason": "stop"}
    assert MathCorrectness("boxed")(response_text="\\boxed{0.5}", **said) == 1.0
    assert caplog.records == []


# Where we differ from the verdict in the table, and why.
DEBATABLE = {
    ("1/12", "0.0833333333333333"): "fifteen digits are how a float prints it: the tolerance",
    (r"\ln 2", r"\log 2"): "a log without a base is read to base 10",
    (r"\pi", "3.1415927"): "a rounded number is not the exact one",
    ("121", "11^2"): "a power of whole numbers counts as written out, as 2^{10} for 1024",
    ("ACD", "CDA"): "letters that run together are a word: their order counts",
    (r"\sqrt[3]{x^2}", "x^{2/3}"): "sympy takes the principal root, which differs for x < 0",
}


def test_the_table_is_judged_as_a_mathematician_would():
    lines = (Path(__file__).parent / "maths_pairs.tsv").read_text().splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    differ = {
        (known, given)
        for known, given, verdict in rows
        if marked("boxed", given, known) != float(verdict)
    }
    assert len(rows) >= 600
    assert differ == DEBATABLE.keys()


@pytest.mark.parametrize(
    ("known", "given", "right"),
    [
        *((f"{left}{letter}{right} 12", given, 1.0)
          for left, letter, right in ((r"\textbf{(", "C", ")}\\"), ("(", "C", ")"), ("", "C", "."),
                                      (r"\mathrm{(", "C", ")}~"), (r"\text{(", "C", ")}"))
          for given in ("C", "(C)", "12", "(C) 12", r"\text{C}", r"\textbf{(C)}")),
        *(("(C) 12", given, 0.0) for given in ("D", "(D) 12", "(C) 13", "13", "C or D", "C, D")),
    ],
)  # fmt: skip
def test_a_choice_is_met_by_its_letter_or_its_value(known, given, right):
    assert marked("boxed", given, known) == right
