"""A component that cannot be imported, or not with its arguments, is refused by its key."""

import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

OWN_MODULE = """
class Good:
    def __init__(self, limit: int):
        self.limit = limit
    def __call__(self, *, prompt_text, response_text, answer, finish_reason):
        return 1.0

class Inherited(Good):
    pass

class TakesNothing:
    def __call__(self, text):
        return 1.0

class CannotBeCalled:
    pass

def make(**kwargs):
    return Good(1)

def judge(*, prompt_text, response_text, answer, finish_reason):
    return 1.0

number = 3
"""


def test_components_may_stand_in_the_current_folder(cfg, check):
    Path("own_rewards_good.py").write_text(OWN_MODULE)
    for number, name in enumerate(("Good", "Inherited")):
        cfg.rewards[f"mine_{number}"] = {"_component_": f"own_rewards_good.{name}", "limit": 3}
    cfg.rewards.made = {"_component_": "own_rewards_good.make", "anything": 1}
    check("metric_logger.dir=x")  # the logger takes any further argument


@pytest.mark.parametrize(
    ("node", "start"),
    [
        ({"_component_": "own_rewards_bad.Good"}, "rewards.mine.limit: missing"),
        ({"_component_": "own_rewards_bad.TakesNothing"}, "rewards.mine: objects of"),
        ({"_component_": "own_rewards_bad.CannotBeCalled"}, "rewards.mine: objects of"),
        ({"_component_": "own_rewards_bad.Absent"}, "rewards.mine._component_: own_rewards_bad.Ab"),
        ({"_component_": "own_rewards_bad.number"}, "rewards.mine._component_: own_rewards_bad.nu"),
        ({"_component_": "own_rewards_bad.judge"}, "rewards.mine._component_: own_rewards_bad.ju"),
        (
            {"_component_": "grpo_components.rewards.formats.ResponseLength", "max_words": "many"},
            "rewards.mine.max_words, min_words: 'many', 0 given",
        ),
        (
            {"_component_": "grpo_components.rewards.code_tests.CodeTests", "wall_s": "8"},
            "rewards.mine.wall_s: '8' given",
        ),
        (
            {"_component_": "grpo_components.rollout.rewards.BoxedFormat"},
            "rewards.mine._component_: grpo_components.rollout.rewards.BoxedFormat has moved",
        ),
        ({"_component_": "no_such_module.X"}, "rewards.mine._component_: no_such_module.X cannot"),
        ({"_component_": "..X"}, "rewards.mine._component_: ..X cannot be imported"),
        ({"weight": 1.0}, "rewards.mine._component_: missing"),
    ],
)
def test_a_component_that_cannot_be_used_is_refused(cfg, refusal, node, start):
    Path("own_rewards_bad.py").write_text(OWN_MODULE)
    cfg.rewards.mine = node
    assert refusal().startswith(start)


@pytest.mark.parametrize(
    ("override", "key", "hint"),
    [
        ("optimizer.weight_decays=0", "optimizer.weight_decays", "optimizer.weight_decay?"),
        ("model.num_layer=4", "model.num_layer", "did you mean model.num_layers?"),
        ("dataset.src=x", "dataset.src", "source"),
        ("loss.epsilon=0.2", "loss.epsilon", "clip_low, clip_high, kl_coeff"),
        ("rewards.correctness.weights=1", "rewards.correctness.weights", "correctness.weight?"),
        ("rewards.correctness.answer_format=xml", "rewards.correctness.answer_format", "tag"),
        ("model.norm_eps=x", "model.norm_eps", "a number"),
        ("lr_scheduler={_component_: torch.optim.lr_scheduler.StepLR}", "lr_scheduler.step", ""),
    ],
)
def test_an_argument_that_is_wrong_or_unknown_is_named_with_what_is_allowed(
    refusal, override, key, hint
):
    message = refusal(override)
    assert message.startswith(key) and hint in message.partition("; allowed: ")[2]


def test_a_broken_module_of_a_user_is_named_with_its_line(cfg, refusal):
    Path("own_rewards_broken.py").write_text("import os\nthis_is_not_defined\n")
    cfg.rewards.mine = {"_component_": "own_rewards_broken.Reward"}
    message = refusal()
    assert "NameError: name 'this_is_not_defined'" in message
    assert "own_rewards_broken.py:2" in message


def test_the_current_folder_hides_no_installed_package(check):
    Path("datasets.py").write_text("raise AssertionError('imported the wrong module')\n")
    check()
    assert sys.path[-1] == str(Path.cwd())


def test_programs_are_ended_before_their_reward_is(cfg, check, refusal):
    cfg.rewards.code = {"_component_": "grpo_components.rewards.code_tests.CodeTests"}
    check()
    assert refusal("timeouts.reward_s=8").startswith("rewards.code.wall_s: 8 given with time")
    assert refusal("rewards.code.cpu_s=0").startswith("rewards.code.cpu_s: 0 given")


