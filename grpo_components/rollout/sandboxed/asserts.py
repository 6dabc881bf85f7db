"""Run as a script in two sandboxes: one has the asserts, the other the program that they call.

Nothing but plain data (numbers, text, lists, ...) crosses between them, and what is expected never
does: to patch `==`, to return objects that equal everything, or to end early wins nothing.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

ASSERTS, PROGRAM = "asserts.py", "program.py"
"""Files in the root folder: which of them is there decides what this process is."""

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

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("list", self._number))

    def _never(self, *_: Any) -> Any:
        raise TypeError("the program gave an object of its own, which equals nothing here")

    __eq__ = __ne__ = __bool__ = __len__ = __contains__ = _never
    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _load(name: str, **names: Any) -> Any:
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), f"/{name}")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    vars(module).update(names)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def _check_asserts(reader: IO[str], writer: IO[str]) -> None:
    """Run the asserts; names that they do not define are the program's."""

    def number(value: Any) -> int | str:
        if type(value) is not Remote:
            raise TypeError(f"{type(value).__name__} cannot be handed to the program")
        return value._number

    def ask(*request: Any) -> Any:
        writer.write(json.dumps([encode(part, number) for part in request]) + "\n")
        writer.flush()
        answer, problem = json.loads(reader.readline())
        if problem is not None:
            raise RuntimeError(f"the program raised {problem}")
        return decode(answer, lambda n: Remote(ask, n))

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

    def answer(kind: str, number: int | str, *rest: Any) -> Any:
        target = objects[number]
        if kind == "call":
            return target(*rest[0], **rest[1])
        return getattr(target, rest[0]) if kind == "attribute" else list(target)

    problem = None
    try:
        objects |= vars(_load(PROGRAM))
    except BaseException as error:  # SystemExit, too: it is no way out of the asserts
        problem = repr(error)
    for line in reader:
        message = json.dumps([None, problem])
        if problem is None:
            try:
                request = [decode(part, objects.__getitem__) for part in json.loads(line)]
                message = json.dumps([encode(answer(*request), keep), None])
            except BaseException as error:  # the program's, whatever it is
                message = json.dumps([None, repr(error)])
        writer.write(message + "\n")
        writer.flush()


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    # The program may print: what it prints goes nowhere.
    _streams = [os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")]
    for _number, _flags in ((0, os.O_RDONLY), (1, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, _flags), _number)
    (_check_asserts if os.path.exists(f"/{ASSERTS}") else _serve_program)(*_streams)
