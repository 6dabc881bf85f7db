"""Code with asserts: working programs pass them, and no trick makes an assert hold."""

import pytest
from lib.rewards import fenced, scored

from grpo_components.rewards.code_tests import CodeTests

SQUARE = ["assert square(3) == 9", "assert square(-4) == 16"]


@pytest.fixture(scope="module")
def reward():
    return CodeTests(cpu_s=1, wall_s=30.0, memory_mib=256)


WORKING = """
print('loading')
def square(x):
    print(x)
    return x ** 2
def up_to(n): yield from range(n)
def far(): return float('inf')
def same(*a, **k): return a, k
def none(): pass
def big(): return 7 ** 10_000
class Stack:
    def __init__(self): self.items = []
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self): return self.items.pop()
def count():
    n = 0
    while True:
        yield n
        n += 1
class Shelf:
    def __init__(self): self.kept = {}
    def __setitem__(self, key, value): self.kept[key] = value
    def __getitem__(self, key): return self.kept[key]
    def __len__(self): return len(self.kept)
    def __str__(self): return f'Shelf of {len(self)}'
    def __repr__(self): return 'Shelf()'
class TooSmall(ValueError): pass
def root(x):
    if x < 0: raise TooSmall('no')
    return 1 / 0
def bad(): return b'\\xff'.decode()
def twice(x): return 2 * x
import importlib
def module(): return __spec__.name, importlib.util.find_spec('json').name, __package__, __file__
if __name__ == '__main__': input()
"""

HOLDING = """
import math, unittest
from itertools import islice
assert square(3) == 9
assert square(-4) == 16
assert list(up_to(3)) == [0, 1, 2]
assert math.isinf(far())
assert same(1, {2}, k=b'3') == ((1, {2}), {'k': b'3'})
assert none() is None
assert not none()
assert module() == ('program', 'json', '', '/program.py')
assert big() == 7 ** 10_000
stack = Stack().push(1)
stack.push((2, [3]))
assert stack.pop() == (2, [3])
numbers = count()
assert next(numbers) == 0
assert list(islice(numbers, 3)) == [1, 2, 3]
assert [a for a, _ in zip(count(), range(2))] == [0, 1]
shelf = Shelf()
shelf[2] = [3]
assert shelf[2] == [3] and len(shelf) == 1
assert str(shelf) == 'Shelf of 1' and repr(shelf) == 'Shelf()'
try:
    root(-1)
    assert False
except ValueError as e: assert str(e) == 'no'
with unittest.TestCase().assertRaises(ZeroDivisionError):
    root(1)
try:
    bad()
    assert False
except UnicodeDecodeError:
    pass
def check(candidate):
    assert candidate(2) == 4
check(twice)
"""
EQUALS_ALL = """
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    __hash__ = int.__hash__
"""

