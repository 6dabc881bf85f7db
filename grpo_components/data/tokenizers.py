"""Wraps the fast tokenizer of a Hugging Face model folder as a torchtune tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from grpo_components.errors import fail

_ALLOWED = "a model folder with a tokenizer.json"


class HuggingFaceTokenizer:
    """Encodes and decodes text as transformers and vLLM do; built by `hugging_face_tokenizer`."""

    def __init__(self, tokenizer: Any, stop_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.stop_tokens = list(stop_tokens)
        self.eos_id = tokenizer.eos_token_id
        if self.eos_id is None:
            self.eos_id = self.stop_tokens[0]
        self.pad_id = self.eos_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.special_tokens: dict[str, int] = tokenizer.get_added_vocab()
        self.chat_template = tokenizer.chat_template or ""
        self.vocab_size = len(tokenizer)
        alone = self._ids("a")
        self.adds_leading_space = tokenizer.convert_ids_to_tokens(alone)[0].startswith("\u2581")
        whole = list(tokenizer("a")["input_ids"])
        self._beginning = whole[: whole.index(alone[0])]

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Return the token ids of a text; special tokens spelled out in it become their own ids."""
        beginning = self._beginning if add_bos else []
        return [*beginning, *self._ids(text), *([self.eos_id] if add_eos else [])]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return cast(str, text)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def hugging_face_tokenizer(path: str) -> HuggingFaceTokenizer:
    """Load a folder's tokenizer; stop tokens are its eos and those of generation_config.json.

    For the folder's chat template, set `chat_template` of the data sets to the same folder.

    Args:
        path: folder of the model.

    Raises:
        ValueError: the folder has no fast tokenizer, or no stop token.
    """
    from transformers import AutoTokenizer  # takes a second

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # broken tokenizer files may raise anything
        cause = " ".join(str(error).split())[:200]
        fail("tokenizer.path", f"no tokenizer loads from {path}, {cause}", _ALLOWED)
    if not tokenizer.is_fast:
        problem = f"{path} has a {type(tokenizer).__name__}, which is not a fast tokenizer"
        fail("tokenizer.path", problem, _ALLOWED)
    stop_tokens = _stop_tokens(Path(path))
    # The two often differ, and a model may end its turns with either.
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in stop_tokens:
        stop_tokens.append(tokenizer.eos_token_id)
    if not stop_tokens:
        problem = f"neither the tokenizer nor generation_config.json of {path} has an eos token"
        fail("tokenizer.path", problem, _ALLOWED)
    return HuggingFaceTokenizer(tokenizer, stop_tokens)


def num_ids(tokenizer: Any, stop_tokens: Sequence[int]) -> int | None:
    """Return how many ids a tokenizer knows; None if it does not say.

    A model may have more ids, because its vocabulary is padded to a size that divides well.
    """
    # torchtune's tokenizers of Qwen have no vocab_size; Phi-3's leaves out the special tokens.
    known = getattr(tokenizer, "vocab_size", None) or len(getattr(tokenizer, "encoder", ()))
    more = (*getattr(tokenizer, "special_tokens", {}).values(), *stop_tokens)
    return max([known, *(token_id + 1 for token_id in more)]) if known else None


def _stop_tokens(folder: Path) -> list[int]:
    file = folder / "generation_config.json"
    if not file.is_file():
        return []
    given = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    return [given] if isinstance(given, int) else list(given or ())
