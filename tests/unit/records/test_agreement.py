"""A run ends if trainer and generator give fresh tokens different probabilities."""

from __future__ import annotations

import asyncio
import math
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import pytest

from grpo_components.cluster.batch import Batch
from grpo_components.errors import DisagreementError
from grpo_components.records.agreement import GeneratorAgreement
from grpo_components.records.run import Run
from grpo_components.settings import MAX_GENERATOR_KL, TRUNCATION, GeneratorSettings, Settings
from grpo_components.training.step_result import StepResult


def settings(dtype, **sampler):
    generator = GeneratorSettings(
        max_response_tokens=4, temperature=1.0, allow_biased_sampling=True, **sampler
    )
    return Settings.model_construct(dtype=dtype, generator=generator)


def measured(kl, tokens=256.0):
    return {"mismatch/fresh_kl": kl, "mismatch/fresh_tokens": tokens}


def test_a_kl_above_the_bound_ends_the_run_with_both_numbers():
    agreement = GeneratorAgreement(0.25)
    agreement.check(1, measured(0.25))
    with pytest.raises(DisagreementError) as ended:
        agreement.check(7, measured(0.2501))
    for number in ("step 7", "0.25 over 256 tokens", "max_generator_kl is 0.25"):
        assert number in str(ended.value)


@pytest.mark.parametrize("dtype", MAX_GENERATOR_KL)
@pytest.mark.parametrize("kl", [5.8, 4.6, 3.7, 2.9])
def test_every_wrong_model_that_was_tried_is_over_the_default(dtype, kl):
    with pytest.raises(DisagreementError):
        GeneratorAgreement(settings(dtype).default_bound).check(1, measured(kl))


def test_a_step_without_fresh_tokens_passes():
    agreement = GeneratorAgreement(1e-4)
    agreement.check(2, measured(math.nan, math.nan))
    agreement.check(2, measured(math.nan, 0.0))
    agreement.check(2, {})  # the metrics of a stand-in trainer
    with pytest.raises(DisagreementError):
        agreement.check(3, measured(1.0))


def test_few_tokens_raise_the_bound_but_do_not_remove_it():
    """One token's k3 of 1.5 may be rounding in bf16; 2.9 on each of eight is not."""
    GeneratorAgreement(0.1).check(1, measured(1.5, 1.0))
    with pytest.raises(DisagreementError) as ended:
        GeneratorAgreement(0.1).check(1, measured(2.9, 8.0))
    for fact in ("2.9 over 8 tokens", "max_generator_kl is 0.1", "0.2"):
        assert fact in str(ended.value)
    with pytest.raises(DisagreementError):
        GeneratorAgreement(0.1).check(1, measured(0.11, 16.0))


def test_a_truncating_sampler_has_no_default():
    for name in TRUNCATION:
        biased = settings("fp32", **{name: 0.5 if name != "top_k" else 5})
        assert biased.default_bound is None
    assert settings("bf16", top_k=-1).default_bound == MAX_GENERATOR_KL["bf16"]
    GeneratorAgreement(None).check(1, measured(5.8))


def test_the_run_ends_at_the_first_such_step_before_its_checkpoint():
    journal, evaluation = MagicMock(commit=AsyncMock(), save_if_due=AsyncMock()), MagicMock()
    evaluation.due.return_value, evaluation.collect = False, AsyncMock(return_value={})
    records = MagicMock(journal=journal, evaluation=evaluation, agreement=GeneratorAgreement(1e-4))
    records.rollouts_logged, records.ledger.policy_version = 0, 0
    roles = MagicMock(buffer=MagicMock(texts=AsyncMock(return_value=[])))
    run = Run(records, roles, MagicMock())
    metrics = measured(4.6) | {"off_policy/correction_mass": 1.0}
    result = StepResult(1, {0: 2}, {}, 2, "", metrics)
    batch = Batch(MagicMock(), [], [], "", 0, 0, 0.0)
    with pytest.raises(DisagreementError):
        asyncio.run(run.finish_step(batch, np.zeros((1, 2)), result))
    records.log.step.assert_called_once()  # the step's metrics are logged
    journal.save_if_due.assert_not_awaited()
