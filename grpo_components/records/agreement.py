"""Ends a run whose trainer and generators compute two policies from the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_components.errors import DisagreementError

_FEW_TOKENS = 16
"""With fewer, one rounding error could decide: the bound then is higher in proportion."""


class GeneratorAgreement:
    """Compare trainer and generator on fresh tokens, whose difference no training explains.

    Args:
        max_generator_kl: largest k3, in nats per token; None compares nothing.
    """

    def __init__(self, max_generator_kl: float | None) -> None:
        self._max_kl = max_generator_kl

    def check(self, step: int, metrics: Mapping[str, Any]) -> None:
        """To be called after every step; one without a fresh token shows nothing.

        Args:
            step: from 1.
            metrics: of the step, with `mismatch/fresh_kl` and `mismatch/fresh_tokens`.

        Raises:
            DisagreementError: they differ by more than the bound.
        """
        tokens = metrics.get("mismatch/fresh_tokens", 0)
        if self._max_kl is None or not tokens > 0:
            return
        kl, bound = metrics["mismatch/fresh_kl"], self._max_kl * max(1.0, _FEW_TOKENS / tokens)
        if kl > bound:
            few = f", raised to {bound:.3g} for so few tokens" if bound > self._max_kl else ""
            raise DisagreementError(
                f"step {step}: trainer and generator disagree on tokens of the trainer's own "
                f"version: mismatch/fresh_kl is {kl:.3g} over {tokens:.0f} tokens, and "
                f"max_generator_kl is {self._max_kl:g}{few}. Likely causes: `model` computes "
                "another function than config.json of base_model_path says; a module or sampler "
                "setting that only one side has; weights that did not arrive whole"
            )