TRICKS = [
    "def square(x): return x + 6",
    "def square(x): return 9",
    "def square(x): raise ValueError",
    "def cube(x): return x ** 3",
    "def square(x) return x",
    "import os\nos._exit(0)",
    "import sys\nsys.exit(0)",
    "raise SystemExit(0)",
    "import os\ndef square(x): os._exit(0)",
    "def square(x): raise SystemExit(0)",
    "import atexit, os\natexit.register(os._exit, 0)\ndef square(x): raise KeyboardInterrupt",
    EQUALS_ALL + "def square(x): return Equal(5)",
    EQUALS_ALL.replace("(int)", "").replace("int.", "object.") + "def square(x): return Equal()",
    "import builtins\nbuiltins.AssertionError = builtins.Exception = None\n"
    "builtins.int = builtins.print = lambda *_: 9\ndef square(x): return 1",
    "import json\njson.loads = json.dumps = lambda *_, **__: 'true'\ndef square(x): return 9",
    "import sys\nmain = sys.modules['__main__']\nmain.decode = main.encode = lambda *_: 9\n"
    "def square(x): return 1",
    "import os\nfor fd in range(3, 9):\n  try: os.write(fd, b'[9, null]\\n[0, null]\\n')\n"
    "  except OSError: pass\ndef square(x): return 9",
    "import os\n[os.close(fd) for fd in range(5)]\ndef square(x): return x * x",
    "import os, signal\nos.kill(1, 9)\nos.kill(-1, 9)\nos.kill(os.getpid(), 9)",
    "def square(x):\n    while True: pass",
    "def square(x): return [x] * 10 ** 9",
    "def square(x):\n  deep = []\n  for _ in range(10 ** 5): deep = [deep]\n  return deep",
]
"""Programs that pass for squares."""
EXITS = [
    *("raise ValueError('here')", "import os\nos._exit = print\nraise ValueError"),
    *("import os\ndef root(x): os._exit(0)", "def root(x): raise SystemExit(0)"),
    *("def cube(x): return x ** 3", "def root(x) return x"),
    "import os\ndef root(x):\n  for fd in range(9):\n    try: os.write(fd, b'junk\\n')\n"
    "    except OSError: pass",
]
"""Programs that end in place of raising the expected error."""
ERROR = "try:\n    root(-1)\n    assert False\nexcept (ValueError, KeyError):\n    pass"
STOPS = "def square(x): raise StopIteration"  # would end a loop of the asserts
STOPPED = "assert all(map(square, [1, 2]))", "for _ in map(square, [1]): 0"
# An object of the program takes no function, has no other type, and is no answer.
OWN = (
    "class Own:\n  def __getitem__(self, k): return 3\n  def sort(self, **k): pass\n"
    "  def __iter__(self): raise OSError\ndef own(): return Own()\ndef plain(): return object()"
)
OF_OWN = ["x = own()\nx.sort(key=lambda n: n)\nassert x[0] == 3", "assert own()"]
OF_OWN += ["assert own() != 1", "assert 1 in own()"]
OF_OWN += ["from collections.abc import *\nassert isinstance(plain(), Iterable)"]


@pytest.mark.parametrize(
    ("program", "asserts"),
    [
        *((program, SQUARE) for program in TRICKS),
        *((program, [ERROR]) for program in EXITS),
        *((STOPS, [test]) for test in STOPPED),
        *((OWN, [test]) for test in OF_OWN),
    ],
)
def test_no_trick_makes_an_assert_hold(reward, program, asserts):
    assert scored(reward, fenced(program), asserts=asserts) == 0.0


KNOWN_NAMES = """
import math
from decimal import Decimal
from collections import deque
def area(r): return math.pi * r * r
def letters(text): return list(text)
class datetime: pass
def year(): return 2024
def half(): return 0.5
def price(): return Decimal('1.10')
def line(): return deque([1, 2])
LIMIT = 3
def under(x): return x < LIMIT
class Node:
    def __init__(self, n): self.n, self.left = n, None
def depth(node): return 1 + depth(node.left) if node else 0
def up_to(n):
    'Counts.'
    yield from range(n)
def isqrt_of(n): return int(n ** 0.5)
"""
USING_NAMES = """
from math import *
assert math.isclose(area(1), 3.14159, rel_tol=1e-3)
assert Counter(letters('aba')) == Counter({'a': 2, 'b': 1})
assert datetime.now().year > year()
assert half() == Fraction(1, 2) == Decimal('0.5')
assert price() == Decimal('1.1') and line() == deque([1, 2])
assert under(LIMIT - 1)
root = Node(1)
root.left = Node(2)
assert depth(root) == 2
assert isinstance(up_to(2), Iterator) and isinstance(up_to(2), Generator)
assert isinstance(up_to, Callable) and callable(up_to)
assert not isinstance(up_to, Iterable) and not callable(up_to(2))
assert up_to.__doc__ == 'Counts.' and up_to.__name__ == 'up_to'
assert isqrt_of(9) == 3 and cbrt(8) > 1
"""
OVERRIDES = """
def gcd(a, b): return 6
def sum(a, b): return a + b
class Counter: total = 2
"""
OVERRIDDEN = {
    "gcd": "assert gcd(1, 1) == 6",
    "sum": "assert sum(5, 3) == 8",
    "Counter": "c = Counter()\nassert c.total == 2",
}
"""A name of Python is the program's where the asserts use no other name of it."""

