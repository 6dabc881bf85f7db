"""Script that runs in two connected sandboxes: one for the asserts, one for the program they test.

Only plain data (numbers, text, lists, ...) and references to objects of the program cross between
the two; expected results never do. So a program gains nothing by patching `==`, returning objects
that equal everything, or exiting early.
"""

from __future__ import annotations

import builtins
import importlib.util
import json
import operator
import os
import sys
from collections.abc import Callable
from typing import IO, Any

ASSERTS, PROGRAM = "asserts.py", "program.py"
"""Files in the root folder of a sandbox; the one that exists decides what this process runs."""

NAMES = "names.json"
"""File beside the asserts: a JSON list of the names that the program must define."""

UNFIT = 3
"""Exit status if the asserts pass the program a value that cannot cross; stderr names its type."""

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, args, kwargs: target(*args, **kwargs),
    "names": lambda target, names: {name: target[name] for name in names if name in target},
    "attribute": getattr,
    "set attribute": setattr,
    "item": operator.getitem,
    "set item": operator.setitem,
    "delete item": operator.delitem,
    "length": len,
    "reversed": reversed,
    "iterator": iter,
    "next": next,
    "text": str,
    "representation": repr,
}
"""Operations, by name, that the asserts can request on an object in the program's sandbox."""

_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}

# Further types that cross by value: for each type name, its module and a function that takes a
# value apart into constructor arguments.
_VALUES: dict[str, tuple[str, Callable[[Any], list[Any]]]] = {
    "range": ("builtins", lambda v: [v.start, v.stop, v.step]),
    "slice": ("builtins", lambda v: [v.start, v.stop, v.step]),
    "deque": ("collections", lambda v: [list(v), v.maxlen]),
    "Decimal": ("decimal", lambda v: [str(v)]),
    "Fraction": ("fractions", lambda v: [v.numerator, v.denominator]),
    "date": ("datetime", lambda v: [v.year, v.month, v.day]),
    "timedelta": ("datetime", lambda v: [v.days, v.seconds, v.microseconds]),
}

_OPTIONAL = ("__call__", "__iter__", "__next__", "__len__", "__getitem__", "__setitem__")
_OPTIONAL += ("__delitem__", "__reversed__", "send", "throw", "close")
"""A `Remote` has these methods only if its object has them, because `isinstance` checks them."""

_COMMON_ATTRIBUTES = ("__name__", "__qualname__", "__doc__", "__annotations__")
"""Attributes that `Remote` itself has; their values are read from the program's object instead."""

_STATE = " ask, number"
"""Attribute that holds the state of a `Remote`. It is no identifier, so no program can use it."""


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Convert a value to JSON data."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return [name, [encode(item, keep) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(k, keep), encode(v, keep)] for k, v in value.items()]]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    kind = type(value)
    if (known := _VALUES.get(kind.__name__)) and kind.__module__ == known[0]:
        return [kind.__name__, [encode(part, keep) for part in known[1](value)]]
    return ["object", keep(value)]


def decode(data: Any, find: Callable[[Any], Any]) -> Any:
    """Undo `encode`; build only types of the standard library."""
    if not isinstance(data, list):
        return data
    name, content = data
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(item, find) for item in content)
    if name == "dict":
        return {decode(k, find): decode(v, find) for k, v in content}
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "complex":
        return complex(*content)
    if name in _VALUES:
        kind = getattr(importlib.import_module(_VALUES[name][0]), name)
        return kind(*(decode(part, find) for part in content))
    return find(content)


def _never(self: Any, *_: Any) -> Any:
    raise TypeError("an object of the program cannot be compared")


