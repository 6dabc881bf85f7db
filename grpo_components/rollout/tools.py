"""Tool use: calls in the model family's format, run by the world between two of the turns."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import math
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from grpo_components.rollout.environments import Prompt
from grpo_components.rollout.multi_turn import Reply
from grpo_components.rollout.observation_text import quoted

Tool = Callable[..., str]
"""Called with a call's arguments by name, of the kinds that it is annotated with; a ValueError is
told to the policy, anything else is the environment's failure."""

_SHOWN = 500
"""Last characters of a program's errors that are told."""
_MOST_CALLS = 8
"""Of a turn, that are run: a turn of many slow ones would take its rollout's time."""
_TURN_S = 10.0
"""That the programs of a turn may take together, however many calls it has."""
_PROGRAMS_PER_CORE = 2
"""At a time, because some of them wait; CPU time is bounded for each."""
_KINDS: dict[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
"""That JSON has, and that a tool's arguments can be annotated with."""
_OPENED = re.compile(r"<tool_call>\s*")
_ENDED = re.compile(r"</?tool_call>")
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_LONGEST_EXPRESSION = 200
_LARGEST = 1e100
"""Of any number on the way, so that no expression takes long."""


def calculator(expression: str) -> str:
    """The value of an arithmetic expression: numbers, + - * / // % ** and parentheses.

    Args:
        expression: at most 200 characters; no name, call or attribute is known.

    Raises:
        ValueError: saying what is wrong with it.
    """
    if not isinstance(expression, str) or len(expression) > _LONGEST_EXPRESSION:
        raise ValueError(f"expression must be a text of at most {_LONGEST_EXPRESSION} characters")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    except (ArithmeticError, RecursionError) as error:
        raise ValueError(f"{expression!r} has no value: {error}") from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value)


