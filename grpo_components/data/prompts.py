"""Token ids of a prompt: from plain text, or in the chat format that the policy was taught."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtune.data import Message
from transformers import AutoTokenizer

Encode = Callable[[str], tuple[list[int], str]]
"""A question as the token ids [P] of its prompt, and the text of these."""
_LOOP_OVER_PARTS = re.compile(
    r"""\{%-?\s*for\s+\w+\s+in\s+(?:\w+\.content|\w+\[["']content["']\]|content)(?![\w.(])"""
)
"""In a chat template, as vLLM's endpoint looks for it in the template's syntax tree."""


def prompt_encoder(
    tokenizer: Any, template: str, chat_template: str | None, system_prompt: str | None
) -> Encode:
    """What turns a question into a prompt.

    Args:
        tokenizer: torchtune's.
        template: text around the question; `{question}` stands in it once.
        chat_template: None for the text alone; `torchtune` for the messages of the tokenizer, its
            `prompt_template` included; or a model folder, whose Hugging Face chat template and
            tokenizer make the ids that vLLM's chat endpoint makes.
        system_prompt: of a chat; None leaves it to the chat template.

    Raises:
        ValueError: naming the key that cannot be.
    """
    if not isinstance(template, str) or template.count("{question}") != 1:
        allowed = "a text with {question} in it once"
        raise ValueError(f"dataset.prompt_template: {template!r} given; allowed: {allowed}")
    if chat_template is None:
        if system_prompt is not None:
            problem = "given without a chat_template; allowed: with one, or as part of"
            raise ValueError(f"dataset.system_prompt: {problem} prompt_template")
        encode = _plain(tokenizer)
    elif chat_template == "torchtune":
        encode = _torchtune_chat(tokenizer, system_prompt)
    else:
        encode = _hugging_face_chat(chat_template, system_prompt)
    return lambda question: encode(template.replace("{question}", question))


def _plain(tokenizer: Any) -> Encode:
    return lambda text: (tokenizer.encode(text, add_bos=True, add_eos=False), text)


def _torchtune_chat(tokenizer: Any, system_prompt: str | None) -> Encode:
    if not hasattr(tokenizer, "tokenize_messages"):
        problem = f"torchtune given, and {type(tokenizer).__name__} knows no messages"
        raise ValueError(f"dataset.chat_template: {problem}; allowed: null, or a model folder")
    system = [] if system_prompt is None else [Message(role="system", content=system_prompt)]

    def encode(text: str) -> tuple[list[int], str]:
        # What any two answers have in common is the prompt. (After an empty answer, some of
        # torchtune's tokenizers end the turn.)
        said, other = (
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
        pairs = enumerate(zip(said, other, strict=False))
        end = next((place for place, (a, b) in pairs if a != b), None)
        if end is None:
            limit = f"tokenizer.max_seq_len, {tokenizer.max_seq_len}, cuts a prompt"
            raise ValueError(f"dataset.chat_template: {limit}; allowed: null there")
        return said[:end], tokenizer.decode(said[:end])

    return encode


def _hugging_face_chat(folder: str, system_prompt: str | None) -> Encode:
    tokenizer, template = _chat_tokenizer(folder)
    # As vLLM does: some templates read a content as a text, and some as a list of parts.
    in_parts = _LOOP_OVER_PARTS.search(template) is not None

    def render(text: str, system: str | None) -> str:
        said = ([] if system is None else [("system", system)]) + [("user", text)]
        messages = [
            {"role": role, "content": [{"type": "text", "text": t}] if in_parts else t}
            for role, t in said
        ]
        try:
            return tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program, and may raise anything
            problem = f"that of {folder} refuses a conversation: {error}"
            raise ValueError(f"dataset.chat_template: {problem}") from error

    marks = {"question": "7f3b"} | ({} if system_prompt is None else {"system prompt": "c91e"})
    rendered = render(marks["question"], marks.get("system prompt"))
    for name, mark in marks.items():
        if mark not in rendered:
            problem = f"that of {folder} leaves out the {name}"
            raise ValueError(f"dataset.chat_template: {problem}; allowed: null, or torchtune")

    def encode(text: str) -> tuple[list[int], str]:
        prompt = render(text, system_prompt)
        # The template has written what a prompt begins with.
        return tokenizer(prompt, add_special_tokens=False)["input_ids"], prompt

    return encode


def _chat_tokenizer(folder: str) -> tuple[Any, str]:
    """The tokenizer in a model folder, and its chat template."""
    if not folder or not Path(folder).is_dir():
        allowed = "null, torchtune, or a model folder such as ${base_model_path}"
        raise ValueError(f"dataset.chat_template: {folder!r} given; allowed: {allowed}")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        template = tokenizer.get_chat_template() if tokenizer.chat_template else None
    except Exception as error:  # anything that a tokenizer's files may lead to
        problem = f"no tokenizer can be loaded from {folder}, {type(error).__name__}: {error}"
        raise ValueError(f"dataset.chat_template: {problem}") from error
    if not template:
        problem = f"the tokenizer in {folder} has none"
        raise ValueError(f"dataset.chat_template: {problem}; allowed: null, or torchtune")
    return tokenizer, template
