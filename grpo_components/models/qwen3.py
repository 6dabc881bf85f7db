"""Qwen3's dense models, which torchtune 0.6.1 lacks: decoder, builders and tokenizer."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torchtune.data._prompt_templates import _get_prompt_template
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.models.qwen2_5._tokenizer import QWEN2_5_SPECIAL_TOKENS, Qwen2_5Tokenizer
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    TiedLinear,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)
from torchtune.modules.transforms.tokenizers import parse_hf_tokenizer_json

_VOCABULARY = 151_936
_POSITIONS = 40_960
_ROPE_BASE = 1_000_000.0
_SPECIAL_TOKENS = {
    **QWEN2_5_SPECIAL_TOKENS,
    "<tool_response>": 151665,
    "</tool_response>": 151666,
    "<think>": 151667,
    "</think>": 151668,
}


class Qwen3Attention(MultiHeadAttention):
    """Causal attention that normalizes each head's queries and keys before RoPE.

    torchtune's MultiHeadAttention normalizes them after RoPE, which computes something else as soon
    as the weights of a norm differ. The heads together may be wider than the hidden state.
    """

    q_norm: nn.Module
    k_norm: nn.Module
    pos_embeddings: nn.Module

    def __init__(
        self,
        *,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        pos_embeddings: nn.Module,
        max_seq_len: int,
        attn_dropout: float,
        norm_eps: float,
    ) -> None:
        super().__init__(
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            q_proj=nn.Linear(embed_dim, num_heads * head_dim, bias=False),
            k_proj=nn.Linear(embed_dim, num_kv_heads * head_dim, bias=False),
            v_proj=nn.Linear(embed_dim, num_kv_heads * head_dim, bias=False),
            output_proj=nn.Linear(num_heads * head_dim, embed_dim, bias=False),
            pos_embeddings=pos_embeddings,
            q_norm=RMSNorm(head_dim, eps=norm_eps),
            k_norm=RMSNorm(head_dim, eps=norm_eps),
            max_seq_len=max_seq_len,
            attn_dropout=attn_dropout,
        )

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        *,
        mask: Any = None,
        input_pos: Tensor | None = None,
    ) -> Tensor:
        """Compute self-attention.

        Args:
            x: [B, T, embed_dim] hidden states, of any floating dtype.
            y: the same tensor, as torchtune's layers pass it.
            mask: mask that torchtune's MultiHeadAttention takes; None is causal.
            input_pos: [B, T] int64 position of each token; None counts from 0.
        """
        assert y is None or y is x, "there is no cross-attention"
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in projections)
        q = self.pos_embeddings(self.q_norm(q), input_pos=input_pos)
        k = self.pos_embeddings(self.k_norm(k), input_pos=input_pos)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # [B, heads, T, head_dim]
        if self.kv_cache is not None and self.cache_enabled:
            k, v = self.kv_cache.update(k, v)
        if self.num_heads != self.num_kv_heads:
            siblings = self.num_heads // self.num_kv_heads
            k, v = (heads.repeat_interleave(siblings, dim=1) for heads in (k, v))
        output = self._attention_call(
            q,
            k,
            v,
            mask=mask,
            dropout_p=self.attn_dropout if self.training else 0.0,
            is_causal=self.kv_cache is None and mask is None and self.is_causal,
        )
        return self.output_proj(output.transpose(1, 2).flatten(2))


def _feed_forward(dim: int, hidden_dim: int) -> FeedForward:
    return FeedForward(
        gate_proj=nn.Linear(dim, hidden_dim, bias=False),
        down_proj=nn.Linear(hidden_dim, dim, bias=False),
        up_proj=nn.Linear(dim, hidden_dim, bias=False),
    )


def qwen3(
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    max_seq_len: int,
    head_dim: int = 128,
    attn_dropout: float = 0.0,
    norm_eps: float = 1e-6,
    rope_base: float = _ROPE_BASE,
    tie_word_embeddings: bool = False,
) -> TransformerDecoder:
    """Build a Qwen3 decoder of any size, as torchtune's `qwen2` builds Qwen2's."""
    rope = Qwen2RotaryPositionalEmbeddings(head_dim, max_seq_len=max_seq_len, base=rope_base)
    norm = partial(RMSNorm, embed_dim, eps=norm_eps)

    def layer() -> TransformerSelfAttentionLayer:
        attention = Qwen3Attention(
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            pos_embeddings=rope,
            max_seq_len=max_seq_len,
            attn_dropout=attn_dropout,
            norm_eps=norm_eps,
        )
        mlp = _feed_forward(embed_dim, intermediate_dim)
        return TransformerSelfAttentionLayer(attention, mlp, sa_norm=norm(), mlp_norm=norm())

    embedding = nn.Embedding(vocab_size, embed_dim)
    untied = None if tie_word_embeddings else nn.Linear(embed_dim, vocab_size, bias=False)
    return TransformerDecoder(
        tok_embeddings=embedding,
        layers=[layer() for _ in range(num_layers)],
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        head_dim=head_dim,
        norm=norm(),
        output=untied or TiedLinear(embedding),
    )


def qwen3_0_6b() -> TransformerDecoder:
    """Build Qwen3-0.6B or Qwen3-0.6B-Base; sizes from their config.json."""
    return qwen3(
        vocab_size=_VOCABULARY,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        embed_dim=1024,
        intermediate_dim=3072,
        max_seq_len=_POSITIONS,
        tie_word_embeddings=True,
    )


def qwen3_1_7b() -> TransformerDecoder:
    """Build Qwen3-1.7B or Qwen3-1.7B-Base; sizes from their config.json."""
    return qwen3(
        vocab_size=_VOCABULARY,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        embed_dim=2048,
        intermediate_dim=6144,
        max_seq_len=_POSITIONS,
        tie_word_embeddings=True,
    )


def qwen3_4b(max_seq_len: int = _POSITIONS, rope_base: float = _ROPE_BASE) -> TransformerDecoder:
    """Build Qwen3-4B, Qwen3-4B-Base, or one of July 2025; sizes from their config.json.

    Args:
        max_seq_len: longest sequence, in tokens; up to 262,144 for Qwen3-4B-Instruct-2507 and
            Qwen3-4B-Thinking-2507.
        rope_base: base of the angles of RoPE; 5e6 for these two.
    """
    return qwen3(
        vocab_size=_VOCABULARY,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        embed_dim=2560,
        intermediate_dim=9728,
        max_seq_len=max_seq_len,
        rope_base=rope_base,
        tie_word_embeddings=True,
    )


def qwen3_8b() -> TransformerDecoder:
    """Build Qwen3-8B or Qwen3-8B-Base; sizes from their config.json."""
    return qwen3(
        vocab_size=_VOCABULARY,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        embed_dim=4096,
        intermediate_dim=12_288,
        max_seq_len=_POSITIONS,
    )


def qwen3_14b() -> TransformerDecoder:
    """Build Qwen3-14B or Qwen3-14B-Base; sizes from their config.json."""
    return qwen3(
        vocab_size=_VOCABULARY,
        num_layers=40,
        num_heads=40,
        num_kv_heads=8,
        embed_dim=5120,
        intermediate_dim=17_408,
        max_seq_len=_POSITIONS,
    )


def qwen3_32b() -> TransformerDecoder:
    """Build Qwen3-32B; sizes from its config.json."""
    return qwen3(
        vocab_size=_VOCABULARY,
        num_layers=64,
        num_heads=64,
        num_kv_heads=8,
        embed_dim=5120,
        intermediate_dim=25_600,
        max_seq_len=_POSITIONS,
    )


def qwen3_tokenizer(
    path: str,
    merges_file: str,
    special_tokens_path: str | None = None,
    max_seq_len: int | None = None,
    prompt_template: Any = None,
) -> Qwen2_5Tokenizer:
    """Build Qwen3's tokenizer: Qwen2.5's with tokens for thoughts and for answers of tools.

    torchtune's `qwen2_5_tokenizer` would split `<think>` into several tokens, and cannot decode the
    ids of these tokens.

    Args:
        path: vocab.json.
        merges_file: merges.txt.
        special_tokens_path: tokenizer.json, whose added tokens replace Qwen3's.
        max_seq_len: messages are cut to so many tokens; None cuts nothing.
        prompt_template: torchtune's prompt template for messages, or its dotted path.
    """
    template: Any = None if prompt_template is None else _get_prompt_template(prompt_template)
    special = parse_hf_tokenizer_json(special_tokens_path) if special_tokens_path else None
    return Qwen2_5Tokenizer(
        path=path,
        merges_file=merges_file,
        special_tokens=special or _SPECIAL_TOKENS,
        max_seq_len=max_seq_len,
        prompt_template=template,
    )
