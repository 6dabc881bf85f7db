"""Every key has one rule; where a number may follow a schedule, all its numbers keep the rule."""

import pytest

from grpo_components.config.schema import SCHEMA, Rule, read_section

LINEAR = {"schedule": "linear", "start": 0.3, "end": 0.1, "num_steps": 10}
SCHEDULED = [
    ("loss", "clip_low"),
    ("loss", "clip_high"),
    ("loss", "kl_coeff"),
    ("optimizer", "lr"),
    ("generator", "temperature"),
    ("reward_shaping", "kl_coeff"),
]


def read(section, key, value):
    """What a section makes of one value; the rest of the section is as small as may be."""
    least = {"_component_": "some.Component"} if "_component_" in SCHEMA[section] else {}
    if section == "generator":
        least = {"max_response_tokens": 16, "temperature": 1.0}
    return read_section(SCHEMA[section], {**least, key: value}, section)[key]


@pytest.mark.parametrize(("section", "key"), SCHEDULED)
def test_a_schedule_may_stand_where_its_number_may(section, key):
    assert read(section, key, 1) == 1.0
    assert read(section, key, LINEAR) == LINEAR


def test_these_are_all_that_may_follow_a_schedule():
    found = [
        (section, key)
        for section, rules in SCHEMA.items()
        if not isinstance(rules, Rule)
        for key, rule in rules.items()
        if isinstance(rule, Rule) and rule.schedule
    ]
    assert sorted(found) == sorted(SCHEDULED)


@pytest.mark.parametrize(
    ("section", "key", "change", "start"),
    [
        ("loss", "kl_coeff", {"end": -0.1}, "loss.kl_coeff.end: -0.1 given"),
        ("loss", "clip_low", {"start": 1.5}, "loss.clip_low.start: 1.5 given"),
        ("optimizer", "lr", {"end": 0.0}, "optimizer.lr.end: 0.0 given"),
        ("generator", "temperature", {"end": 0}, "generator.temperature.end: 0.0 given"),
        ("loss", "kl_coeff", {"schedule": "sudden"}, "loss.kl_coeff.schedule: 'sudden' given"),
        ("loss", "kl_coeff", {"stop": 1}, "loss.kl_coeff.stop: unknown"),
        ("optimizer", "lr", {"num_steps": 0}, "optimizer.lr.num_steps: 0 given"),
    ],
)
def test_a_wrong_schedule_names_the_number_that_is_wrong(section, key, change, start):
    with pytest.raises(ValueError, match="; allowed: ") as refused:
        read(section, key, {**LINEAR, **change})
    assert str(refused.value).startswith(start)


def test_a_number_that_may_follow_a_schedule_says_so_when_it_is_refused():
    with pytest.raises(ValueError, match="allowed: a number above 0, or a schedule"):
        read("optimizer", "lr", 0)
    with pytest.raises(ValueError, match=r"a whole number at least 1$"):
        read("generator", "max_response_tokens", LINEAR)


@pytest.mark.parametrize(
    ("key", "wrong"),
    [("coeff", -0.1), ("examples_per_update", 1.5), ("examples_per_update", 0), ("seed", -1)],
)
def test_supervised_examples_are_counted_before_the_trainer_starts(key, wrong):
    """It would fail in its first step."""
    assert read("ptx", key, 1) == 1
    with pytest.raises(ValueError, match=rf"^ptx\.{key}: {wrong} given; allowed: "):
        read("ptx", key, wrong)
