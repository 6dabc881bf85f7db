"""Fresh tokens are told apart, and counted over updates without one of them twice."""

from __future__ import annotations

import math

import pytest

from grpo_components.training.token_metrics import over_updates


def test_fresh_tokens_of_several_updates_weigh_alike():
    parts = [
        {"mismatch/fresh_kl": 0.5, "mismatch/fresh_tokens": 3.0},
        {"mismatch/generator_kl": 0.1},  # an update without a fresh token
        {"mismatch/fresh_kl": 0.1, "mismatch/fresh_tokens": 9.0},
    ]
    metrics = over_updates(parts)
    assert metrics["mismatch/fresh_kl"] == pytest.approx((0.5 * 3 + 0.1 * 9) / 12)
    assert metrics["mismatch/fresh_tokens"] == 12


def test_a_step_without_fresh_tokens_has_none():
    metrics = over_updates([{"mismatch/generator_kl": 0.1}])
    assert math.isnan(metrics["mismatch/fresh_kl"])
    assert math.isnan(metrics["mismatch/fresh_tokens"])
