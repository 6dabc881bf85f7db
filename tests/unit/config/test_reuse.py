"""The config decides which groups are reused; a rule that a run cannot follow is refused by key."""

import pytest

from grpo_components.config.reuse import build_reuse, check_reuse


def test_without_the_section_nothing_is_reused(settings_with):
    assert settings_with().replay_generation is None
    assert not build_reuse(settings_with()).on


def test_the_config_gives_the_rule(settings_with):
    reuse = build_reuse(settings_with(replay_generation={"share": 0.5}))
    assert reuse.describe() == {"replay_generation": {"share": 0.5, "max_uses": 2}}
    assert reuse.counts == (0, 4)


@pytest.mark.parametrize(
    ("overrides", "key", "allowed"),
    [
        (
            ["replay_generation.share=1"],
            "replay_generation.share",
            "a number above 0 and at most 0.9",
        ),
        (
            ["replay_generation.share=0"],
            "replay_generation.share",
            "a number above 0 and at most 0.9",
        ),
        (["replay_generation.max_uses=1"], "replay_generation.max_uses", "2"),
        (["replay_generation.best=1"], "replay_generation.best", "max_uses"),
        (["replay_generation.share=0.1"], "replay_generation.share", "at least 0.125"),
        (
            ["replay_generation.share=0.5", "groups_per_step=1"],
            "replay_generation.share",
            "groups_per_step: 2 or more",
        ),
        (
            ["replay_generation.max_uses=3", "max_staleness=0", "pull_every_m_rollouts=1"],
            "replay_generation",
            "null, or max_staleness: 1 or more",
        ),
        (["replay_generation.max_uses=3", "rollout_only=true"], "replay_generation", "null"),
    ],
)
def test_a_wrong_rule_is_refused_by_its_key(refusal, overrides, key, allowed):
    found = refusal(*overrides)
    assert found.startswith(f"{key}: ") and allowed in found.partition("allowed: ")[2], found


def test_recorded_groups_are_not_reused(settings_with):
    settings = settings_with(replay_generation={}).model_copy(update={"train_from": "a.jsonl"})
    with pytest.raises(ValueError, match=r"^replay_generation: given with train_from, .* null"):
        check_reuse(settings)
