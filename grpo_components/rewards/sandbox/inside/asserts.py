"""Script that runs in two connected sandboxes: one for the asserts, one for the program they test.

Only plain data (numbers, text, lists, ...) and references to objects of the program cross between
the two; expected results never do. So a program gains nothing by patching `==`, returning objects
that equal everything, or exiting early. The asserts can use an object's own operators only if they
made the object, by calling a class of the program or by arithmetic on such an object. Arithmetic
between an object and plain data may give another object, but no plain data.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.machinery
import importlib.util
import json
import operator
import os
import sys
from collections.abc import Callable
from typing import IO, Any, NamedTuple

ASSERTS, PROGRAM = "asserts.py", "program.py"
"""Files in the root folder of a sandbox; the one that exists decides what this process runs."""

PACKAGES = "/packages"
"""Folder of the packages that the asserts, but not the program, can import."""

NAMES = "names.json"
"""File next to the asserts: a JSON list of the names that the program must define."""

UNFIT = 3
"""Exit status if the asserts pass the program a value that cannot cross; stderr names its type."""

_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_BINARY = [name for name in dir(operator) if hasattr(operator, f"__i{name[2:]}")]
_ARITHMETIC = [*_BINARY, *(f"__i{name[2:]}" for name in _BINARY)]
_ARITHMETIC += ["__neg__", "__pos__", "__abs__", "__invert__"]
_OF_MADE = ("__bool__", "__hash__", "__contains__")
"""Methods that a proxy (`Remote`), like its operators, has only if the asserts made its object."""
_OPTIONAL = ("__call__", "__iter__", "__next__", "__len__", "__getitem__", "__setitem__")
_OPTIONAL += ("__delitem__", "__reversed__", "send", "throw", "close", "__enter__", "__exit__")
"""A `Remote` has these only if the program's object has them, because `isinstance` checks them."""
_ALL = ("__str__", "__repr__", "__instancecheck__", "__subclasscheck__")

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "__call__": lambda target, *args, **kwargs: target(*args, **kwargs),
    "__exit__": lambda target: type(target).__exit__(target, None, None, None),
    "__instancecheck__": lambda kind, value: isinstance(value, kind),
    "__subclasscheck__": lambda kind, value: issubclass(value, kind),
    **{f"__{f.__name__}__": f for f in (bool, hash, iter, len, next, repr, reversed, str)},
    **{f.__name__: f for f in (getattr, setattr)},
}
"""Functions that the asserts can request of the program; other names are operators or methods."""

_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}

# Further types that cross by value: for each type name, its module and a function that takes a
# value apart into constructor arguments.
_VALUES: dict[str, tuple[str, Callable[[Any], list[Any]]]] = {
    "complex": ("builtins", lambda v: [v.real, v.imag]),
    "range": ("builtins", lambda v: [v.start, v.stop, v.step]),
    "slice": ("builtins", lambda v: [v.start, v.stop, v.step]),
    "deque": ("collections", lambda v: [list(v), v.maxlen]),
    "Decimal": ("decimal", lambda v: [str(v)]),
    "Fraction": ("fractions", lambda v: [v.numerator, v.denominator]),
    "date": ("datetime", lambda v: [v.year, v.month, v.day]),
    "timedelta": ("datetime", lambda v: [v.days, v.seconds, v.microseconds]),
}

_COMMON_ATTRIBUTES = ("__name__", "__qualname__", "__doc__", "__annotations__")
"""Attributes that `Remote` itself has; their values are read from the program's object instead."""

_STATE = " state"
"""Attribute that holds the `_State` of a proxy. It is no identifier, so no program can use it."""


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Convert plain data to JSON data; `keep` returns a reference to send for any other object."""
    if type(value).__module__ == "numpy":
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return [name, [encode(item, keep) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(k, keep), encode(v, keep)] for k, v in value.items()]]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    kind = type(value)
    if (known := _VALUES.get(kind.__name__)) and kind.__module__ == known[0]:
        return [kind.__name__, [encode(part, keep) for part in known[1](value)]]
    return ["object", keep(value)]


def decode(data: Any, find: Callable[[Any], Any]) -> Any:
    """Undo `encode`, building only standard types; `find` turns a reference into an object."""
    if not isinstance(data, list):
        return data
    name, content = data
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(item, find) for item in content)
    if name == "dict":
        return {decode(k, find): decode(v, find) for k, v in content}
    if name == "bytes":
        return bytes.fromhex(content)
    if name in _VALUES:
        kind = getattr(importlib.import_module(_VALUES[name][0]), name)
        return kind(*(decode(part, find) for part in content))
    return find(content)


class _State(NamedTuple):
    """State of a proxy: how to ask the program, and which of its objects the proxy stands for."""

    ask: Callable[..., Any]
    number: int | str
    made_by: str = ""
    """ "call" or "operator" if the asserts made the object, "raise" if they caught it."""


def _state(value: Any) -> _State | None:
    return getattr(value, "__dict__", {}).get(_STATE)


def _request(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    state: _State = vars(self)[_STATE]
    return state.ask(name, args, kwargs)


def _get(self: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _request(self, "getattr", self, name)


def _sent(name: str) -> Callable[..., Any]:
    """Make a method of a proxy: the real object carries it out, in the program's sandbox."""
    return lambda self, *args, **kwargs: _request(self, name, self, *args, **kwargs)