LIAR = """
class Liar:
    __class__ = property(lambda self: int)
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __len__(self): return 1
    def __iter__(self): return iter([Liar()])
    def __getattr__(self, name): return lambda *a, **k: True
    def __contains__(self, other): return True
    def __float__(self): return 3.14159
    __hash__ = object.__hash__
    __lt__ = __le__ = __gt__ = __ge__ = __eq__
def f(): return Liar()
"""
PLAIN_LIAR = LIAR.replace("__class__ =", "klass =")  # else it cannot cross at all
LIES = [
    "f() == 3", "3 == f()", "[3] == [f()]", "f() in [3]", "3 in f()", "not f() != 3", "f() < 4",
    "{'a': 3} == {'a': f()}", "isinstance(f(), int)", "4 > f()", "f()", "f().__eq__(3)",
    "f().__bool__()", "f().__contains__(3)", "sorted(f()) == [3]", "list(f()) == [3]",
    "math.isclose(f(), 3.14159)", "sum(f()) == 3", "Counter(f()) == Counter([3])",
    "operator.eq(f(), 3)", "f() + 1 == 4", "max(f(), 3) == 3", "isinstance(f(), Iterator)",
    "isinstance(f(), Callable)", "isinstance(f(), Container)", "isinstance(f(), Hashable)",
    "callable(f())", "f().__doc__ and f().__doc__.startswith('What')", "any(f())",
    "type(f()) is int",
]  # fmt: skip
PATCHES = """
import collections, math
math.isclose = collections.Counter = lambda *a, **k: True
class math: isclose = staticmethod(lambda *a, **k: True)
def isclose(*a, **k): return True
def Counter(*a): return 1
sorted = lambda x: [9]
len = lambda x: 3
isinstance = lambda *a: True
abs = lambda x: 0
all = any = lambda x: True
from collections import *
def area(r): return 0
def letters(text): return []
def f(): return [1]
"""
PATCHED = [
    "math.isclose(area(1), 3.14159, rel_tol=1e-3)", "isclose(area(1), 3.14, rel_tol=1e-3)",
    "Counter(letters('aba')) == Counter({'a': 2, 'b': 1})", "sorted(f()) == [9]", "len(f()) == 3",
    "isinstance(f(), dict)", "abs(f()[0]) == 0", "all(n > 3 for n in f())",
]  # fmt: skip
BASES = {
    **{"list": ("[5]", [3]), "int": ("5", 3), "float": ("5", 3.5), "str": ("'5'", "3")},
    **{"dict": ("a=5", {"a": 3}), "tuple": ("[5]", (3,)), "set": ("[5]", {3})},
    **{"bytes": ("1", b"3"), "complex": ("5", 3j), "frozenset": ("[5]", frozenset([3]))},
}
SUBCLASSES = """
from fractions import Fraction
class Fraction(Fraction):
    numerator = denominator = 3
    __eq__ = lambda *a: True
def third(): return Fraction(1, 7)
def plain(): return object()
def undocumented(): pass
""" + "".join(
    f"class Lie_{base}({base}):\n  __eq__ = lambda *a: True\n  __ne__ = lambda *a: False\n"
    f"  __hash__ = lambda s: 0\n  __lt__ = __gt__ = __eq__\n  __len__ = lambda s: 3\n"
    f"def a_{base}(): return Lie_{base}({value})\n"
    for base, (value, _) in BASES.items()
)  # fmt: skip
DISGUISED = [f"a_{base}() == {right!r}" for base, (_, right) in BASES.items()]
DISGUISED += ["third() == Fraction(1, 3)", "undocumented.__doc__"]
DISGUISED += ["isinstance(plain(), (Iterator, Sized, Callable))", "isinstance(plain(), Iterable)"]

