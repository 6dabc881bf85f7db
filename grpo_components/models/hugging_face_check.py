"""Tries a transformers model, and refuses it if this package would compute wrong logprobs."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from grpo_components.errors import fail
from grpo_components.models import hugging_face_attention as shared
from grpo_components.models.hugging_face_policy import prepared
from grpo_components.models.logprobs import ResponseLogprobs, token_batch
from grpo_components.trajectory import TokenSequence

_TOLERANCE = 1e-4
"""Largest accepted difference between two logprobs of a token, in nats; float32 sums in another
order differ by less than 1e-5."""
_HEADS, _HEAD_DIM, _VOCABULARY, _WINDOW, _EXPERTS = 4, 16, 64, 5, 4
_SIZES = {
    **{"vocab_size": _VOCABULARY, "hidden_size": _HEADS * _HEAD_DIM, "head_dim": _HEAD_DIM},
    **{"sliding_window": _WINDOW, "num_attention_heads": _HEADS, "n_group": 1, "topk_group": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    **{"v_head_dim": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), _EXPERTS),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), 1.0),
}
"""Values for the keys of a small model's config; keys that the config lacks are not added. The caps
are small because a small model's attention scores are small."""
_NOT_WIDTHS = ("vocab_size", "sliding_window", "pad_token_id", "bos_token_id", "eos_token_id")
_ALLOWED = "a decoder whose layers mix tokens by causal attention alone, or a torchtune decoder"


def check_hugging_face(model: nn.Module, longest: int) -> None:
    """Refuse a transformers model for which this package would compute wrong logprobs.

    It tries a small random model with the same kinds of layers, windows, caps and scales. Where
    responses share a prompt, the logprobs must equal those that transformers' own attention gives
    for each response alone. The run's sequences have at most `longest` tokens.
    """
    config: Any = model.config
    _check_rope(config, longest)
    name = type(model).__name__
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        ours, expected = _small_model(config, name)
        try:
            found = _shared(ours)
        except Exception as error:  # a model's code may raise anything
            cause = " ".join(str(error).split())[:200]
            fail("model", f"{name} cannot compute a prompt once: {cause}", _ALLOWED)
        difference = float((found - expected).abs().max())
    if not difference <= _TOLERANCE:
        problem = f"{name} gives other logprobs when a prompt is computed once, by {difference:.1e}"
        fail("model", problem, _ALLOWED)


def small_config(config: Any, *, narrow: bool = True) -> Any:
    """Copy a config with few layers, one or more of each kind; `narrow` also reduces widths."""
    small = copy.deepcopy(config)
    depth, kinds = config.num_hidden_layers, getattr(config, "layer_types", None) or ()
    # The first two layers, and the first one of each further kind.
    wanted = sorted({*range(min(2, depth)), *map(kinds.index, kinds)})
    given = config.to_dict()
    for key, value in given.items():
        if isinstance(value, list) and len(value) == depth:
            setattr(small, key, [value[number] for number in wanted])
        elif narrow and key.endswith("intermediate_size") and value is not None:
            setattr(small, key, 48)
    small.num_hidden_layers = len(wanted)
    for key, size in _SIZES.items():
        if given.get(key) is not None and (narrow or key in _NOT_WIDTHS):
            setattr(small, key, size)
    if narrow and given.get("qk_rope_head_dim") is not None:  # DeepSeek's attention
        small.head_dim, small.qk_head_dim = _SIZES["qk_rope_head_dim"], _HEAD_DIM
    kv_heads = getattr(config, "num_key_value_heads", None)
    if narrow and kv_heads is not None:
        has_groups = kv_heads < config.num_attention_heads
        small.num_key_value_heads = min(kv_heads, _HEADS // 2) if has_groups else _HEADS
    if narrow and isinstance(getattr(small, "rope_parameters", None), dict):
        rope = small.rope_parameters
        rotated = int(_HEAD_DIM * rope.get("partial_rotary_factor", 1.0))
        small.rope_parameters = {
            key: value[: rotated // 2] if isinstance(value, list) else value
            for key, value in rope.items()
        }
    return small


def _small_model(config: Any, name: str) -> tuple[nn.Module, Tensor]:
    """Return a small random model with our attention, and logprobs that transformers' own gives."""
    from transformers import AutoModelForCausalLM

    def build(attention: str, narrow: bool) -> Any:
        small = small_config(config, narrow=narrow)
        return AutoModelForCausalLM.from_config(
            small, dtype=torch.float32, attn_implementation=attention
        )

    for narrow in (True, False):  # a family may need other widths than ours
        try:
            own = build("eager", narrow).eval()
            with torch.no_grad():
                for parameter in own.parameters():
                    parameter.normal_(std=0.1 if parameter.ndim > 1 else 0.5)
            expected, ours = _alone(own), build(shared.NAME, narrow)
            break
        except Exception as error:  # of many types
            if not narrow:
                cause = " ".join(str(error).split())[:200]
                fail("model", f"{name} cannot be tried with fewer layers: {cause}", _ALLOWED)
    ours.load_state_dict(own.state_dict())
    return prepared(ours), expected


def _sequences() -> list[TokenSequence]:
    """Return sequences to try: several responses to each of two prompts, and one to a third."""
    random = np.random.default_rng(0)

    def ids(count: int) -> Any:
        return random.integers(1, _VOCABULARY, count)

    first, second = ids(7), ids(3)
    pairs = [(first, 9), (first, 2), (first, 12), (second, 8), (second, 1), (ids(10), 11)]
    return [TokenSequence(prompt, ids(count), 1.0) for prompt, count in pairs]


@torch.no_grad()
def _shared(model: nn.Module) -> Tensor:
    return ResponseLogprobs(model, chunk_tokens=8)(token_batch(_sequences()))[0]


@torch.no_grad()
def _alone(model: nn.Module) -> Tensor:
    found = []
    for sequence in _sequences():
        ids = torch.from_numpy(np.concatenate([sequence.prompt_ids, sequence.response_ids]))
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
        wanted = torch.log_softmax(logits[len(sequence.prompt_ids) - 1 : -1], dim=-1)
        found.append(wanted.gather(1, torch.from_numpy(sequence.response_ids)[:, None]).squeeze(1))
    return torch.cat(found)


def _check_rope(config: Any, longest: int) -> None:
    """Refuse rotary tables that depend on the batch: generator and trainer batch differently."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        kind = rope.get("rope_type")
        bound = rope.get("original_max_position_embeddings") or getattr(
            config.get_text_config(), "max_position_embeddings", longest
        )
        if kind in ("dynamic", "longrope") and longest > bound:
            problem = f"rope_type {kind} given with sequences of {longest} tokens, and its table "
            problem += "then depends on the longest sequence of a batch"
            fail("model", problem, f"sequences of at most {bound} tokens, prompt and response")
