"""Expensive expressions are recognised without evaluating them."""

import math_verify
import pytest

from grpo_components.rewards.math_bounds import is_costly, is_slow_to_read


def read(text):
    parsed = math_verify.parse(
        f"${text}$",
        extraction_config=[math_verify.LatexExtractionConfig()],
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]
    )
    return parsed[0]


@pytest.mark.parametrize(
    "text",
    [
        "99999999!",
        "((9!)!)!",
        "x + 99999999!",
        "9^{9^9}",
        "9^{9^{9^9}}",
        "10^{10^{10}}",
        "3^{999999999}",
        "3^{-999999999}",
        r"(\frac{1}{3})^{999999999}",
        r"\sqrt{2}^{999999999}",
        r"\frac{1}{9^{9^9}}",
        r"\sqrt{9^{9^9}}",
        "-9^{9^9}",
        "x = 9^{9^9}",
        r"\{1, 9^{9^9}\}",
        r"\sin(10^{100000})",
        r"\log(9^{999999999})",
        "(x+y+z+1)^{500}",
        r"\sum_{k=1}^{1000000000} k",
        r"\prod_{k=1}^{10^9} k",
        r"\sum_{i=1}^{9999}\sum_{j=1}^{9999} ij",
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{99999999}",
    ],
)
def test_an_expensive_expression_is_costly(text):
    assert is_costly(read(text))


@pytest.mark.parametrize(
    "text",
    [
        "5",
        "9" * 900,
        "100!",
        "2^{1000}",
        "2^{2005} - 1",
        r"\frac{2005!}{3}",
        "10^{100}",
        "x^{2005}",
        "(x+1)^{10}",
        "x^y",
        "e^{i x}",
        "e^{-x^2}",
        r"\sqrt[3]{2}",
        r"2^{\frac{1}{12}}",
        r"3^{\sqrt{2}}",
        r"\binom{100}{50}",
        r"\sum_{k=1}^{100} k",
        r"\sum_{k=1}^{\infty} \frac{1}{2^k}",
        r"\sum_{k=1}^{n} k",
        r"\int_0^1 x^2 dx",
        r"\log_2(1024)",
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        r"(-\infty, 2]",
        r"\sin(30^\circ)",
    ],
)
def test_a_usual_answer_is_not_costly(text):
    assert not is_costly(read(text)) and not is_slow_to_read(text)


def test_anything_but_an_expression_is_not_costly():
    assert not any(map(is_costly, ("text", None, 5)))


@pytest.mark.parametrize(
    "text",
    [
        "(" * 50 + "5" + ")" * 50,
        "[(" * 400,
        r"\sqrt{" * 100 + "5" + "}" * 100,
        r"\binom{1000000000}{500000000}",
        r"{10^9 \choose 5^8}" + r"\choose 10^9",
        r"\binom{\binom{999}{500}}{9}",
        r"\gcd(9^{99999999}, 3)",
    ],
)
def test_a_text_that_is_slow_to_parse_is_recognised(text):
    assert is_slow_to_read(text)
