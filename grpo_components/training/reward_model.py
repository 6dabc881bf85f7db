"""The learned reward: a sequence classifier that scores groups before they enter the buffer."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from grpo_components.errors import ConfigError
from grpo_components.models.loading import DTYPES
from grpo_components.models.micro_batches import padded_micro_batches
from grpo_components.settings import RewardModelSettings
from grpo_components.trajectory import GroupSummary, PackedTrajectories, summarize

REWARD_TERM = "reward_model"
"""Name of the classifier's score among a response's reward terms."""

_CHANGED_LISTS, _CHANGED_ARRAYS = ("finish_reason", "reward_terms", "error"), ("reward", "success")
"""Fields of a group that a score may change: packed as lists, and packed as arrays."""
MAX_ERROR_CHARS = 200


class RewardModel:
    """Adds weight * score to rewards; the score is the single logit of a Hugging Face classifier.

    The classifier reads the text of prompt and response with its own tokenizer. A response that
    already failed is not scored. A response that cannot be scored is marked as failed.
    """

    def __init__(
        self,
        *,
        settings: RewardModelSettings,
        device: str,
        dtype: str,
    ) -> None:
        assert settings.path is not None, "no run starts this role without a path"
        path, weight, chat_template = settings.path, settings.weight, settings.chat_template
        self._device, self._weight = torch.device(device), weight
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=DTYPES[dtype], output_loading_info=True
        )
        self._model: Any = model.to(self._device).requires_grad_(False).eval()
        config = self._model.config
        config.use_cache = False  # a decoder would return keys and values of each text
        if config.num_labels != 1:
            labels = f"{path} has {config.num_labels} outputs"
            raise ConfigError("reward_model.path", labels, "a classifier with one")
        missing = sorted(loading["missing_keys"])
        if missing:  # e.g. a language model: its score head would be random
            problem = f"{path} has no weights for {', '.join(missing)[:MAX_ERROR_CHARS]}"
            raise ConfigError("reward_model.path", problem, "a trained classifier")
        if chat_template and not self._tokenizer.chat_template:
            problem = f"true given, but the tokenizer of {path} has no chat template"
            raise ConfigError("reward_model.chat_template", problem, "false")
        self._pad_id: int | None = config.pad_token_id
        self._chat_template, self._token_budget = chat_template, settings.tokens_per_micro_batch
        positions = _num_positions(self._model)
        self._max_tokens = min(self._tokenizer.model_max_length, positions or math.inf)

    def add_scores(
        self, group: PackedTrajectories, text: dict[str, Any]
    ) -> tuple[PackedTrajectories, GroupSummary, dict[str, Any]]:
        """Score a group; return the group, its summary and `text` (to log) with new rewards."""
        columns: dict[str, list[Any]] = {name: list(group[name]) for name in _CHANGED_LISTS}
        columns |= {name: group[name].tolist() for name in _CHANGED_ARRAYS}
        scored = [i for i, reason in enumerate(columns["finish_reason"]) if reason != "error"]
        responses = [text["responses"][i]["response"] for i in scored]
        scores = self._scores(text["prompt"], responses)
        for i, score in zip(scored, scores, strict=True):
            changes = self._outcome(columns["reward"][i], columns["reward_terms"][i], score)
            for name, value in changes.items():
                columns[name][i] = value
        arrays = {name: np.array(columns[name], group[name].dtype) for name in _CHANGED_ARRAYS}
        packed = {**group, **columns, **arrays}
        outcomes = zip(*columns.values(), strict=True)
        shown = [
            {**response, **dict(zip(columns, outcome, strict=True))}
            for response, outcome in zip(text["responses"], outcomes, strict=True)
        ]
        return packed, summarize(packed), {**text, "responses": shown}

    def _outcome(
        self, reward: float, terms: dict[str, float], score: float | str
    ) -> dict[str, Any]:
        """Return new values of a response's fields; a str `score` says why there is no score."""
        total = math.nan if isinstance(score, str) else reward + self._weight * score
        if math.isfinite(total):
            return {"reward": total, "reward_terms": {**terms, REWARD_TERM: score}}
        problem = score if isinstance(score, str) else f"gave {score}"
        return {
            "finish_reason": "error",
            "reward": math.nan,
            "reward_terms": {},
            "success": False,
            "error": f"reward {REWARD_TERM}: {problem}",
        }

    @torch.no_grad()
    def _scores(self, prompt: str, responses: list[str]) -> list[float | str]:
        """Return the classifier's logit for each response, or a message why it has none."""
        token_ids = [self._tokens(prompt, response) for response in responses]
        lengths = [len(ids) for ids in token_ids]
        scores: list[float | str] = [
            f"{length} tokens, the model reads 1 to {self._max_tokens}" for length in lengths
        ]
        fit = [i for i, length in enumerate(lengths) if 0 < length <= self._max_tokens]
        for indices in padded_micro_batches([lengths[i] for i in fit], self._token_budget):
            members = [fit[i] for i in indices]
            logits = self._logits([torch.tensor(token_ids[i]) for i in members])
            for i, score in zip(members, logits.tolist(), strict=True):
                scores[i] = score
        return scores

    def _logits(self, texts: list[Tensor]) -> Tensor:
        pad_id = self._pad_id
        if pad_id is None:
            # A decoder gives the score at the last token that is not padding. So the padding token
            # must occur in no text: one that ends in it would be scored at an earlier token.
            used = set(torch.cat(texts).tolist())
            pad_id = next(number for number in itertools.count() if number not in used)
            self._model.config.pad_token_id = pad_id
        ids = pad_sequence(texts, batch_first=True, padding_value=pad_id)
        mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
        batch = {"input_ids": ids.to(self._device), "attention_mask": mask.to(self._device)}
        return self._model(**batch).logits[:, 0].float()

    def _tokens(self, prompt: str, response: str) -> list[int]:
        if not self._chat_template:
            return self._tokenizer(prompt + response, truncation=False)["input_ids"]
        messages = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": response},
        ]
        # First as text: for token ids, the return type depends on the version of transformers.
        whole = self._tokenizer.apply_chat_template(messages, tokenize=False)
        return self._tokenizer(whole, add_special_tokens=False)["input_ids"]


def _num_positions(model: Any) -> int | None:
    """Return the number of token positions that a model supports; None without a limit."""
    known = getattr(model.config, "max_position_embeddings", None)
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    first = getattr(table, "padding_idx", None)  # RoBERTa numbers positions from padding_idx + 1
    return known if known is None or first is None else known - first - 1