def _evaluate(node: ast.AST) -> int | float:
    value: Any
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_evaluate(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluate(node.left), _evaluate(node.right)
        # Before it is worked out: 9**9**9 would take all memory.
        if isinstance(node.op, ast.Pow) and abs(right) * math.log10(max(abs(left), 1)) > 100:
            raise ValueError("the power is too large")
        value = _OPERATORS[type(node.op)](left, right)
    else:
        raise ValueError("only numbers, + - * / // % ** and parentheses are known")
    if isinstance(value, complex) or not abs(value) <= _LARGEST:
        raise ValueError("a number is too large, or none")
    return value


def python_tool(run: Callable[[str], str]) -> Tool:
    """A tool that runs a program and tells what it printed.

    Args:
        run: program to output, in a sandbox.
    """

    def python(code: str) -> str:
        if not isinstance(code, str):
            raise ValueError("code must be a text")
        return run(code) or "(the program printed nothing)"

    return python


@dataclass
class _Programs:
    """What the programs of one conversation have taken."""

    used_s: float = 0.0
    left_s: float = _TURN_S
    """Of the turn's."""


_PROGRAMS: ContextVar[_Programs | None] = ContextVar("programs", default=None)
"""Of the conversation that calls a tool; a tool's own arguments are the policy's."""


@cache  # one for all environments of a process: it bounds the programs that run at a time
def _sandbox() -> Any:
    # Imported with the tool and not with the module: building it tries it out.
    sandbox = importlib.import_module("grpo_components.rewards.sandbox.code_sandbox")
    return sandbox.CodeSandbox(max_programs=_PROGRAMS_PER_CORE * (os.cpu_count() or 1))


def _run_contained(sandbox: Any, program: str) -> str:
    programs = _PROGRAMS.get()
    if programs is None:
        outcome = sandbox.run(program)
    elif programs.left_s > 0:
        outcome = sandbox.run(program, wall_s=programs.left_s, used_s=programs.used_s)
        programs.used_s += outcome.wall_s
        programs.left_s -= outcome.wall_s
    else:
        raise ValueError(f"not run: the programs of a turn have {_TURN_S:g} s together")
    if outcome.status == 0 and not outcome.timed_out:
        return outcome.stdout
    told = outcome.stderr[-_SHOWN:] or f"(ended with status {outcome.status})"
    if outcome.timed_out:
        told = "(stopped, it took too long)"
    return f"{outcome.stdout}\n{told}".lstrip("\n")


class ToolUse:
    """The world that answers a turn's tool calls, and ends with a turn that calls no tool.

    A call that cannot be read, or names no tool, or has other arguments, is answered with an error
    that says so; the policy may try again.

    Args:
        tools: by the name that the policy calls them by.
        call_format: `hermes` (of Qwen2.5 and many others, an object in `<tool_call>` tags with the
            keys `name` and `arguments`) or `llama3_json` (the turn is an object with the keys
            `name` and `parameters`).
        max_result_characters: of a result; of a longer one the middle is cut out, because a
            program's errors stand at its end.

    Raises:
        ValueError: for a format that is not there, no tools, or a tool without a signature.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        call_format: str = "hermes",
        max_result_characters: int = 1000,
    ) -> None:
        if call_format not in tuple(_FORMATS):
            allowed = ", ".join(_FORMATS)
            raise ValueError(f"call_format: {call_format!r} given; allowed: {allowed}")
        if type(max_result_characters) is not int or max_result_characters < 1:
            given = f"max_result_characters: {max_result_characters!r} given"
            raise ValueError(f"{given}; allowed: a whole number at least 1")
        if not tools:
            raise ValueError("tools: none given; allowed: one or more")
        self._tools = {name: (tool, _signature(tool)) for name, tool in tools.items()}
        self._find_calls, self._arguments_key, self._frame = _FORMATS[call_format]
        self._max_result_characters = max_result_characters

    def __call__(self, prompt: Prompt, seed: int) -> Callable[[str], Reply]:
        """Begin a conversation.

        Args:
            prompt: not used.
            seed: not used.
        """
        return partial(self._respond, _Programs())

    def _respond(self, programs: _Programs, text: str) -> Reply:
        calls = self._find_calls(text)
        if not calls:
            return Reply(done=True)
        programs.left_s = _TURN_S
        before = _PROGRAMS.set(programs)
        try:
            results = [self._result(call) for call in calls[:_MOST_CALLS]]
        finally:
            _PROGRAMS.reset(before)
        if len(calls) > _MOST_CALLS:
            results.append(f"error: only the first {_MOST_CALLS} calls of a turn are run")
        return Reply(self._frame(results))

    def _result(self, call: str) -> str:
        try:
            result = self._run(call).rstrip()
        except ValueError as error:
            result = f"error: {error}"
        if (too_many := len(result) - self._max_result_characters) > 0:
            start = (self._max_result_characters + 1) // 2
            result = f"{result[:start]} (cut) {result[start + too_many :]}"
        return quoted(result)

    def _run(self, call: str) -> str:
        form = f'{{"name": ..., "{self._arguments_key}": {{...}}}}'
        try:
            given = json.loads(call)
        except (ValueError, RecursionError):
            raise ValueError(f"the call is not JSON; expected {form}") from None
        arguments = given.get(self._arguments_key) if isinstance(given, dict) else None
        if not isinstance(arguments, dict):
            raise ValueError(f"the call has another form; expected {form}")
        name = str(given.get("name"))
        if name not in self._tools:
            known = ", ".join(self._tools)
            raise ValueError(f"there is no tool {given.get('name')!r:.50}; known: {known}")
        tool, signature = self._tools[name]
        _check_arguments(signature, arguments)
        result = tool(**arguments)
        if not isinstance(result, str):
            raise TypeError(f"the tool {name} gave {result!r:.50}; allowed: a text")
        return result


def _signature(tool: Tool) -> inspect.Signature:
    try:
        return inspect.signature(tool, eval_str=True)
    except NameError:  # in an annotation, known to type checkers only
        return inspect.signature(tool)


def _check_arguments(signature: inspect.Signature, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the tool does not take, of whatever kind the policy wrote them."""
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(f"wrong arguments: {error}") from None
    for name in arguments.keys() & signature.parameters.keys():
        kind, given = signature.parameters[name].annotation, type(arguments[name])
        known = any(kind is each for each in _KINDS)
        if known and given is not kind and not (kind is float and given is int):
            raise ValueError(f"wrong arguments: {name} must be {_KINDS[kind]}")


def shipped_tools(
    tools: Sequence[str] = ("calculator",),
    call_format: str = "hermes",
    max_result_characters: int = 1000,
) -> ToolUse:
    """`ToolUse` with tools by name, for a config.

    Args:
        tools: of `calculator` and `python`.
        call_format: see `ToolUse`.
        max_result_characters: see `ToolUse`.

    Raises:
        ValueError: for a tool or format that is not there.
    """
    known = f"a list of {', '.join(_TOOLS)}"
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise ValueError(f"tools: {tools!r} given; allowed: {known}")
    for name in tools:
        if name not in _TOOLS:
            raise ValueError(f"tools: {name!r} given; allowed: {known}")
    return ToolUse({name: _TOOLS[name]() for name in tools}, call_format, max_result_characters)


def _hermes_calls(text: str) -> list[str]:
    """What stands between the tags; a call that is not closed runs to the end."""
    calls = []
    while found := _OPENED.search(text):
        text = text[found.end() :]
        try:
            inside = json.JSONDecoder().raw_decode(text)[1]  # a program may have the tags, too
        except (ValueError, RecursionError):
            inside = 0
        ended = _ENDED.search(text, inside)
        end = ended.start() if ended else len(text)
        calls.append(text[:end].strip())
        text = text[end:]
    return calls


def _hermes_frame(results: list[str]) -> str:
    """As Qwen2.5's chat template has it, from the end of the policy's turn to its next."""
    told = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in results)
    return f"\n<|im_start|>user{told}<|im_end|>\n<|im_start|>assistant\n"


def _llama3_calls(text: str) -> list[str]:
    """The whole turn, where it is an object with a name."""
    text = text.removeprefix("<|python_tag|>").strip()
    return [text] if re.match(r'\{\s*"(name|parameters|type)"', text) else []


def _llama3_frame(results: list[str]) -> str:
    """As Llama 3.1's chat template has it."""
    quotes = (json.dumps(result, ensure_ascii=False) for result in results)
    told = (f"<|start_header_id|>ipython<|end_header_id|>\n\n{quote}<|eot_id|>" for quote in quotes)
    return f"{''.join(told)}<|start_header_id|>assistant<|end_header_id|>\n\n"


_FORMATS = {
    "hermes": (_hermes_calls, "arguments", _hermes_frame),
    "llama3_json": (_llama3_calls, "parameters", _llama3_frame),
}
_TOOLS: dict[str, Callable[[], Tool]] = {
    "calculator": lambda: calculator,
    "python": lambda: python_tool(partial(_run_contained, _sandbox())),
}
