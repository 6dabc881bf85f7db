"""Run as a script in two sandboxes: one has the asserts, the other the program that they call.

Nothing but plain data (numbers, text, lists, ...) crosses between them, and what is expected never
does: to patch `==`, to return objects that equal everything, or to end early wins nothing.
"""

from __future__ import annotations

import ast
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

UNFIT = 3
"""Exit status of asserts that hand the program what cannot cross; stderr says what."""

_DONE_THERE: dict[str, Callable[..., Any]] = {
    "call": lambda target, args, kwargs: target(*args, **kwargs),
    "attribute": getattr,
    "item": operator.getitem,
    "set item": operator.setitem,
    "length": len,
    "iterator": iter,
    "next": next,
    "text": str,
    "representation": repr,
}
"""What the asserts can ask for, done with an object in the program's sandbox."""

_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def encode(value: Any, keep: Callable[[Any], int | str]) -> Any:
    """Turn a value into what JSON can hold.

    Args:
        value: plain data by value; anything else by number.
        keep: gives such an object its number.
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
    return ["object", keep(value)]


def decode(data: Any, find: Callable[[int], Any]) -> Any:
    """The inverse of `encode`: builds values of Python's own types only.

    Args:
        data: from JSON.
        find: gives the object of a number.
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
    return find(content)


class Remote:
    """What the program made and is no plain data: can be called and asked, never be compared."""

    def __init__(self, ask: Callable[..., Any], number: int | str) -> None:
        self._ask, self._number = ask, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it in the program's sandbox."""
        return self._ask("call", self._number, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("attribute", self._number, name)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", self._number, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("set item", self._number, key, value)

    def __len__(self) -> int:
        return self._ask("length", self._number)

    def __iter__(self) -> Any:
        return self._ask("iterator", self._number)

    def __next__(self) -> Any:
        return self._ask("next", self._number)

    def __str__(self) -> str:
        return self._ask("text", self._number)

    def __repr__(self) -> str:
        return self._ask("representation", self._number)

    def _never(self, *_: Any) -> Any:
        raise TypeError("the program gave an object of its own, which equals nothing here")

    __eq__ = __ne__ = __bool__ = __contains__ = _never
    __hash__ = None  # pyright: ignore[reportAssignmentType]


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
    """Run the asserts; names that they do not define are the program's."""

    def number(value: Any) -> int | str:
        if type(value) is Remote:
            return value._number
        sys.stderr.write(f"a {type(value).__name__}")
        sys.stderr.flush()
        os._exit(UNFIT)

    def ask(*request: Any) -> Any:
        try:
            writer.write(json.dumps([encode(part, number) for part in request]) + "\n")
            writer.flush()
            answer, told = json.loads(reader.readline())
            result = decode(answer, lambda n: Remote(ask, n))
            if told is None:
                return result
            kind = vars(builtins)[told[0]]
            if not issubclass(kind, Exception) or (kind is StopIteration and request[0] != "next"):
                kind = RuntimeError  # no way out of the asserts, nor out of a loop in them
            error = kind.__new__(kind, told[1])
        except Exception:  # the program ended; nobody may catch that as an error that it raised
            os._exit(1)
        raise error

    with open(f"/{ASSERTS}", encoding="utf-8") as file:
        tree = ast.parse(file.read())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    _load(ASSERTS, **{name: Remote(ask, name) for name in used - set(dir(builtins))})


def _serve_program(reader: IO[str], writer: IO[str]) -> None:
    """Load the program, then call what the asserts call."""
    objects: dict[int | str, Any] = {}

    def keep(value: Any) -> int:
        objects[len(objects)] = value
        return len(objects) - 1

    try:
        objects |= vars(_load(PROGRAM))
    except BaseException:  # SystemExit, too
        return
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
