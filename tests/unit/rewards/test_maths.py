"""Which responses earn a reward."""

from pathlib import Path

import math_verify
import pytest
from lib.rewards import judged

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
HUGE += [r"\sum_{k=1}^{1000000000} k^k", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{99999999}"]
HUGE += [r"\sum_{i=1}^{9999}\sum_{j=1}^{9999} ij", r"{10^9 \choose 5^8}", "[(" * 400]
HUGE += [r"\gcd(9^{99999999}, 3)", r"\sqrt{" * 100 + "5" + "}" * 100]
HUGE += [r"\binom{1000000000}{500000000}", r"\prod_{k=1}^{100000000} k", r"\sin(10^{9999999})"]

REWARDS = {answer_format: MathCorrectness(answer_format) for answer_format in MARKED}


def correct(response: str, known: str, answer_format: str) -> float:
    return judged(REWARDS[answer_format], response, known)


def marked(answer_format: str, given: str, known: str) -> float:
    return correct(MARKED[answer_format].format(given), known, answer_format)


def table(name: str) -> list[list[str]]:
    lines = (Path(__file__).parent / name).read_text().splitlines()[1:]
    return [line.split("\t") for line in lines]


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
    rows = table("maths_pairs.tsv")
    differ = {
        (known, given)
        for known, given, verdict in rows
        if marked("boxed", given, known) != float(verdict)
    }
    assert len(rows) >= 600
    assert differ == DEBATABLE.keys()


def test_the_changed_verdicts_are_those_of_the_table():
    verdicts = {(known, given): verdict for known, given, verdict in table("maths_pairs.tsv")}
    rows = table("../../../docs/results/maths_changed_verdicts.tsv")
    assert {(known, given): right for known, given, _, _, right in rows}.items() <= verdicts.items()
    assert all(before != now for _, _, before, now, _ in rows)
    worse = {(known, given) for known, given, _, now, right in rows if now != right}
    assert worse == {(r"\pi", "3.1415927"), ("ACD", "CDA")} <= DEBATABLE.keys()


def test_the_table_of_answers_has_150():
    rows = table("maths_answers.tsv")
    assert len({(known, given) for known, given, _ in rows}) == len(rows) >= 150


# Of the formats, two depend on the answer's braces or have nothing around it.
@pytest.mark.parametrize(
    ("answer_format", "start", "every"),
    [("boxed", 0, 1), ("plain", 0, 1), ("tag", 0, 5), ("gsm8k", 2, 5)],
)
def test_an_answer_is_judged_alike_in_every_format(answer_format, start, every):
    rows = table("maths_answers.tsv")[start::every]
    found = [(known, given, marked(answer_format, given, known)) for known, given, _ in rows]
    assert found == [(known, given, float(verdict)) for known, given, verdict in rows]


TOO_LONG = ["many words " * 500, "(" * 3000 + "5" + ")" * 3000, "(" * 400 + "5" + ")" * 400]


@pytest.mark.parametrize("answer_format", ["boxed", "plain"])
@pytest.mark.parametrize("given", ["", *TOO_LONG, *HUGE])
def test_nothing_and_too_much_are_worth_nothing(answer_format, given):
    for known in ("5", "x+1", "9^{9^{9^9}}"):
        assert marked(answer_format, given, known) == 0.0


@pytest.mark.parametrize("known", [r"9^{9^9}", r"2^{99999999} - 1", "(10^9)!"])
def test_a_known_answer_that_is_too_large_to_evaluate_is_compared_as_text(known):
    for answer_format in MARKED:
        assert marked(answer_format, known, known) == 1.0
        assert marked(answer_format, known.replace("{9^9}", "{ 9^{9} }"), known) == 1.0
        assert marked(answer_format, "5", known) == 0.0
        assert marked(answer_format, f"{known} + 1", known) == 0.0


LONG = ["~", "`", "<answer>", "</answer>", "<think>", r"\boxed{", r"\boxed ", "{", "#### 5 ", "\n"]
LONG += [" ", "1 ", "1,", "(", "<tool_call>", "```python\n", "~~~\n", "a ", "=", "\\", "####"]
LONG += ["1 1/"]


@pytest.mark.parametrize("piece", LONG)
@pytest.mark.parametrize(
    "reward",
    [*REWARDS.values(), *(ThinkAnswerFormat(), BoxedFormat(), ResponseLength(10**6))],
    ids=lambda reward: type(reward).__name__,
)
def test_a_long_response_is_read_in_linear_time(reward, piece):
    """A quadratic search would take minutes."""
    response = (piece * 40_000)[:200_000]
    for end in ("", "`", "</answer>", "x"):
        assert 0.0 <= judged(reward, f"{response}{end}") <= 1.0


UNMARKED = {
    "tag": ("", "5", "<answer>5", "5</answer>", "#### 5"),
    "boxed": ("", "5", r"\boxed{5"),
    "gsm8k": ("", "5", "### 5", "####\n5"),
    "plain": ("",),
}


@pytest.mark.parametrize("answer_format", UNMARKED)
def test_the_right_number_without_its_mark_is_worth_nothing(answer_format):
    worth = {given: correct(given, "5", answer_format) for given in UNMARKED[answer_format]}
    assert set(worth.values()) == {0.0}, worth


@pytest.mark.parametrize("answer_format", ["tag", "boxed", "gsm8k"])
def test_of_several_answers_the_last_one_counts(answer_format):
    wrong, right = (MARKED[answer_format].format(number) for number in (4, 5))
    assert correct(f"{wrong}\n{right}", "5", answer_format) == 1.0
    assert correct(f"{right}\n{wrong}", "5", answer_format) == 0.0


@pytest.mark.parametrize("known", ["5", r"2\sqrt{3}", r"\pi", "1/2"])
def test_nothing_infinite_is_a_number(monkeypatch, known):
    # sympy sometimes finds that an infinite product equals 5, depending on the hash seed.
    monkeypatch.setattr(math_verify, "verify", lambda *args, **kwargs: True)
    for given in (r"\pi\infty", r"\sqrt{2}\infty", r"\infty", r"\frac{1}{0}", r"\frac{\pi}{0}"):
        assert correct(given, known, "plain") == 0.0


HALF = r"\left\{ x^2 \right."
SIXES = "$6$", "$$6$$", "\n$ 6 $\n", r"\$6", r"$\$6$", "$x=6$"


@pytest.mark.parametrize(
    ("answer_format", "response", "known"),
    [
        # What is cut off does not replace the answer before it.
        ("tag", "<answer>5</answer> or rather <answer>6", "5"),
        ("boxed", r"\boxed{5} or rather \boxed{6", "5"),
        # A box ends at its own brace, and at no escaped one.
        ("boxed", r"\boxed{\frac{\sqrt{\frac{1}{4}}}{1}} and {more}", r"\sqrt{\frac{1}{4}}"),
        ("boxed", rf"\boxed{{{HALF}}}", HALF),
        ("boxed", r"\boxed{\{1, 2\}} and {more}", r"\{2, 1\}"),
        ("plain", r"(-\infty, \infty)", r"(-\infty,\infty) "),
        ("plain", r"- \infty", r"-\infty"),
        ("gsm8k", "**#### 5**", "5"),
        ("gsm8k", "#### **1,000**", "1000"),
        ("tag", "<answer>$x=1$ and $x=2$</answer>", "1, 2"),
        *(("tag", f"<answer>{six}</answer>", "6") for six in SIXES),
    ],
)
def test_a_right_answer_is_found_in_its_marks(answer_format, response, known):
    assert correct(response, known, answer_format) == 1.0


def test_one_of_two_formulas_is_not_the_answer():
    for two in ("$5$ $6$", "$5$ or $6$", "$5$\n$6$", "5\n6"):
        assert marked("tag", two, "5") == marked("tag", two, "6") == 0.0


def test_a_known_answer_that_cannot_be_parsed_is_an_error():
    with pytest.raises(ValueError, match=r"^answer: "):
        correct("#### 5", "", "gsm8k")


def test_an_unknown_answer_format_is_named_with_the_allowed_ones():
    with pytest.raises(ValueError, match=r"^answer_format: 'hash'.*tag, boxed, gsm8k, plain"):
        MathCorrectness(answer_format="hash")


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
