"""The stream of prompts follows the config's curriculum; one that cannot be is refused by key."""

import pytest

from grpo_components.config import prompts
from grpo_components.config.open_run import open_run
from grpo_components.data.curriculum import CurriculumRule
from grpo_components.data.prompt_curriculum import PromptCurriculum
from grpo_components.data.prompt_stream import PromptStream
from grpo_components.exchange.ledger import Ledger
from grpo_components.exchange.staleness import StalenessContract

ROWS = [{"prompt_index": i} for i in range(3)]


def test_without_a_curriculum_the_prompts_come_in_turn(settings_with):
    assert settings_with().curriculum is None
    assert isinstance(prompts.build_prompts(settings_with(), ROWS), PromptStream)


def test_the_config_gives_rule_and_seed_of_the_draws(settings_with):
    settings = settings_with(seed=7, curriculum={"low": 0.5})
    stream = prompts.build_prompts(settings, ROWS)
    assert isinstance(stream, PromptCurriculum)
    assert stream.curriculum.rule == CurriculumRule(low=0.5, high=0.8, floor=0.1, decay=0.95)
    assert stream.curriculum.seed == 7


@pytest.mark.parametrize(
    ("overrides", "key", "allowed"),
    [
        (["curriculum.low=0.9"], "curriculum.low", "at most 0.8"),
        (["curriculum.high=1.1"], "curriculum.high", "at least 0 and at most 1"),
        (["curriculum.floor=0"], "curriculum.floor", "at least 0.001 and at most 1"),
        (["curriculum.decay=0"], "curriculum.decay", "at least 0.01 and at most 1"),
        (["curriculum.floor=none"], "curriculum.floor", "at least 0.001 and at most 1"),
        (["curriculum.band=1"], "curriculum.band", "floor"),
        (["curriculum=true"], "curriculum", ""),
        (["curriculum.low=0.1", "shuffle=false"], "shuffle", "true, or curriculum: null"),
    ],
)
def test_a_wrong_curriculum_is_refused_by_its_key(refusal, overrides, key, allowed):
    found = refusal(*overrides)
    assert found.startswith(f"{key}: ") and allowed in found.partition("allowed: ")[2], found


def test_recorded_groups_are_not_drawn_again(settings_with):
    settings = settings_with(curriculum={}).model_copy(update={"train_from": "a.jsonl"})
    with pytest.raises(ValueError, match=r"^curriculum: given with train_from, .*; allowed: null"):
        prompts.check_curriculum(settings)


def test_a_data_set_that_is_too_large_is_refused(settings_with, monkeypatch):
    monkeypatch.setattr(prompts, "MAX_PROMPTS", 2)
    with pytest.raises(ValueError, match=r"^curriculum: .* 3 prompts; allowed: null, or at most 2"):
        prompts.build_prompts(settings_with(curriculum={}), ROWS)


def test_a_fork_that_would_ignore_the_curriculum_is_refused(settings_with):
    stream = PromptStream(ROWS, shuffle=True, seed=1)
    ledger = Ledger(StalenessContract(1, 1), 1, stream)
    with pytest.raises(
        ValueError, match=r"^curriculum: .*; allowed: null, or a recipe with `build_"
    ):
        open_run(settings_with(curriculum={}), ledger, stream, lambda step: 1.0, ROWS, ROWS)
