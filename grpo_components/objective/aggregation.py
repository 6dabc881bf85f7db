"""From losses per token to the loss of an optimizer update: the weight of each response's tokens.

A weight is computed once, from the token counts of all responses of the update, whatever rank or
micro-batch trains them. Padding has no count, so it cannot dilute anything. S counts every response
of the update, as in the papers: one without a trained token (failed, cut off and masked, too old)
adds nothing to the sum, and still is one of S. TokenMean, which divides by tokens, does not see it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class TokenMean:
    """Every token weighs the same: w_s = 1 / sum of T over the update's responses.

    DAPO, arXiv 2503.14476, section 3.3 (token-level loss), over the whole update.
    """

    def __call__(self, token_counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Weights of one optimizer update.

        Args:
            token_counts: [S] trained tokens of each response, over all ranks and micro-batches; 0
                where none of a response's is.

        Returns:
            [S] weight of each token's loss of response s; the update's loss is the weighted sum.
        """
        return np.full(len(token_counts), 1.0 / max(int(token_counts.sum()), 1))


class SequenceMean:
    """Every response weighs the same, its tokens share: w_s = 1 / (S T_s).

    DeepSeekMath, arXiv 2402.03300, eq. 3; GSPO, arXiv 2507.18071, eq. 5.
    """

    def __call__(self, token_counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Weights of one optimizer update.

        Args:
            token_counts: [S] trained tokens of each response, over all ranks and micro-batches; 0
                where none of a response's is.

        Returns:
            [S] weight of each token's loss of response s; the update's loss is the weighted sum.
        """
        return 1.0 / (len(token_counts) * np.maximum(token_counts, 1).astype(np.float64))


class ConstantLength:
    """Every token weighs the same in every update: w_s = 1 / (S length).

    Dr. GRPO, arXiv 2503.20783, section 3.2: the sum over a response's tokens is divided by a
    constant instead of its length, so that a long response is neither favoured nor spared.

    Args:
        length: tokens; the largest response, generator.max_response_tokens, is the usual choice.
    """

    def __init__(self, length: int) -> None:
        # bool is an int to Python, yet no number to the reader of a config.
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"aggregation.length: {length} given; allowed: a whole number >= 1")
        self.length = length

    def __call__(self, token_counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Weights of one optimizer update.

        Args:
            token_counts: [S] trained tokens of each response, over all ranks and micro-batches; 0
                where none of a response's is.

        Returns:
            [S] weight of each token's loss of response s; the update's loss is the weighted sum.
        """
        return np.full(len(token_counts), 1.0 / (max(len(token_counts), 1) * self.length))
