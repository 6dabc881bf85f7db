"""Encodes prompts as token ids, either from plain text or in a chat format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torchtune.data import Message

from grpo_components.data.rows import Question
from grpo_components.errors import ConfigError

Encode = Callable[[Question], tuple[list[int], str]]
"""Function that turns a question into the token ids [P] of its prompt, and the prompt's text."""
_EncodeChat = Callable[[list[dict[str, Any]]], tuple[list[int], str]]
_TOOLS = "{tools}"
_LOOP_OVER_PARTS = re.compile(
    r"""\{%-?\s*for\s+\w+\s+in\s+(?:\w+\.content|\w+\[["']content["']\]|content)(?![\w.(])"""
)
"""Finds a chat template's loop over the parts of a message, as vLLM's chat endpoint does."""


def prompt_encoder(
    tokenizer: Any,
    template: str,
    chat_template: str | None,
    system_prompt: str | None,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> Encode:
    """Make a function that turns a question into a prompt.

    `template` is put around a text, or around the last message of a chat.
    """
    if not isinstance(template, str) or template.count("{question}") != 1:
        allowed = "a text that contains {question} once"
        raise ConfigError("dataset.prompt_template", f"{template!r} given", allowed)
    described = _TOOLS in template + (system_prompt or "")
    template = _with_tools("prompt_template", template, tools)
    if system_prompt is not None:
        system_prompt = _with_tools("system_prompt", system_prompt, tools)
    if chat_template is None and system_prompt is not None:
        allowed = "null, or a chat_template with it"
        raise ConfigError("dataset.system_prompt", "needs a chat_template", allowed)
    if variables and chat_template in (None, "torchtune"):
        problem = f"given, and {chat_template or 'null'} as chat_template takes no variables"
        raise ConfigError("dataset.chat_template_kwargs", problem, "null, or a model folder there")

    def messages(question: Question) -> list[dict[str, Any]]:
        chat = [{"role": "user", "content": question}] if isinstance(question, str) else question
        text = template.replace("{question}", chat[-1]["content"])
        whole = [*chat[:-1], {**chat[-1], "content": text}]
        has_own = system_prompt is None or whole[0]["role"] == "system"
        return whole if has_own else [{"role": "system", "content": system_prompt}, *whole]

    if chat_template is None:
        encode = _plain(tokenizer)
    elif chat_template == "torchtune":
        encode = _torchtune_chat(tokenizer)
    else:
        offered = () if described else tools
        roles = tuple(message["role"] for message in messages(""))
        encode = _hugging_face_chat(chat_template, roles, offered, variables or {})
    return lambda question: encode(messages(question))


def _with_tools(key: str, text: str, tools: Sequence[Mapping[str, Any]]) -> str:
    if _TOOLS in text and not tools:
        problem = f"has {_TOOLS}, and environment.world has no tools"
        raise ConfigError(f"dataset.{key}", problem, f"a text without {_TOOLS}")
    return text.replace(_TOOLS, "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def _plain(tokenizer: Any) -> _EncodeChat:
    def encode(messages: list[dict[str, Any]]) -> tuple[list[int], str]:
        if len(messages) > 1:
            problem = f"null given, and a prompt is a chat of {len(messages)} messages"
            raise ConfigError("dataset.chat_template", problem, "torchtune, or a model folder")
        text = messages[0]["content"]
        return tokenizer.encode(text, add_bos=True, add_eos=False), text

    return encode


def _torchtune_chat(tokenizer: Any) -> _EncodeChat:
    if not hasattr(tokenizer, "tokenize_messages"):
        problem = f"torchtune given, but {type(tokenizer).__name__} cannot encode messages"
        raise ConfigError("dataset.chat_template", problem, "null, or a model folder")

    def encode(messages: list[dict[str, Any]]) -> tuple[list[int], str]:
        # The prompt is the common prefix of two chats with different answers. (An empty answer does
        # not work: some torchtune tokenizers add an end of turn after it.)
        first, second = (
            tokenizer(
                {
                    "messages": [
                        Message(role=message["role"], content=message["content"])
                        for message in [*messages, {"role": "assistant", "content": answer}]
                    ]
                },
                inference=True,
            )["tokens"]
            for answer in ("0", "A")
        )
        pairs = enumerate(zip(first, second, strict=False))
        end = next((place for place, (a, b) in pairs if a != b), None)
        if end is None:
            limit = f"tokenizer.max_seq_len, {tokenizer.max_seq_len}, is shorter than a prompt"
            raise ConfigError("dataset.chat_template", limit, "null there")
        return first[:end], tokenizer.decode(first[:end])

    return encode


def _hugging_face_chat(
    folder: str,
    usual_roles: tuple[str, ...],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> _EncodeChat:
    tokenizer, template = _chat_tokenizer(folder)
    # As in vLLM: some templates expect the content as a text, some as a list of parts.
    in_parts = reads_parts(template)
    plain_variables: Any = OmegaConf.to_container(OmegaConf.create(dict(variables)))

    def render(messages: list[dict[str, Any]]) -> str:
        shown = [
            {**each, "content": [{"type": "text", "text": each["content"]}]} if in_parts else each
            for each in messages
        ]
        try:
            return tokenizer.apply_chat_template(
                shown,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **plain_variables,
            )
        except Exception as error:  # a template is a program and may raise anything
            problem = f"the template of {folder} failed: {error}"
            raise ConfigError("dataset.chat_template", problem, "null, or torchtune") from error

    @cache
    def check(roles: tuple[str, ...]) -> None:
        """Refuse a template that leaves out a message of a chat with these roles."""
        marks = [f"7f3b{place}c91e" for place in range(len(roles))]
        pairs = list(zip(roles, marks, strict=True))
        rendered = render([{"role": role, "content": mark} for role, mark in pairs])
        for role, mark in pairs:
            if mark not in rendered:
                what = {"user": "question", "system": "system prompt"}.get(role, f"{role}'s turn")
                problem = f"the template of {folder} leaves out the {what}"
                raise ConfigError("dataset.chat_template", problem, "null, or torchtune")

    check(usual_roles)

    def encode(messages: list[dict[str, Any]]) -> tuple[list[int], str]:
        check(tuple(message["role"] for message in messages))
        prompt = render(messages)
        # The template has already added the token for the beginning.
        return tokenizer(prompt, add_special_tokens=False)["input_ids"], prompt

    return encode


def reads_parts(template: str) -> bool:
    """Whether a chat template expects the content of a message as a list of parts."""
    return _LOOP_OVER_PARTS.search(template) is not None


def _chat_tokenizer(folder: str) -> tuple[Any, str]:
    """Load the tokenizer of a model folder; return it with its chat template."""
    if not folder or not Path(folder).is_dir():
        allowed = "null, torchtune, or a model folder such as ${base_model_path}"
        raise ConfigError("dataset.chat_template", f"{folder!r} given", allowed)
    from transformers import AutoTokenizer  # takes a second

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        template = tokenizer.get_chat_template() if tokenizer.chat_template else None
    except Exception as error:  # broken tokenizer files may raise anything
        problem = f"cannot load a tokenizer from {folder}: {type(error).__name__}: {error}"
        raise ValueError(f"dataset.chat_template: {problem}") from error
    if not template:
        problem = f"the tokenizer of {folder} has no chat template"
        raise ConfigError("dataset.chat_template", problem, "null, or torchtune")
    return tokenizer, template
