"""Encodes prompts as token ids, either from plain text or in a chat format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtune.data import Message
from transformers import AutoTokenizer

from grpo_components.errors import ConfigError

Encode = Callable[[str], tuple[list[int], str]]
"""Function that turns a question into the token ids [P] of its prompt, and the prompt's text."""
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
) -> Encode:
    """Make a function that turns a question into a prompt.

    Args:
        tokenizer: torchtune's tokenizer.
        template: text around the question; contains `{question}` once. `{tools}` in it, or in the
            system prompt, becomes the JSON schemas of the tools, one a line.
        chat_template: None encodes the plain text. `torchtune` encodes messages with `tokenizer`
            and its `prompt_template`. The path of a model folder selects the Hugging Face chat
            template and tokenizer in it, which give the same ids as vLLM's chat endpoint.
        system_prompt: system message of a chat; None leaves it to the chat template.
        tools: JSON schemas of the tools that the policy may call. A Hugging Face chat template
            gets them, unless template or system prompt have them already.

    Raises:
        ValueError: a setting cannot be used; the message names its key.
    """
    if not isinstance(template, str) or template.count("{question}") != 1:
        allowed = "a text that contains {question} once"
        raise ConfigError("dataset.prompt_template", f"{template!r} given", allowed)
    texts = {"prompt_template": template, "system_prompt": system_prompt or ""}
    described = _TOOLS in template + texts["system_prompt"] or _has_schemas(texts.values(), tools)
    filled = {key: _with_tools(key, text, tools) for key, text in texts.items()}
    template = filled["prompt_template"]
    system_prompt = None if system_prompt is None else filled["system_prompt"]
    if chat_template is None:
        if system_prompt is not None:
            allowed = "null, or a chat_template with it"
            raise ConfigError("dataset.system_prompt", "needs a chat_template", allowed)
        encode = _plain(tokenizer)
    elif chat_template == "torchtune":
        encode = _torchtune_chat(tokenizer, system_prompt)
    else:
        encode = _hugging_face_chat(chat_template, system_prompt, () if described else tools)
    return lambda question: encode(template.replace("{question}", question))


def _with_tools(key: str, text: str, tools: Sequence[Mapping[str, Any]]) -> str:
    if _TOOLS in text and not tools:
        problem = f"has {_TOOLS}, and environment.world has no tools"
        raise ConfigError(f"dataset.{key}", problem, f"a text without {_TOOLS}")
    return text.replace(_TOOLS, "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def _has_schemas(texts: Iterable[str], tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether texts describe all tools by JSON schemas, as typed by hand."""
    whole = "\n".join(texts)
    names = [f'"{tool["function"]["name"]}"' for tool in tools]
    return '"parameters"' in whole and all(name in whole for name in names)


def _plain(tokenizer: Any) -> Encode:
    return lambda text: (tokenizer.encode(text, add_bos=True, add_eos=False), text)


def _torchtune_chat(tokenizer: Any, system_prompt: str | None) -> Encode:
    if not hasattr(tokenizer, "tokenize_messages"):
        problem = f"torchtune given, but {type(tokenizer).__name__} cannot encode messages"
        raise ConfigError("dataset.chat_template", problem, "null, or a model folder")
    system = [] if system_prompt is None else [Message(role="system", content=system_prompt)]

    def encode(text: str) -> tuple[list[int], str]:
        # The prompt is the common prefix of two chats with different answers. (An empty answer does
        # not work: some torchtune tokenizers add an end of turn after it.)
        first, second = (
            tokenizer(
                {
                    "messages": [
                        *system,
                        Message(role="user", content=text),
                        Message(role="assistant", content=answer),
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
    folder: str, system_prompt: str | None, tools: Sequence[Mapping[str, Any]]
) -> Encode:
    tokenizer, template = _chat_tokenizer(folder)
    # As in vLLM: some templates expect the content as a text, some as a list of parts.
    in_parts = reads_parts(template)

    def render(text: str, system: str | None) -> str:
        turns = ([] if system is None else [("system", system)]) + [("user", text)]
        messages = [
            {"role": role, "content": [{"type": "text", "text": t}] if in_parts else t}
            for role, t in turns
        ]
        try:
            return tokenizer.apply_chat_template(
                messages,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # a template is a program and may raise anything
            problem = f"the template of {folder} failed: {error}"
            raise ValueError(f"dataset.chat_template: {problem}") from error

    marks = {"question": "7f3b"} | ({} if system_prompt is None else {"system prompt": "c91e"})
    rendered = render(marks["question"], marks.get("system prompt"))
    for name, mark in marks.items():
        if mark not in rendered:
            problem = f"the template of {folder} leaves out the {name}"
            raise ConfigError("dataset.chat_template", problem, "null, or torchtune")

    def encode(text: str) -> tuple[list[int], str]:
        prompt = render(text, system_prompt)
        # The template has already added the token for the beginning.
        return tokenizer(prompt, add_special_tokens=False)["input_ids"], prompt

    return encode


def reads_parts(template: str) -> bool:
    """Whether a chat template expects the content of a message as a list of parts.

    Args:
        template: Jinja text of the template.
    """
    return _LOOP_OVER_PARTS.search(template) is not None


def _chat_tokenizer(folder: str) -> tuple[Any, str]:
    """Load the tokenizer of a model folder; return it with its chat template."""
    if not folder or not Path(folder).is_dir():
        allowed = "null, torchtune, or a model folder such as ${base_model_path}"
        raise ConfigError("dataset.chat_template", f"{folder!r} given", allowed)
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
