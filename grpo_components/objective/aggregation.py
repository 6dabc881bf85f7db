"""Loss weights of tokens: the loss of an optimizer update is the weighted sum of token losses.

An aggregation is called once per update. It gets the number of trained tokens in each of the
update's S responses, whatever rank or micro-batch trains them, and returns S loss weights. Each
token of a response gets the response's loss weight. Padding is not counted, so it dilutes no loss.
S is the number of all responses of the update, as in the papers: a response without a trained token
(failed, cut off and masked, too old) adds nothing to the sum but still counts in S. TokenMean
divides by tokens, not S.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from grpo_components.errors import ConfigError


class TokenMean:
    """Gives all tokens the same loss weight: w_s = 1 / (sum of T_s), with T_s tokens in response s.

    DAPO, arXiv 2503.14476, section 3.3 (token-level loss), over the whole update.
    """

    def __call__(self, token_counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the loss weight [S] of a token in each of S responses, from token counts [S]."""
        return np.full(len(token_counts), 1.0 / max(int(token_counts.sum()), 1))


class SequenceMean:
    """Gives all S responses the same loss weight, shared by their T_s tokens: w_s = 1 / (S T_s).

    DeepSeekMath, arXiv 2402.03300, eq. 3; GSPO, arXiv 2507.18071, eq. 5.
    """

    def __call__(self, token_counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the loss weight [S] of a token in each of S responses, from token counts [S]."""
        return 1.0 / (len(token_counts) * np.maximum(token_counts, 1).astype(np.float64))


class ConstantLength:
    """Gives all tokens a loss weight that depends on no response's length: w_s = 1 / (S length).

    Dr. GRPO, arXiv 2503.20783, section 3.2: the sum over a response's tokens is divided by a
    constant instead of its length, so that a token's weight does not shrink in a long response.

    Args:
        length: the constant, in tokens; the usual choice is generator.max_response_tokens.
    """

    def __init__(self, length: int) -> None:
        # To Python a bool is an int, but in a config it is not a number.
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError("aggregation.length", f"{length} given", "a whole number >= 1")
        self.length = length

    def __call__(self, token_counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the loss weight [S] of a token in each of S responses, from token counts [S]."""
        return np.full(len(token_counts), 1.0 / (max(len(token_counts), 1) * self.length))
