"""Tool use: a `World` (see multi_turn.py) that runs the policy's tool calls, and replies.

The policy reads the error messages of its calls. If you reword one, `grpo replay` of an older run
gives other results.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import operator
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

from grpo_components.errors import ConfigError
from grpo_components.objective.component_errors import defined_at
from grpo_components.rewards.sandbox.code_sandbox import CodeSandbox
from grpo_components.rollout.multi_turn import Reply
from grpo_components.rollout.observation_text import quoted
from grpo_components.rollout.samples import Prompt

Tool = Callable[..., str]
"""Function that takes named arguments, checked against its annotations, and returns a text. The
policy sees the message of a ValueError; any other exception fails the sample."""

_MAX_STDERR_CHARS = 500
"""Number of characters from the end of a program's stderr that the policy sees."""
_MAX_CALLS = 8
"""Maximum number of a turn's calls that are run; more could use up the rollout's time."""
TURN_LIMIT_S = 10.0
"""Seconds for all programs of one turn together."""
_RUNNING = threading.BoundedSemaphore(2 * (os.cpu_count() or 1))
"""Limits the programs that run at once to two per CPU core, because some only wait."""
_TYPE_NAMES: dict[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
"""Annotations that are checked (the types of JSON), and their names in error messages."""
_OPENING_TAG = re.compile(r"<tool_call>\s*(?=[\[{])|</?think>")
_ANY_TAG = re.compile(r"</?tool_call>")
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
_MAX_EXPRESSION_CHARS = 200
_MAX_NUMBER = 1e100
"""Largest intermediate result, so that no expression takes long."""


def calculator(expression: str) -> str:
    """Compute an arithmetic expression of numbers, + - * / // % ** and parentheses.

    Args:
        expression: at most 200 characters, without names, calls or attributes.

    Raises:
        ValueError: the expression is not allowed, or has no value.
    """
    if not isinstance(expression, str) or len(expression) > _MAX_EXPRESSION_CHARS:
        raise ValueError(f"expression must be a text of at most {_MAX_EXPRESSION_CHARS} characters")
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
        # Check before computing: 9**9**9 would take all memory.
        if isinstance(node.op, ast.Pow) and abs(right) * math.log10(max(abs(left), 1)) > 100:
            raise ValueError("the power is too large")
        value = _OPERATORS[type(node.op)](left, right)
    else:
        raise ValueError("only numbers, + - * / // % ** and parentheses are known")
    if isinstance(value, complex) or not abs(value) <= _MAX_NUMBER:
        raise ValueError("a number is too large, or none")
    return value


def python_tool(run: Callable[[str], str]) -> Tool:
    """Make a tool that runs a Python program and returns its output."""

    def python(code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: source text of the program.
        """
        if not isinstance(code, str):
            raise ValueError("code must be a text")
        return run(code) or "(the program printed nothing)"

    return python


_LEFT_S = ContextVar[list[float]]("left_s")
"""Seconds left for the programs of this turn; not a tool's argument, because the policy sets those.
In a list, so that programs which a tool runs in a copied context use up the same time."""
_sandbox = cache(CodeSandbox)
"""Returns the process's only sandbox. The first call builds it, and runs a trial program."""


def run_in_sandbox(sandbox: Any, program: str) -> str:
    """Run a program within the time in `_LEFT_S`; return its output and any error."""
    left_s = _LEFT_S.get([math.inf])
    if left_s[0] <= 0:
        raise ValueError(f"not run: the programs of a turn have {TURN_LIMIT_S:g} s together")
    with _RUNNING:
        outcome = sandbox.run(program, wall_s=left_s[0])
    left_s[0] -= outcome.wall_s
    if outcome.status == 0 and not outcome.timed_out:
        return outcome.stdout
    problem = outcome.stderr[-_MAX_STDERR_CHARS:] or f"(ended with status {outcome.status})"
    if outcome.timed_out:
        problem = "(stopped, it took too long)"
    return f"{outcome.stdout}\n{problem}".lstrip("\n")


class ToolUse:
    """A `World` that runs the tool calls of a turn; a turn without a call ends the conversation.

    The reply to a malformed call, an unknown tool or wrong arguments is an error message, and the
    policy may try again.

    Args:
        tools: tool functions, by the name under which the policy calls them.
        call_format: `hermes` (Qwen2.5 and many others: an object with `name` and `arguments` in
            `<tool_call>` tags) or `llama3_json` (the whole turn is an object with `name` and
            `parameters`).
        max_result_characters: maximum characters of a result that the policy sees. Longer results
            lose their middle, because errors are usually at the end.

    Raises:
        ValueError: an unknown format, no tools, or a tool without a signature.
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
            raise ValueError("tools: none given; allowed: at least one")
        self._tools = {name: (tool, _signature(tool)) for name, tool in tools.items()}
        self._find_calls, self._arguments_key, self._frame = _FORMATS[call_format]
        self._max_result_characters = max_result_characters

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of all tools for the prompt, made by transformers from their functions."""
        return [_schema(name, tool) for name, (tool, _) in self._tools.items()]

    def __call__(self, prompt: Prompt, seed: int) -> Callable[[str], Reply]:
        """Begin a conversation; return the function that replies to each turn of the policy."""
        return self._respond

    def _respond(self, text: str) -> Reply:
        calls = self._find_calls(text)
        if not calls:
            return Reply(done=True)
        before = _LEFT_S.set([TURN_LIMIT_S])
        try:
            results = [self._result(call) for call in calls[:_MAX_CALLS]]
        finally:
            _LEFT_S.reset(before)
        if len(calls) > _MAX_CALLS:
            results.append(f"error: only the first {_MAX_CALLS} calls of a turn are run")
        return Reply(self._frame(results))

    def _result(self, call: str) -> str:
        try:
            result = self._run(call).rstrip()
        except ValueError as error:
            result = f"error: {error}"
        if (num_cut := len(result) - self._max_result_characters) > 0:
            start = (self._max_result_characters + 1) // 2
            result = f"{result[:start]} (cut) {result[start + num_cut :]}"
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
            where = defined_at(tool)
            raise TypeError(f"tools.{name}: returned {result!r:.50}{where}; allowed: a text")
        return result


def _schema(name: str, tool: Tool) -> dict[str, Any]:
    from transformers.utils import chat_template_utils  # its import takes seconds

    refused = (
        chat_template_utils.DocstringParsingException,
        chat_template_utils.TypeHintParsingException,
    )
    try:
        found = chat_template_utils.get_json_schema(tool)["function"]
        return tool_schema(name, found["description"], found["parameters"])
    except refused as error:
        allowed = "a function with annotations, and a docstring in Google's format"
        raise ConfigError("environment.world", f"tools.{name}: {error}", allowed) from error


def tool_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a tool as chat templates expect it; `parameters` is a JSON schema."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _signature(tool: Tool) -> inspect.Signature:
    try:
        return inspect.signature(tool, eval_str=True)
    except NameError:  # an annotation that only type checkers can resolve
        return inspect.signature(tool)


def _check_arguments(signature: inspect.Signature, arguments: Mapping[str, Any]) -> None:
    """Raise a ValueError if the tool does not take these arguments."""
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(f"wrong arguments: {error}") from None
    for name in arguments.keys() & signature.parameters.keys():
        kind, given = signature.parameters[name].annotation, type(arguments[name])
        is_checked = any(kind is each for each in _TYPE_NAMES)
        if is_checked and given is not kind and not (kind is float and given is int):
            raise ValueError(f"wrong arguments: {name} must be {_TYPE_NAMES[kind]}")


def shipped_tools(
    tools: Sequence[str] = ("calculator",),
    call_format: str = "hermes",
    max_result_characters: int = 1000,
) -> ToolUse:
    """Build a `ToolUse` with the tools of this package, for a config.

    Args:
        tools: any of `calculator` and `python`.
        call_format: see `ToolUse`.
        max_result_characters: see `ToolUse`.

    Raises:
        ValueError: an unknown tool or format, or no tools.
    """
    known = f"a list of {', '.join(_TOOLS)}"
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise ValueError(f"tools: {tools!r} given; allowed: {known}")
    for name in tools:
        if name not in _TOOLS:
            raise ValueError(f"tools: {name!r} given; allowed: {known}")
    return ToolUse({name: _TOOLS[name]() for name in tools}, call_format, max_result_characters)


def _hermes_calls(text: str) -> list[str]:
    """Return the text of each call: from its opening tag to the next tag, or to the end.

    Text inside `<think>` is no call, and neither is a tag without JSON.
    """
    calls: list[str] = []
    while found := _OPENING_TAG.search(text):
        text = text[found.end() :]
        if found[0] == "<think>":
            text = text.partition("</think>")[2]
        elif found[0] == "</think>":  # the prompt has its opening tag
            calls.clear()
        else:
            try:
                inside = json.JSONDecoder().raw_decode(text)[1]  # a program may contain the tags
            except (ValueError, RecursionError):
                inside = 0
            ended = _ANY_TAG.search(text, inside)
            end = ended.start() if ended else len(text)
            calls.append(text[:end].strip())
            text = text[end:]
    return calls


def _hermes_frame(results: list[str]) -> str:
    """Format tool results like Qwen2.5's chat template: all the text between two policy turns."""
    responses = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in results)
    return f"\n<|im_start|>user{responses}<|im_end|>\n<|im_start|>assistant\n"


def _llama3_calls(text: str) -> list[str]:
    """Return the whole turn as the only call if it begins like the JSON object of a call."""
    text = text.removeprefix("<|python_tag|>").strip()
    return [text] if re.match(r'\{\s*"(name|parameters|type)"', text) else []


def _llama3_frame(results: list[str]) -> str:
    """Format tool results like Llama 3.1's chat template: all the text between two policy turns."""
    quotes = (json.dumps(result, ensure_ascii=False) for result in results)
    header = "<|start_header_id|>ipython<|end_header_id|>"
    responses = "".join(f"{header}\n\n{quote}<|eot_id|>" for quote in quotes)
    return f"{responses}<|start_header_id|>assistant<|end_header_id|>\n\n"


_FORMATS = {
    "hermes": (_hermes_calls, "arguments", _hermes_frame),
    "llama3_json": (_llama3_calls, "parameters", _llama3_frame),
}
_TOOLS: dict[str, Callable[[], Tool]] = {
    "calculator": lambda: calculator,
    "python": lambda: python_tool(partial(run_in_sandbox, _sandbox())),
}
