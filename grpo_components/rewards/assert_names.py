"""Finds the names in asserts that the tested program must define, and adds missing imports."""

from __future__ import annotations

import ast
import builtins
import collections
import collections.abc
import symtable
import sys
import typing
from typing import NamedTuple

_THIRD_PARTY = {
    *("pandas", "scipy", "sympy", "torch", "pytest", "sklearn"),
    *("pd", "sp", "tf", "plt", "nx", "sns"),
}
"""Usual names of third-party packages in code; the sandbox has none of them."""
_NUMPY = {"np": "import numpy as np", "numpy": "import numpy"}
_ALLOWED = "allowed: the standard library and numpy; names that the program defines need no import"

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
_ABSTRACT = {
    "typing": " ".join(name for name in typing.__all__ if name[0].isupper()),
    "collections.abc": " ".join(collections.abc.__all__),
    "numbers": "Number Integral Rational Real Complex",
    "types": "GeneratorType FunctionType MethodType",
}
"""Types for `isinstance` and annotations. If the asserts call one, the program must define it."""
_MODULE_OF = {
    name: module
    for table in (_ABSTRACT, _CLASSES, _FUNCTIONS)
    for module, names in table.items()
    for name in names.split()
}
_MODULE_ATTRIBUTES = {"__name__", "__doc__", "__file__", "__spec__", "__loader__", "__package__"}


class Asserts(NamedTuple):
    """Test statements with missing imports added, and the names that the program must define."""

    source: str
    program_names: tuple[str, ...]


def read_asserts(source: str) -> Asserts:
    """Add missing imports to asserts, and find the names that the tested program must define.

    A name such as `gcd` is imported only if the program must define some other name: see
    docs/rewards.md.
    """
    try:
        tree = ast.parse(source)
        free, bound = _globals(symtable.symtable(source, "<asserts>", "exec"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        problem = f"cannot parse the asserts: {error}; allowed: Python statements"
        raise ValueError(f"answer: {problem}") from error
    attributes, bare, called, imported = _uses(tree)
    for name in imported:
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "numpy"}:
            raise ValueError(f"answer: the asserts import {name}; {_ALLOWED}")
    owners = {name for name in free if attributes.get(name) and name not in bare}
    for name in sorted(owners & _THIRD_PARTY):
        raise ValueError(f"answer: the asserts use {name}; {_ALLOWED}")
    modules = {name for name in owners if _is_module(name, attributes[name])}
    modules |= owners & _NUMPY.keys()
    known = (free - modules) & _MODULE_OF.keys()
    known -= called & (_names(_ABSTRACT) - _names(_CLASSES))
    called &= set(dir(builtins)) - bound
    tested = free - modules - known or known & _names(_FUNCTIONS) or known
    if not tested and len(called) == 1:  # MBPP has tasks that define a builtin such as `sum`
        tested = called
    if not tested:
        raise ValueError("answer: the asserts use no name of the program; allowed: at least one")
    imports = [_NUMPY.get(name, f"import {name}") for name in sorted(modules)]
    imports += [f"from {_MODULE_OF[name]} import {name}" for name in sorted(known - tested)]
    return Asserts("\n".join([*imports, source]), tuple(sorted(tested)))


def _names(table: dict[str, str]) -> set[str]:
    return {name for names in table.values() for name in names.split()}


def _is_module(name: str, attributes: set[str]) -> bool:
    """Whether a name before a dot is a module: yes in `datetime.date`, no in `datetime.now`."""
    if name in _MODULE_OF and name in sys.modules:
        return attributes <= vars(sys.modules[name]).keys()
    return name in sys.stdlib_module_names


def _uses(tree: ast.AST) -> tuple[dict[str, set[str]], set[str], set[str], list[str]]:
    """Return attributes by name, names used without a dot, called names, and imported modules."""
    attributes, imported = dict[str, set[str]](), list[str]()
    bare, called, owners = set[str](), set[str](), set[int]()
    for node in ast.walk(tree):  # outermost first, so an attribute comes before its owner
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            attributes.setdefault(node.value.id, set()).add(node.attr)
            owners.add(id(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
        elif isinstance(node, ast.Name) and id(node) not in owners:
            bare.add(node.id)
        elif isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported.append("." * node.level + (node.module or ""))
    return attributes, bare, called, imported


def _globals(table: symtable.SymbolTable) -> tuple[set[str], set[str]]:
    """Return two sets of globals: those read but neither bound nor builtin, and those bound."""
    read, bound, tables = set[str](), set[str](), [table]
    for table in tables:
        tables += table.get_children()
        is_module = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or is_module):
                read.add(symbol.get_name())
            binds = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
            if binds and (is_module or symbol.is_declared_global()):
                bound.add(symbol.get_name())
    return read - bound - set(dir(builtins)) - _MODULE_ATTRIBUTES, bound
