"""Who a name in the asserts of a code test belongs to: the asserts, Python, or the program."""

from __future__ import annotations

import ast
import builtins
import collections
import collections.abc
import symtable
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass

_ABSENT = {
    **{name: name for name in ("numpy", "pandas", "scipy", "sympy", "torch", "pytest")},
    **{"np": "numpy", "pd": "pandas", "sp": "scipy", "tf": "tensorflow", "plt": "matplotlib"},
    **{"nx": "networkx", "sns": "seaborn", "sklearn": "sklearn"},
}
"""Packages by the names that tests have for them; no sandbox has a package."""
_ALLOWED = "allowed: the standard library; the program's names need no import"

_FUNCTIONS = {
    "math": "isclose isnan isinf isfinite inf nan pi tau sqrt isqrt ceil floor trunc gcd lcm hypot "
    "factorial comb perm prod fsum sin cos tan asin acos atan atan2 exp log2 log10 radians degrees",
    "itertools": "islice zip_longest permutations combinations combinations_with_replacement",
    "functools": "partial reduce cmp_to_key lru_cache",
    "operator": "itemgetter attrgetter methodcaller",
    "copy": "deepcopy",
    "string": "ascii_letters ascii_lowercase ascii_uppercase punctuation",
}
_CLASSES = {
    "collections": " ".join(collections.__all__),
    "datetime": "datetime date timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "io": "StringIO BytesIO",
    "types": "SimpleNamespace",
    "unittest": "TestCase",
}
_NEVER_CALLED = {
    "typing": " ".join(name for name in typing.__all__ if name[0].isupper()),
    "collections.abc": " ".join(collections.abc.__all__),
    "numbers": "Number Integral Rational Real Complex",
    "types": "GeneratorType FunctionType MethodType",
}
"""What a value is compared with or annotated by; a class that is called is the program's."""
_MODULE_OF = {
    name: module
    for table in (_NEVER_CALLED, _CLASSES, _FUNCTIONS)
    for module, names in table.items()
    for name in names.split()
}
_OF_A_MODULE = {"__name__", "__doc__", "__file__", "__spec__", "__loader__", "__package__"}


@dataclass(frozen=True)
class Asserts:
    """Statements that test a program."""

    source: str
    """With the imports that they leave out."""
    program_names: tuple[str, ...]
    """What the program has to supply."""


def read_asserts(source: str) -> Asserts:
    """Find out which names of the asserts the program supplies, and import the others.

    A name that the asserts neither define nor import is the program's, but for Python's own names,
    modules of the standard library before a dot (`math.isclose`), and names that tests often forget
    to import (`Counter`, `isclose`). These are Python's if the asserts have another name that the
    program can supply; else they are what is tested: `assert gcd(12, 18) == 6`.

    Args:
        source: Python statements.

    Raises:
        ValueError: if no program can pass: a syntax error, a package that no sandbox has, or no
            name that is the program's.
    """
    try:
        tree = ast.parse(source)
        free = _free_names(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"answer: asserts with {error}; allowed: Python statements") from error
    _check_imports(tree)
    used = _uses(tree)
    owners = {name for name in free if used.attributes.get(name) and name not in used.bare}
    for name in sorted(owners & _ABSENT.keys()):
        raise ValueError(f"answer: asserts that use {name} ({_ABSENT[name]}); {_ALLOWED}")
    modules = {name for name in owners if _is_module(name, used.attributes[name])}
    known = {name for name in free - modules if name in _MODULE_OF}
    known -= {name for name in used.called if name in _of(_NEVER_CALLED) - _of(_CLASSES)}
    called = used.called & set(dir(builtins)) - _bound(source)
    tested = free - modules - known or known & _of(_FUNCTIONS) or known
    if not tested and len(called) == 1:  # as MBPP's own `sum`
        tested = called
    if not tested:
        raise ValueError("answer: asserts that use no name of the program's; allowed: one or more")
    imports = [f"import {name}" for name in sorted(modules)]
    imports += [f"from {_MODULE_OF[name]} import {name}" for name in sorted(known - tested)]
    return Asserts("\n".join([*imports, source]), tuple(sorted(tested)))


def _of(table: dict[str, str]) -> set[str]:
    return {name for names in table.values() for name in names.split()}


def _is_module(name: str, attributes: set[str]) -> bool:
    """Whether a name before a dot is a module's: `datetime.date`, and not the class's `now`."""
    if name in _MODULE_OF and name in sys.modules:
        return attributes <= vars(sys.modules[name]).keys()
    return name in sys.stdlib_module_names


@dataclass
class _Uses:
    """How names are used."""

    attributes: dict[str, set[str]]
    """What stands behind the dot, by the name before it."""
    bare: set[str]
    """Without a dot behind them; those that are called are among them."""
    called: set[str]


def _uses(tree: ast.AST) -> _Uses:
    uses = _Uses({}, set(), set())
    owners: set[int] = set()
    for node in ast.walk(tree):  # from the outside in: an owner comes after its attribute
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            uses.attributes.setdefault(node.value.id, set()).add(node.attr)
            owners.add(id(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            uses.called.add(node.func.id)
        elif isinstance(node, ast.Name) and id(node) not in owners:
            uses.bare.add(node.id)
    return uses


def _free_names(source: str) -> set[str]:
    """Names that are read as globals and never bound as one."""
    read = {
        symbol.get_name()
        for table in _tables(symtable.symtable(source, "<asserts>", "exec"))
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module")
    }
    return read - _bound(source) - set(dir(builtins)) - _OF_A_MODULE


def _bound(source: str) -> set[str]:
    """Names that the asserts bind as globals: by import, assignment, or definition."""
    return {
        symbol.get_name()
        for table in _tables(symtable.symtable(source, "<asserts>", "exec"))
        for symbol in table.get_symbols()
        if (table.get_type() == "module" or symbol.is_declared_global())
        and (symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace())
    }


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _check_imports(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        for name in names:
            if name.partition(".")[0] not in sys.stdlib_module_names:
                raise ValueError(f"answer: asserts that import {name}; {_ALLOWED}")