def test_the_arguments_of_a_judge_are_checked_by_their_keys(cfg, check, refusal):
    cfg.rewards.judge = {
        "_component_": "grpo_components.rewards.judge.LLMJudge",
        **{"base_url": "http://localhost:1/v1", "model": "m", "rubric": "{{ response }}"},
        "requests_per_minute": 60,
    }
    check()
    assert refusal("rewards.judge.wall_s=10").startswith("rewards.judge.wall_s: 10 given with time")
    message = refusal("num_generators=2", "reward_workers=4")
    assert message.startswith("rewards.judge.requests_per_minute: 60 given: with 8 reward process")
    assert refusal("rewards.judge.verdict.format=x").startswith("rewards.judge.verdict.format: ")
    assert refusal("rewards.judge.api_key_env=NONE_X").startswith("rewards.judge.api_key_env: no ")


MULTI_TURN = (
    "environment._component_=grpo_components.rollout.multi_turn.MultiTurnEnvironment",
    "environment.max_turns=4",
    "environment.world._component_=grpo_components.rollout.tools.shipped_tools",
)


@pytest.mark.parametrize(
    ("overrides", "key", "allowed"),
    [
        (["environment.max_turns=0"], "environment.max_turns", "at least 1"),
        (["environment.max_turns=33"], "environment.max_turns", "max_response_tokens = 32"),
        (["environment.turns=3"], "environment.turns", "max_turns"),
        (["environment.num_slots=3"], "environment.num_slots", "without"),
        (["~environment.world"], "environment.world", "MultiTurnEnvironment"),
        (["environment.world.tool=[]"], "environment.world.tool", "world.tools"),
        (["environment.world.tools=[browser]"], "environment.world", "calculator, python"),
        (
            ["environment.world._component_=my_worlds.Nowhere"],
            "environment.world._component_",
            "a dotted path",
        ),
        (["environment.world=my_worlds.SecretDigit"], "environment.world", "`_component_`"),
        (
            ["environment.world._component_=their_worlds.Forgetful", "~environment.world.tools"],
            "environment.world",
            "a class called with prompt, seed",
        ),
    ],
)
def test_an_environment_of_several_turns_is_checked_with_its_world(
    cfg, refusal, overrides, key, allowed
):
    cfg.environment = {}
    cfg.merge_with_dotlist(list(MULTI_TURN))
    cfg.environment.world.tools = ["calculator"]
    world = "class Forgetful:\n    def __call__(self, prompt):\n        pass\n"
    Path("their_worlds.py").write_text(world)
    for removed in [override for override in overrides if override.startswith("~")]:
        parent, _, name = removed[1:].rpartition(".")
        del OmegaConf.select(cfg, parent)[name]
    message = refusal(*(override for override in overrides if not override.startswith("~")))
    assert message.startswith(f"{key}: ") and allowed in message.partition("; allowed: ")[2]


def test_an_environment_of_several_turns_is_accepted(cfg, check):
    cfg.environment = {}
    cfg.merge_with_dotlist(list(MULTI_TURN))
    cfg.environment.world.tools = ["calculator"]
    check()


@pytest.mark.parametrize(
    ("path", "problem", "allowed"),
    [
        ("own_words.Brevitty", "own_words has no Brevitty", "did you mean own_words.Brevity?"),
        ("own_words.sub.Brevity", "own_words has no sub", "own_words.Brevity, own_words.made"),
        ("own_words.py.Brevity", "suffix", "a dotted path: own_words.Brevity"),
        ("own_word.Brevity", "no module own_word", "did you mean own_words.Brevity?"),
        ("nothing_like_it.X", "no module nothing_like_it", "a dotted path"),
    ],
)
def test_a_dotted_path_that_leads_nowhere_is_answered_with_one_that_leads_there(
    cfg, refusal, path, problem, allowed
):
    source = "import os\nfrom pathlib import Path\n_private = 1\n"
    source += "class Brevity:\n    pass\ndef made():\n    pass\n"
    Path("own_words.py").write_text(source)
    cfg.rewards.mine = {"_component_": path}
    message = refusal()
    assert message.startswith("rewards.mine._component_: ") and problem in message
    assert message.partition("; allowed: ")[2].startswith(allowed)


def test_a_module_that_a_users_module_lacks_is_named_with_the_line(cfg, refusal):
    Path("own_lacking.py").write_text("import os\nimport not_installed_here\n")
    cfg.rewards.mine = {"_component_": "own_lacking.Reward"}
    message = refusal()
    assert "not_installed_here" in message and "own_lacking.py:2" in message


def test_null_removes_a_reward(cfg, check, refusal):
    left = set(cfg.rewards) - {"format"}
    assert left and set(check("rewards.format=null").rewards) == left
    assert refusal(*(f"rewards.{name}=null" for name in cfg.rewards)).startswith("rewards: ")