def _reflected(name: str) -> Callable[..., Any]:
    return lambda self, other: _request(self, name, other, self)


def _never(self: Any) -> Any:
    raise TypeError("the truth value of an object of the program is no answer")


def _compared(name: str) -> Callable[..., Any]:
    def compare(self: Any, other: Any) -> Any:
        if other is None and name in ("__eq__", "__ne__"):
            return name == "__ne__"
        states = [state for state in (_state(self), _state(other)) if state]
        if len(states) < 2 or not any(state.made_by for state in states):
            raise TypeError("an object of the program cannot be compared")
        return _request(self, name, self, other)

    return compare


class Remote:
    """Template for proxies of the program's objects; `remote_type` adds each object's methods."""

    def __init__(self, ask: Callable[..., Any], number: int | str, made_by: str = "") -> None:
        vars(self)[_STATE] = _State(ask, number, made_by)

    def __getattribute__(self, name: str) -> Any:
        if name in _COMMON_ATTRIBUTES:
            return _request(self, "getattr", self, name)
        return object.__getattribute__(self, name)

    __getattr__ = _get

    def __setattr__(self, name: str, value: Any) -> None:
        _request(self, "setattr", self, name, value)

    __hash__ = __contains__ = None  # pyright: ignore[reportAssignmentType]


@functools.cache
def remote_type(has: frozenset[str], is_made: bool) -> type:
    """Make a class of proxies with only the optional methods in `has`; `is_made` adds operators.

    So `callable(x)` and `isinstance(x, Iterator)`, which look for these methods, are correct.
    """
    left_out = ("__dict__", "__weakref__")
    body = {name: part for name, part in vars(Remote).items() if name not in left_out}
    body |= {name: _sent(name) for name in (*_ALL, *has.intersection(_OPTIONAL))}
    body |= {name: _compared(name) for name in _COMPARISONS}
    if is_made:
        body |= {name: _sent(name) for name in (*_ARITHMETIC, *_OF_MADE)}
        body |= {f"__r{name[2:]}": _reflected(name) for name in _BINARY}
    elif has & {"__bool__", "__len__"}:
        body["__bool__"] = _never
    if "__exit__" in has:  # never hides an error of the asserts
        body["__exit__"] = lambda self, *_: _request(self, "__exit__", self) and None
    return type("Remote", (), body)


class _ErrorType(type):
    """Metaclass of the classes that stand for the program's exceptions."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _request(cls, "__call__", cls, *args, **kwargs)

    __getattr__ = _get


def _methods(value: Any) -> list[str]:
    """Return which of `_OPTIONAL` and `__bool__` the class of an object has."""
    spaces, names = [vars(kind) for kind in reversed(type(value).__mro__)], (*_OPTIONAL, "__bool__")
    found = {name: space[name] for space in spaces for name in names if name in space}
    return [name for name, method in found.items() if method is not None]


def _answer(value: Any) -> Any:
    """Return an assert's value; refuse an object that the program made, which could lie."""
    if (state := _state(value)) and not state.made_by:
        raise TypeError("an object of the program is no answer")
    return value