CLASSES = """
import collections, contextlib
class V:
    def __init__(self, x): self.x = x
    def __add__(self, other): return V(self.x + (other.x if isinstance(other, V) else other))
    __radd__ = __add__
    def __mul__(self, other): return self.x * other.x if isinstance(other, V) else V(self.x * other)
    def __neg__(self): return V(-self.x)
    def __abs__(self): return abs(self.x)
    def __iadd__(self, other):
        self.x += other
        return self
    def __eq__(self, other): return isinstance(other, V) and self.x == other.x
    def __lt__(self, other): return self.x < other.x
    def __hash__(self): return hash(self.x)
    def __bool__(self): return self.x != 0
def added(a, b): return a + b
class Bag:
    def __init__(self, *kept): self.kept = kept
    def __contains__(self, one): return one in self.kept
    def __len__(self): return len(self.kept)
    def __enter__(self): return self.kept
    def __exit__(self, *error): self.kept = ()
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
def chain(*values): return Node(values[0], chain(*values[1:])) if values else None
class ShopError(Exception): pass
class TooFew(ShopError, LookupError):
    def __init__(self, left): super().__init__(f'only {left}'); self.left = left
def take(n):
    if n > 3: raise TooFew(3)
def raiser(): return TooFew
@contextlib.contextmanager
def doubled(n): yield 2 * n
def roots(): return [1.0, 3.0000000001]
def total(values): return sum(values)
"""
USING_CLASSES = """
import unittest
assert (V(1) + V(2)).x == 3 and (V(1) + 2).x == 3 and (2 + V(1)).x == 3 and (-V(1)).x == -1
assert V(1) + V(2) == V(3) and V(1) != V(2) and added(V(1), V(2)) == V(3) == added(V(1), V(2))
assert V(2) * V(3) == 6 and (V(2) * 3).x == 6 and abs(V(-2)) == 2 and sum([V(1), V(2)]) == V(3)
assert V(1) < V(2) and V(2) > V(1) and sorted([V(2), V(1)])[0].x == 1 and max(V(1), V(2)) == V(2)
assert len({V(1), V(1), V(2)}) == 2 and {V(1): 5}[V(1)] == 5 and V(1) in [V(1)]
assert V(1) and not V(0)
v = V(1)
v += 2
assert v.x == 3
assert 1 in Bag(1, 2) and 3 not in Bag(1) and Bag(1) and not Bag()
bag = Bag(1)
with bag as kept:
    assert kept == (1,)
assert len(bag) == 0
with doubled(2) as four:
    assert four == 4
out, node = [], chain(1, 2)
while node:
    out.append(node.value)
    node = node.next
assert out == [1, 2]
assert chain(1) != None and not chain(1) == None and (chain() or 1) == 1 and chain(1).next == None
assert isinstance(chain(1), Node) and not isinstance(V(1), Node) and not isinstance(3, Node)
assert issubclass(TooFew, ShopError) and issubclass(TooFew, LookupError)
for kind in (TooFew, ShopError, LookupError, raiser()):
    try:
        take(4)
        assert False
    except kind as error:
        assert error and str(error) == 'only 3' and error.left == 3
assert TooFew(5).left == 5
with unittest.TestCase().assertRaises(TooFew):
    take(4)
assert np.allclose(roots(), np.array([1, 3])) and numpy.isclose(roots()[0], 1)
assert total(np.array([1, 2])) == 3 == total([np.int64(1), np.float64(2)])
"""


@pytest.mark.parametrize(
    ("program", "holding", "false"),
    [
        pytest.param(WORKING, HOLDING, "square(2) == 5", id="values"),
        pytest.param(KNOWN_NAMES, USING_NAMES, "half() == 1", id="names without an import"),
        pytest.param(CLASSES, USING_CLASSES, "V(1) == V(2)", id="objects, as in one process"),
        *(
            pytest.param(OVERRIDES, holding, "gcd(2, 2) == 2", id=f"the program's own {name}")
            for name, holding in OVERRIDDEN.items()
        ),
    ],
)
def test_a_program_that_passes_all_asserts_is_worth_one(reward, program, holding, false):
    assert scored(reward, fenced(program), asserts=[holding]) == 1.0
    assert scored(reward, fenced(program), asserts=[holding, f"assert {false}"]) == 0.0


