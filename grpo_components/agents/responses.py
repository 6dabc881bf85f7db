"""OpenAI's Responses: reads a request as a turn of a chat, and writes the turn as output items."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from grpo_components.agents.requests import RequestError

_SAME = (
    *("model", "temperature", "top_p", "seed", "user", "metadata", "store", "service_tier"),
    *("safety_identifier", "prompt_cache_key", "parallel_tool_calls", "chat_template_kwargs"),
    "stream",
)
_OWN = ("input", "instructions", "max_output_tokens", "tools", "tool_choice")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([],),
    "text": ({}, {"format": {"type": "text"}}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat request that asks the same as a request for a response."""
    given = {name: value for name, value in body.items() if value is not None}
    if given.get("stream"):
        raise RequestError("stream: true given; allowed: false, or chat/completions", "stream")
    for name, value in given.items():
        if name not in (*_SAME, *_OWN) and value not in _NEUTRAL.get(name, ()):
            raise RequestError(f"{name}: not supported; allowed: leave it out", name)
    messages = _messages(given.get("input"))
    if "instructions" in given:
        messages = [{"role": "system", "content": given["instructions"]}, *messages]
    chat = {name: given[name] for name in _SAME if name in given} | {"messages": messages}
    if "max_output_tokens" in given:
        chat["max_tokens"] = given["max_output_tokens"]
    if tools := given.get("tools"):
        chat["tools"] = [_tool(tool) for tool in tools] if isinstance(tools, list) else tools
    return chat | ({"tool_choice": given["tool_choice"]} if "tool_choice" in given else {})


def response_body(request: Mapping[str, Any], chat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response that says the same as the answer to a chat."""
    identity, choice, usage = chat["id"], chat["choices"][0], chat["usage"]
    message, cut = choice["message"], choice["finish_reason"] == "length"
    status = "incomplete" if cut else "completed"
    output: list[dict[str, Any]] = []
    if message["content"]:
        content = {"type": "output_text", "text": message["content"], "annotations": []}
        own = {"id": f"msg_{identity}", "type": "message", "role": "assistant"}
        output.append({**own, "status": status, "content": [content]})
    for call in message.get("tool_calls", ()):
        own = {"id": f"fc_{call['id']}", "type": "function_call", "call_id": call["id"]}
        output.append({**own, "status": "completed", **call["function"]})
    return {
        "id": identity,  # that of the chat's answer, under which it can be rewarded
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": request.get("instructions"),
        "metadata": request.get("metadata") or {},
        "model": chat["model"],
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _messages(given: Any) -> list[dict[str, Any]]:
    """Return the messages of an input: a text, or items. Calls join the turn that made them."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    allowed = "a text, or a list of messages, function calls and their outputs"
    if not isinstance(given, list):
        raise RequestError(f"input: {given!r:.60} given; allowed: {allowed}", "input")
    messages: list[dict[str, Any]] = []
    for item in given:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message" and isinstance(item.get("role"), str):
            messages.append({"role": item["role"], "content": item.get("content", "")})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {name: item.get(name, "") for name in ("name", "arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = item.get("output", "")
            text = output if isinstance(output, str) else json.dumps(output)
            call_id = item.get("call_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            raise RequestError(f"input: {item!r:.60} given; allowed: {allowed}", "input")
    return messages


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise RequestError(f"tools: {tool!r:.60} given; allowed: functions", "tools")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