class Remote:
    """Proxy for an object of the program: can be called, read and changed, but never compared."""

    def __init__(self, ask: Callable[..., Any], number: int | str) -> None:
        vars(self)[_STATE] = ask, number

    def __getattribute__(self, name: str) -> Any:
        if name in _COMMON_ATTRIBUTES:
            return _request(self, "attribute", name)
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _request(self, "attribute", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _request(self, "set attribute", name, value)

    def __str__(self) -> str:
        return _request(self, "text")

    def __repr__(self) -> str:
        return _request(self, "representation")

    __eq__ = __ne__ = __bool__ = _never
    __hash__ = __contains__ = None  # pyright: ignore[reportAssignmentType]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object in the program's sandbox."""
        return _request(self, "call", args, kwargs)

    def __iter__(self) -> Any:
        return _request(self, "iterator")

    def __next__(self) -> Any:
        return _request(self, "next")

    def __len__(self) -> int:
        return _request(self, "length")

    def __getitem__(self, key: Any) -> Any:
        return _request(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _request(self, "set item", key, value)

    def __delitem__(self, key: Any) -> None:
        _request(self, "delete item", key)

    def __reversed__(self) -> Any:
        return _request(self, "reversed")

    def send(self, value: Any) -> Any:
        """Call the object's `send`, as of a generator."""
        return _request(self, "attribute", "send")(value)

    def throw(self, *args: Any) -> Any:
        """Call the object's `throw`, as of a generator."""
        return _request(self, "attribute", "throw")(*args)

    def close(self) -> Any:
        """Call the object's `close`."""
        return _request(self, "attribute", "close")()


def _request(remote: Any, what: str, *more: Any) -> Any:
    ask, number = vars(remote)[_STATE]
    return ask(what, number, *more)


_REMOTE_TYPES: dict[frozenset[str], type] = {frozenset(_OPTIONAL): Remote}


def _remote(ask: Callable[..., Any], number: int | str, methods: list[str]) -> Any:
    """Make a proxy whose class has exactly the optional methods that the object has.

    So `callable(x)` and `isinstance(x, Iterator)`, which look for these methods, are correct.
    """
    has = frozenset(methods) & frozenset(_OPTIONAL)
    if has not in _REMOTE_TYPES:
        left_out = {*_OPTIONAL, "__dict__", "__weakref__"} - has
        copied = {name: part for name, part in vars(Remote).items() if name not in left_out}
        _REMOTE_TYPES[has] = type("Remote", (), copied)
    return _REMOTE_TYPES[has](ask, number)


def _methods(value: Any) -> list[str]:
    """Return the names of the `_OPTIONAL` methods that the class of an object has."""
    spaces = [vars(kind) for kind in reversed(type(value).__mro__)]
    found = {name: space[name] for space in spaces for name in _OPTIONAL if name in space}
    return [name for name, method in found.items() if method is not None]


def _load(name: str, **names: Any) -> Any:
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), f"/{name}")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    vars(module).update(names)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def _describe(error: BaseException) -> tuple[str, str]:
    """Return the name of an exception's closest builtin base class, and the exception's message."""
    kinds = (k.__name__ for k in type(error).__mro__ if vars(builtins).get(k.__name__) is k)
    is_text = len(error.args) == 1 and isinstance(error.args[0], str)
    return next(kinds), error.args[0] if is_text else str(error)


def _check_asserts(reader: IO[str], writer: IO[str]) -> None:
    """Run the asserts with the names that the program defines."""

    named: set[int] = set()

    def ask(*request: Any) -> Any:
        def number(value: Any) -> int | str:
            if type(value) in _REMOTE_TYPES.values():
                return vars(value)[_STATE][1]
            if request[1] not in named:  # called on an object that the program returned
                os._exit(1)
            sys.stderr.write(f"a {type(value).__name__}")
            sys.stderr.flush()
            os._exit(UNFIT)

        try:
            writer.write(json.dumps([encode(part, number) for part in request]) + "\n")
            writer.flush()
            answer, failure = json.loads(reader.readline())
            result = decode(answer, lambda reference: _remote(ask, *reference))
            if failure is None:
                return result
            kind = vars(builtins)[failure[0]]
            if not issubclass(kind, Exception) or (kind is StopIteration and request[0] != "next"):
                kind = RuntimeError  # the original would end the asserts, or a loop in them
            error = kind.__new__(kind, failure[1])
        except Exception:  # the program exited: the asserts must not catch this
            os._exit(1)
        raise error

    with open(f"/{NAMES}", encoding="utf-8") as file:
        names: list[str] = json.load(file)
    # A name that the program does not define is an error only if the asserts use it.
    given = ask("names", "", names)
    named |= {vars(v)[_STATE][1] for v in given.values() if type(v) in _REMOTE_TYPES.values()}
    _load(ASSERTS, **{name: Remote(ask, name) for name in names} | given)


def _serve_program(reader: IO[str], writer: IO[str]) -> None:
    """Load the program, then carry out the operations that the asserts request."""
    objects: dict[int | str, Any] = {}

    def keep(value: Any) -> tuple[int, list[str]]:
        objects[len(objects)] = value
        return len(objects) - 1, _methods(value)

    try:
        program = vars(_load(PROGRAM))
    except BaseException:  # including SystemExit
        return
    objects |= {**program, "": program}
    for line in reader:
        kind, number, *rest = json.loads(line)
        target = objects[number]  # a missing name ends this process
        try:
            given = [decode(part, objects.__getitem__) for part in rest]
            result = _OPERATIONS[kind](target, *given)
            message = json.dumps([encode(result, keep), None])
        except BaseException as error:  # raised by the program
            message = json.dumps([None, _describe(error)])
        writer.write(message + "\n")
        writer.flush()


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    # Whatever the program prints is discarded.
    _streams = [os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")]
    for _number, _flags in ((0, os.O_RDONLY), (1, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, _flags), _number)
    (_check_asserts if os.path.exists(f"/{ASSERTS}") else _serve_program)(*_streams)