def _load(name: str, **names: Any) -> Any:
    """Run a Python file as a module; in the asserts file, each assert's value goes to `_answer`."""
    path, stem = f"/{name}", name.removesuffix(".py")
    loader = importlib.machinery.SourceFileLoader(stem, path)
    spec = importlib.util.spec_from_file_location(stem, path, loader=loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    vars(module).update(names)
    sys.modules[module.__name__] = module
    with open(path, "rb") as file:
        tree = ast.parse(file.read())
    for node in ast.walk(tree) if name == ASSERTS else ():
        if isinstance(node, ast.Assert):
            call = ast.Call(ast.Name(_STATE, ast.Load()), [node.test], [])
            node.test = ast.fix_missing_locations(ast.copy_location(call, node.test))
    code = compile(tree, path, "exec", dont_inherit=True)
    exec(code, vars(module))  # noqa: S102  # it runs in a sandbox
    return module


def _kinds(kind: type) -> list[Any]:
    """Return [name of a class, its bases in the same form]; no bases if the class is builtin."""
    is_builtin = vars(builtins).get(kind.__name__) is kind
    return [kind.__name__, [] if is_builtin else [_kinds(base) for base in kind.__bases__]]


def _check_asserts(reader: IO[str], writer: IO[str]) -> None:
    """Run the asserts, with proxies for the functions and classes that the program defines."""
    named: dict[int | str, str] = {}
    errors: dict[str, type] = {}

    def error_type(name: str, bases: list[Any]) -> Any:
        if not bases:
            return vars(builtins)[name]
        if name not in errors:
            kinds, body = tuple(error_type(*base) for base in bases), {"__getattr__": _get}
            errors[name] = _ErrorType(name, kinds, body)
        return errors[name]

    def ask(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states = [_state(arg) for arg in args]

        def number(value: Any) -> int | str:
            if state := _state(value):
                return state.number
            if states[0] and states[0].number not in named:  # an object that the program returned
                os._exit(1)
            sys.stderr.write(f"a {type(value).__name__}")
            sys.stderr.flush()
            os._exit(UNFIT)

        def find(reference: list[Any]) -> Any:
            found, methods, kinds = reference
            if kinds and kinds[1]:  # not a builtin class, which could hide a failed assert
                kind = error_type(*kinds)
                setattr(kind, _STATE, _State(ask, found))
                return kind
            made_by = "call" if name == "__call__" and is_class(states[0]) else ""
            if name in _ARITHMETIC or (name == "__enter__" and states[0] and states[0].made_by):
                made_by = "operator"
            return remote_type(frozenset(methods), bool(made_by))(ask, found, made_by)

        try:
            request = [name, encode(args, number), encode(kwargs, number)]
            writer.write(json.dumps(request) + "\n")
            writer.flush()
            answer, failure = json.loads(reader.readline())
            result = decode(answer, find)
            if failure is None:
                of_calls = all(state and state.made_by == "call" for state in states)
                if name not in (*_ARITHMETIC, "__bool__") or of_calls or _state(result):
                    return result
                failure = 0, ["TypeError", []], f"plain data of {name} is no answer"
            reference, kinds, text = failure
            kind = error_type(*kinds)
            ends_loop = issubclass(kind, StopIteration) and name != "__next__"
            if not issubclass(kind, Exception) or ends_loop:
                kind = RuntimeError  # the original would end the asserts, or a loop in them
            error: Exception = kind.__new__(kind, text)
            error.__dict__[_STATE] = _State(ask, reference, "raise")
        except Exception:  # the program exited: the asserts must not catch this
            os._exit(1)
        raise error

    def is_class(state: _State | None) -> bool:
        return state is not None and named.get(state.number, "")[:1].isupper()

    with open(f"/{NAMES}", encoding="utf-8") as file:
        names: list[str] = json.load(file)
    # A name that the program does not define is an error only if the asserts use it.
    given = ask("names", (names,), {})
    named |= {state.number: name for name, value in given.items() if (state := _state(value))}
    undefined = {name: remote_type(frozenset(_OPTIONAL), False)(ask, name) for name in names}
    _load(ASSERTS, **undefined | given, **{_STATE: _answer})


def _serve_program(reader: IO[str], writer: IO[str]) -> None:
    """Load the program, then carry out what the asserts request."""
    objects: dict[int, Any] = {}

    def keep(value: Any) -> tuple[int, list[str], list[Any] | None]:
        objects[len(objects)] = value
        is_error = isinstance(value, type) and issubclass(value, BaseException)
        return len(objects) - 1, _methods(value), _kinds(value) if is_error else None

    try:
        program = vars(_load(PROGRAM))
    except BaseException:  # including SystemExit
        return
    functions = _FUNCTIONS | {"names": lambda names: {n: program[n] for n in names if n in program}}
    for line in reader:
        name, *rest = json.loads(line)
        args, kwargs = (decode(part, objects.__getitem__) for part in rest)  # a missing name: exit
        try:
            function = functions.get(name) or getattr(operator, name, None)
            if function is None:  # `send`, `__enter__`
                function = getattr(type(args[0]), name)
            message = json.dumps([encode(function(*args, **kwargs), keep), None])
        except BaseException as error:  # raised by the program
            is_text = len(error.args) == 1 and isinstance(error.args[0], str)
            text = error.args[0] if is_text else str(error)
            message = json.dumps([None, [keep(error)[0], _kinds(type(error)), text]])
        writer.write(message + "\n")
        writer.flush()


if __name__ == "__main__":
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's; more need memory beyond the limit
    sys.path.append(PACKAGES)
    # Whatever the program prints is discarded.
    _streams = [os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")]
    for _number, _flags in ((0, os.O_RDONLY), (1, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, _flags), _number)
    (_check_asserts if os.path.exists(f"/{ASSERTS}") else _serve_program)(*_streams)
