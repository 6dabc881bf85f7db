"""Ends a run whose trainer and generators compute different policies from the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_components.errors import DisagreementError

_FEW_TOKENS = 16
"""Fewer fresh tokens multiply the bound by `_FEW_TOKENS` / tokens, to allow for rounding errors."""

_EXACT_SHARE = 0.01
"""Bound of the weight probe, whose tokens are no others from step to step, as a share."""


class GeneratorAgreement:
    """Ends the run if trainer and generator disagree on the logprobs of fresh tokens.

    Fresh tokens were sampled by the version being trained, so with the same weights on both sides.
    """

    def __init__(self, max_generator_kl: float | None, *, exact: bool = False) -> None:
        self._max_kl = max_generator_kl
        share = _EXACT_SHARE if exact else 1.0
        self.probe_kl = None if max_generator_kl is None else share * max_generator_kl
        """Upper bound of the KL on the weight probe; None disables it."""

    def check(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Check one training step; a step without fresh tokens always passes."""
        tokens = metrics.get("mismatch/fresh_tokens", 0)
        if self._max_kl is None or not tokens > 0:
            return
        kl, bound = metrics["mismatch/fresh_kl"], self._max_kl * max(1.0, _FEW_TOKENS / tokens)
        if kl > bound:
            few = f", raised to {bound:.3g} for few tokens" if bound > self._max_kl else ""
            raise DisagreementError(
                f"step {step}: trainer and generator disagree on tokens sampled with the trainer's "
                f"own weights: mismatch/fresh_kl is {kl:.3g} over {tokens:.0f} tokens; "
                f"max_generator_kl is {self._max_kl:g}{few}. Likely causes: `model` does not match "
                "config.json in base_model_path; a module or sampler setting that only one side "
                "has; incomplete weights in the generator"
            )
