"""Run as a script in two sandboxes: one has the asserts, the other the program that they call.

Nothing but plain data (numbers, text, lists, ...) crosses between them, and what is expected never
does: to patch `==`, to return objects that equal everything, or to end early wins nothing.
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
"""Files in the root folder: which of them is there decides what this process is."""

NAMES = "names.json"
"""Beside the asserts: the names that the program supplies, as a list."""

UNFIT = 3
"""Exit status of asserts that hand the program what cannot cross; stderr says what."""

_DONE_THERE: dict[str, Callable[..., Any]] = {
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
"""What the asserts can ask for, done with an object in the program's sandbox."""

_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}

# Kinds of value of the standard library: where each is, and what it is built from.
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
"""Methods that a `Remote` has where the program's object has them: `isinstance` looks for them."""

_TOLD = ("__name__", "__qualname__", "__doc__", "__annotations__")
"""Attributes that everything in Python has; those of a `Remote` are the program's."""

_STATE = " ask, number"
"""No program's object has an attribute of that name."""


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Turn a value into what JSON can hold.

    Args:
        value: plain data by value; anything else by what `keep` says.
        keep: what is told of such an object.
    """
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
    """The inverse of `encode`: builds values of Python's own types only.

    Args:
        data: from JSON.
        find: gives the object of which that was told.
    """
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
    raise TypeError("the program gave an object of its own, which equals nothing here")


class Remote:
    """What the program made and is no plain data: can be called and asked, never be compared."""

    def __init__(self, ask: Callable[..., Any], number: int | str) -> None:
        vars(self)[_STATE] = ask, number

    def __getattribute__(self, name: str) -> Any:
        if name in _TOLD:
            return _asked(self, "attribute", name)
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _asked(self, "attribute", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _asked(self, "set attribute", name, value)

    def __str__(self) -> str:
        return _asked(self, "text")

    def __repr__(self) -> str:
        return _asked(self, "representation")

    __eq__ = __ne__ = __bool__ = _never
    __hash__ = __contains__ = None  # pyright: ignore[reportAssignmentType]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it in the program's sandbox."""
        return _asked(self, "call", args, kwargs)

    def __iter__(self) -> Any:
        return _asked(self, "iterator")

    def __next__(self) -> Any:
        return _asked(self, "next")

    def __len__(self) -> int:
        return _asked(self, "length")

    def __getitem__(self, key: Any) -> Any:
        return _asked(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _asked(self, "set item", key, value)

    def __delitem__(self, key: Any) -> None:
        _asked(self, "delete item", key)

    def __reversed__(self) -> Any:
        return _asked(self, "reversed")

    def send(self, value: Any) -> Any:
        """Of a generator, as the others below."""
        return _asked(self, "attribute", "send")(value)

    def throw(self, *args: Any) -> Any:
        """Raise in the generator."""
        return _asked(self, "attribute", "throw")(*args)

    def close(self) -> Any:
        """End the generator, or whatever the program's object does."""
        return _asked(self, "attribute", "close")()


def _asked(remote: Any, what: str, *more: Any) -> Any:
    ask, number = vars(remote)[_STATE]
    return ask(what, number, *more)


_KINDS: dict[frozenset[str], type] = {frozenset(_OPTIONAL): Remote}


def _remote(ask: Callable[..., Any], number: int | str, methods: list[str]) -> Any:
    """An object of the program's, of a class that has these of the optional methods and no others.

    So `callable(x)`, and `isinstance(x, Iterator)`, which looks for methods, say what is true.
    """
    has = frozenset(methods) & frozenset(_OPTIONAL)
    if has not in _KINDS:
        left_out = {*_OPTIONAL, "__dict__", "__weakref__"} - has
        copied = {name: part for name, part in vars(Remote).items() if name not in left_out}
        _KINDS[has] = type("Remote", (), copied)
    return _KINDS[has](ask, number)


def _methods(value: Any) -> list[str]:
    """Which of the optional methods the class of an object has."""
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


def _told(error: BaseException) -> tuple[str, str]:
    """The first of Python's own kinds that an exception is, and its message."""
    kinds = (k.__name__ for k in type(error).__mro__ if vars(builtins).get(k.__name__) is k)
    is_text = len(error.args) == 1 and isinstance(error.args[0], str)
    return next(kinds), error.args[0] if is_text else str(error)


def _check_asserts(reader: IO[str], writer: IO[str]) -> None:
    """Run the asserts, with what the program has under the names that it supplies."""

    named: set[int] = set()

    def ask(*request: Any) -> Any:
        def number(value: Any) -> int | str:
            if type(value) in _KINDS.values():
                return vars(value)[_STATE][1]
            if request[1] not in named:  # an object that the program chose to answer with
                os._exit(1)
            sys.stderr.write(f"a {type(value).__name__}")
            sys.stderr.flush()
            os._exit(UNFIT)

        try:
            writer.write(json.dumps([encode(part, number) for part in request]) + "\n")
            writer.flush()
            answer, told = json.loads(reader.readline())
            result = decode(answer, lambda told: _remote(ask, *told))
            if told is None:
                return result
            kind = vars(builtins)[told[0]]
            if not issubclass(kind, Exception) or (kind is StopIteration and request[0] != "next"):
                kind = RuntimeError  # no way out of the asserts, nor out of a loop in them
            error = kind.__new__(kind, told[1])
        except Exception:  # the program ended; nobody may catch that as an error that it raised
            os._exit(1)
        raise error

    with open(f"/{NAMES}", encoding="utf-8") as file:
        names: list[str] = json.load(file)
    # What the program has not ends it when it is used.
    given = ask("names", "", names)
    named |= {vars(v)[_STATE][1] for v in given.values() if type(v) in _KINDS.values()}
    _load(ASSERTS, **{name: Remote(ask, name) for name in names} | given)


def _serve_program(reader: IO[str], writer: IO[str]) -> None:
    """Load the program, then call what the asserts call."""
    objects: dict[int | str, Any] = {}

    def keep(value: Any) -> tuple[int, list[str]]:
        objects[len(objects)] = value
        return len(objects) - 1, _methods(value)

    try:
        program = vars(_load(PROGRAM))
    except BaseException:  # SystemExit, too
        return
    objects |= {**program, "": program}
    for line in reader:
        kind, number, *rest = json.loads(line)
        target = objects[number]  # a name that the program has not ends it
        try:
            given = [decode(part, objects.__getitem__) for part in rest]
            result = _DONE_THERE[kind](target, *given)
            message = json.dumps([encode(result, keep), None])
        except BaseException as error:  # the program's, whatever it is
            message = json.dumps([None, _told(error)])
        writer.write(message + "\n")
        writer.flush()


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    # The program may print: what it prints goes nowhere.
    _streams = [os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")]
    for _number, _flags in ((0, os.O_RDONLY), (1, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, _flags), _number)
    (_check_asserts if os.path.exists(f"/{ASSERTS}") else _serve_program)(*_streams)
