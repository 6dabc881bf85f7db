"""Which names the asserts of a code test import, and which the program must define."""

import pytest

from grpo_components.rewards.assert_names import read_asserts


@pytest.mark.parametrize(
    ("asserts", "program_names", "imports"),
    [
        ("assert math.isclose(area(1), 3.14)", {"area"}, {"import math"}),
        ("assert isclose(area(1), 3.14)", {"area"}, {"from math import isclose"}),
        ("assert isclose(1, 3.14)", {"isclose"}, set()),
        ("assert gcd(12, 18) == 6", {"gcd"}, set()),
        ("assert gcd(size(), 4) == 2", {"size"}, {"from math import gcd"}),
        ("assert sum(5, 3) == 2", {"sum"}, set()),
        ("assert sum(f()) == 2", {"f"}, set()),
        ("c = Counter()\nassert c.total == 2", {"Counter"}, set()),
        ("assert f() == Counter('a')", {"f"}, {"from collections import Counter"}),
        ("assert datetime.now().year > f()", {"f"}, {"from datetime import datetime"}),
        ("assert datetime.date(1, 1, 1) < f()", {"f"}, {"import datetime"}),
        ("assert isinstance(f(), Iterator)", {"f"}, {"from collections.abc import Iterator"}),
        ("assert under(LIMIT - 1)", {"LIMIT", "under"}, set()),
        ("import math as m\nassert m.pi == f()", {"f"}, set()),
        ("def check(g):\n    assert g(2) == 4\ncheck(twice)", {"twice"}, set()),
        ("for x in [1]:\n    assert square(x) == x", {"square"}, set()),
    ],
)
def test_names_belong_to_the_asserts_to_python_or_to_the_program(asserts, program_names, imports):
    read = read_asserts(asserts)
    assert set(read.program_names) == program_names
    added = read.source.removesuffix(asserts).split("\n")
    assert set(filter(None, added)) == imports


@pytest.mark.parametrize(
    ("asserts", "cause"),
    [
        ("assert square(3) = 9", "line 1"),
        ("import math, scipy.linalg", "scipy.linalg"),
        ("from solution import square", "solution"),
        ("assert pd.isna(square(3))", "pandas"),
        ("assert len([1]) == sum([1])", "no name"),
        ("import math; assert math.sqrt(4) == 2", "no name"),
    ],
)
def test_asserts_that_no_program_can_pass_are_an_error(asserts, cause):
    with pytest.raises(ValueError, match=rf"^answer: .*{cause}"):
        read_asserts(asserts)