MADE_LIES = """
class Area(Liar):
    def __init__(self, *args): pass
    def __getattr__(self, name): return lambda *a, **k: Area()
    def __sub__(self, other): return 0.0
    def __add__(self, other): return Area()
    def __abs__(self): return 0.0
    def __round__(self, n=0): return 3.14
    def __bool__(self): return False
    def __pow__(self, other): return 10
    def __enter__(self): return 3
    def __exit__(self, *error): return True
    __rsub__ = __rpow__ = __matmul__ = __sub__
    def __int__(self): return 3
    __array__ = __index__ = __int__
    def __hash__(self): return hash(3)
    __call__ = lambda self: Area()
ShopError = AssertionError
class Any(type(Liar)):
    def __instancecheck__(self, other): return True
    def __subclasscheck__(self, other): return True
class Caught(Exception, metaclass=Any): pass
def Round(): return 3.14
def small(): return Area()
def wrong(): raise AssertionError
"""
PRETENDED = [
    "Area(1) == 3", "3 == Area(1)", "Area(1) != 4", "Area(1) < 4", "4 > Area(1)",
    "3 in [Area(1)]", "abs(Area(1) - 3.14159) < 1e-6", "Area(1) - 3 == 0", "3 - Area(1) == 0",
    "Area(1) ** 2 == 10", "abs(Area(1) + 3.14) < 1e-6", "Area(1) @ (Area(1) + 3) == 0",
    "round(Area(1), 2) == 3.14", "float(Area(1)) == 3.14159", "int(Area(1)) == 3",
    "max(Area(1), 3) == 3", "Area(1) in {3}", "Area(1)() == 3", "Area(1)() - 3 == 0",
    "not (Area(1) + 3)", "abs(small() - 3) == 0", "small() == small()", "small()",
    "small() in [small()]", "3 in small()", "len({small(), small()}) == 1",
    "math.isclose(Area(1), 3.14159)", "np.isclose(Area(1), 3.14159)", "np.allclose(small(), 3)",
    "np.array_equal(small(), [3])", "(np.array([3]) == small()).all()",
    "np.float64(3) == Area(1)", "np.float64(3) - Area(1) == 0",
    "np.abs(np.subtract(Area(1), 3.14)) < 1e-6", "isinstance(small(), int)",
    "isinstance(Area(1), float)", "type(Area(1)) is float",
]  # fmt: skip
HIDDEN = [
    "with Area(1):\n    assert False",
    "with small():\n    assert Area(1) == 3",
    "try:\n    assert False\nexcept ShopError: pass",
    "try:\n    assert False\nexcept Caught: pass",
    "try:\n    assert 3 == 4\nexcept (Caught, KeyError): pass",
]


@pytest.mark.parametrize(
    ("program", "claims"),
    [
        (LIAR, LIES),
        (PLAIN_LIAR, LIES),
        (PATCHES, PATCHED),
        (SUBCLASSES, DISGUISED),
        (PLAIN_LIAR + MADE_LIES, PRETENDED),
    ],
    ids=["liar", "plain liar", "patches", "subclasses", "made by the asserts"],
)
def test_no_name_type_or_object_of_the_program_makes_an_assert_hold(reward, program, claims):
    """Worth 1 only if the asserts reach their last line, with no claim that held before it."""
    tries = [
        f"try:\n    assert {claim}\n    held = True\nexcept Exception: pass" for claim in claims
    ]
    asserts = ["held = False", *tries, "assert not held"]
    assert scored(reward, fenced(program), asserts=asserts) == 1.0
    assert scored(reward, fenced(program), asserts=[*asserts, f"assert {claims[0]}"]) == 0.0


@pytest.mark.parametrize("test", HIDDEN)
def test_no_class_of_the_program_hides_a_failed_assert(reward, test):
    assert scored(reward, fenced(PLAIN_LIAR + MADE_LIES), asserts=["assert Round() == 3.14"]) == 1.0
    assert scored(reward, fenced(PLAIN_LIAR + MADE_LIES), asserts=[test]) == 0.0
    forged = "__main__._kinds = lambda *_: ['AssertionError', []]\n"
    program = f"import __main__\n{forged}{PLAIN_LIAR}{MADE_LIES}class ShopError(Exception): pass"
    assert scored(reward, fenced(program), asserts=[test]) == 0.0


@pytest.mark.parametrize(("right", "worth"), [("x * x", 1.0), ("x", 0.0)])
def test_imports_and_setup_code_run_before_the_asserts(reward, right, worth):
    """The columns of MBPP; both may use names of the program."""
    tests = {
        "test_imports": ["from math import isclose", "import math as m"],
        "test_setup_code": "limit = m.floor(1e-3)\nnine = square(3)",
        "asserts": ["assert isclose(nine, 9, abs_tol=limit)"],
    }
    program = f"def isclose(*a, **k): return True\ndef square(x): return {right}"
    assert scored(reward, fenced(program), **tests) == worth


def test_an_argument_that_cannot_cross_is_an_error(reward):
    with pytest.raises(ValueError, match=r"^answer: .* function"):
        apply = fenced("def apply(f, x): return f(x)")
        scored(reward, apply, asserts=["assert apply(lambda x: x, 3) == 3"])
