"""A component that is not there, or does not take its arguments, is refused by its key."""

import sys
from pathlib import Path

import pytest
import torch
from lib.config_errors import refusal_of, refused_key
from omegaconf import OmegaConf

from grpo_components.config.components import (
    SHIPPED_ENVIRONMENT,
    build,
    build_environment,
    has_slots_apart,
    imported_component,
)

GRPO = "grpo_components.objective.losses.GRPOLoss"
LOGGERS = "torchtune.training.metric_logging"
REWARDS = "grpo_components.rewards"
OWN = """
class Good:
    def __init__(self, limit: int):
        self.limit = limit
    def __call__(self, *, prompt_text, response_text, answer, finish_reason):
        return 1.0

class Inherited(Good):
    pass

def make(**kwargs):
    return Good(1)

def judge(*, prompt_text, response_text, answer, finish_reason):
    return 1.0

def leave(how):
    raise SystemExit(0)

number = 3

class Part:
    def __init__(self, size):
        self.size = size

class Metaclass(type):
    def __call__(cls, *args, **kwargs):  # as torchrl's has
        return super().__call__(*args, **kwargs)

class Names(metaclass=Metaclass):
    slots_apart = True

    def __init__(self, *, num_slots, encode, part=None):
        self.given = {"num_slots": num_slots, "encode": encode, "part": part}

def three(*, num_slots, decode, score, own=1):
    return {"num_slots": num_slots, "decode": decode, "score": score, "own": own}

def everything(**given):
    return given
"""


@pytest.fixture
def own(cfg):
    """A module of the user in the current folder, as Python finds it once preflight has run."""
    Path("own_parts.py").write_text(OWN)
    Path("own_broken.py").write_text("import os\nthis_is_not_defined\n")
    Path("own_lacking.py").write_text("import os\nimport not_installed_here\n")
    sys.path.append(str(Path.cwd()))
    yield
    for name in ("own_parts", "own_broken", "own_lacking"):
        sys.modules.pop(name, None)


JUDGE = {
    "_component_": f"{REWARDS}.judge.LLMJudge",
    **{"base_url": "http://localhost:1/v1", "model": "m", "rubric": "{{ response }}"},
}


@pytest.mark.parametrize(
    ("node", "overrides", "key"),
    [
        ({"_component_": "own_parts.Good"}, "", ".limit"),
        ({"_component_": "own_parts.Absent"}, "", "._component_"),
        ({"_component_": "own_parts.number"}, "", "._component_"),
        ({"_component_": "own_parts.judge"}, "", "._component_"),
        ({"_component_": "own_broken.Reward"}, "", "._component_"),
        ({"_component_": "own_lacking.Reward"}, "", "._component_"),
        ({"_component_": f"{REWARDS}.formats.ResponseLength", "max_words": "x"}, "", ".max_words"),
        ({"_component_": f"{REWARDS}.code_tests.CodeTests", "wall_s": "8"}, "", ".wall_s"),
        ({"_component_": f"{REWARDS}.code_tests.CodeTests"}, "timeouts.reward_s=8", ".wall_s"),
        ({"_component_": "no_such_module.X"}, "", "._component_"),
        (JUDGE | {"wall_s": 10}, "", ".wall_s"),
        (JUDGE | {"api_key_env": "NONE_X"}, "", ".api_key_env"),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused(cfg, own, refused, node, overrides, key):
    cfg.rewards.mine = node
    assert refused(overrides).partition(",")[0] == f"rewards.mine{key}"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("rewards.correctness=null", "rewards"),
        ("rewards.correctness.is_success=false", "rewards"),
        ("rewards.other={_component_: a.B, is_success: true}", "rewards"),
        (
            "rewards.reward_model={_component_: a.B} reward_model.path=/a/model",
            "rewards.reward_model",
        ),
    ],
)
def test_rewards_that_do_not_go_together_are_refused(read, overrides, key):
    assert refused_key(read, overrides) == key


@pytest.mark.parametrize(
    ("overrides", "key", "hint"),
    [
        ("optimizer.weight_decays=0", "optimizer.weight_decays", "optimizer.weight_decay?"),
        ("model.num_layer=4", "model.num_layer", "model.num_layers?"),
        ("dataset.src=x", "dataset.src", "source"),
        ("loss.epsilon=0.2", "loss.epsilon", "clip_low, clip_high, kl_coeff"),
        ("rewards.correctness.weights=1", "rewards.correctness.weights", "correctness.weight?"),
        ("rewards.correctness.answer_format=xml", "rewards.correctness.answer_format", "tag"),
        (
            "lr_scheduler={_component_: torch.optim.lr_scheduler.StepLR}",
            "lr_scheduler.step_size",
            "",
        ),
        ("checkpointer=null", "checkpointer", "`_component_` and its arguments"),
        (
            "model._component_=grpo_components.models.hugging_face model.path=${base_model_path}",
            "model.vocab_size",
            "path",
        ),
        ("profiler.enabled=true profiler.steps=3", "profiler.steps", "active_steps"),
    ],
)
def test_an_argument_that_is_wrong_or_unknown_is_refused_with_a_hint(
    merged, check, overrides, key, hint
):
    error = refusal_of(check, overrides)
    assert error.key == key and hint in error.allowed


MULTI_TURN = (
    "environment._component_=grpo_components.rollout.multi_turn.MultiTurnEnvironment "
    "environment.max_turns=4 environment.world._component_=grpo_components.rollout.tools."
    "shipped_tools environment.world.tools=[calculator]"
)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("environment.max_turns=0", "environment.max_turns"),
        ("environment.turns=3", "environment.turns"),
        ("environment.num_slots=3", "environment.num_slots"),
        ("~environment.world", "environment.world"),
        ("environment.world.tool=[]", "environment.world.tool"),
        ("environment.world.tools=[browser]", "environment.world.tools"),
        ("environment.world._component_=my_worlds.Nowhere", "environment.world._component_"),
    ],
)
def test_an_environment_of_several_turns_is_checked_with_its_world(own, refused, overrides, key):
    assert refused(MULTI_TURN, overrides) == key


@pytest.mark.parametrize(
    "logger", ["builtins.dict", f"{LOGGERS}.CometLogger", f"{LOGGERS}.WandBLogger"]
)
def test_a_logger_that_a_run_could_not_build_is_refused(
    logger, refused, check, monkeypatch, tmp_path
):
    monkeypatch.setenv("HOME", str(tmp_path))  # without a ~/.netrc
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert (
        refused("~metric_logger.log_dir", f"metric_logger._component_={logger}") == "metric_logger"
    )
    monkeypatch.setenv("WANDB_MODE", "offline")
    if "WandB" in logger:
        check(f"metric_logger._component_={logger}")


def test_what_takes_its_arguments_is_accepted(cfg, own, check):
    for number, name in enumerate(("Good", "Inherited")):
        cfg.rewards[f"mine_{number}"] = {"_component_": f"own_parts.{name}", "limit": 3}
    cfg.rewards.made = {"_component_": "own_parts.make", "anything": 1}
    cfg.rewards.code = {"_component_": f"{REWARDS}.code_tests.CodeTests"}
    cfg.rewards.judge = JUDGE
    Path("datasets.py").write_text("raise AssertionError('imported the wrong module')\n")
    check("metric_logger.dir=x")  # the logger takes any further argument
    assert set(check("rewards.judge=null").rewards) == set(cfg.rewards) - {"judge"}
    check(MULTI_TURN)
    assert sys.path[-1] == str(Path.cwd())


@pytest.mark.parametrize(
    ("path", "problem", "allowed"),
    [
        ("own_parts.Goood", "No module named", "did you mean own_parts.Good?"),
        ("own_part.Good", "No module named 'own_part'", "did you mean own_parts.Good?"),
        ("nothing_like_it.X", "No module named", "a dotted path"),
        ("own_broken.X", "own_broken.py:2", "a dotted path"),
        ("own_lacking.X", "own_lacking.py:2", "a dotted path"),
        ("own_parts.number", "cannot be called", "a class or function"),
    ],
)
def test_a_dotted_path_that_leads_nowhere_is_answered_with_one_that_leads_there(
    own, path, problem, allowed
):
    error = refusal_of(imported_component, "loss._component_", path)
    assert error.key == "loss._component_"
    assert problem in error.problem and error.allowed.startswith(allowed)


# ---- what is built ------------------------------------------------------------------------------


def component(path, **arguments):
    return OmegaConf.create({"_component_": path, **arguments})


def test_a_component_gets_its_own_arguments_and_those_of_the_recipe():
    loss = build("loss", component(GRPO, clip_low=0.3), clip_high=0.4)
    assert (loss.clip_low(0), loss.clip_high(0)) == (0.3, 0.4)
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = build("optimizer", component("torch.optim.SGD", lr=0.5), [parameter])
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["params"] == [parameter]


@pytest.mark.parametrize(
    ("path", "arguments", "key", "problem"),
    [
        (GRPO, {"clip_lo": 0.3}, "loss", "TypeError"),
        ("no_such_module.Loss", {}, "loss", "no_such_module.Loss cannot be built"),
        ("grpo_components.objective.losses.Nope", {}, "loss", "Nope cannot be built"),
        (GRPO, {"clip_low": 2}, "loss.clip_low", "2 given"),
        ("own_parts.leave", {"how": "exit"}, "loss", "SystemExit"),
    ],
)
def test_what_cannot_be_built_is_refused_by_its_key(own, path, arguments, key, problem):
    error = refusal_of(build, "loss", component(path, **arguments))
    assert error.key == key and problem in error.problem
    assert error.__cause__ is not None


OFFERED = {"num_slots": 2, "decode": str, "encode": list, "score": len, "max_response_tokens": 9}


def test_an_environment_gets_what_its_signature_names_and_its_parts_are_built(own):
    part = {"_component_": "own_parts.Part", "size": 4}
    made = build_environment(component("own_parts.Names", part=part), **OFFERED)
    assert made.given == {"num_slots": 2, "encode": list, "part": made.given["part"]}
    assert made.given["part"].size == 4
    made = build_environment(component("own_parts.three", own=5), **OFFERED)
    assert made == {"num_slots": 2, "decode": str, "score": len, "own": 5}
    assert build_environment(component("own_parts.everything"), **OFFERED) == OFFERED
    assert has_slots_apart(component("own_parts.Names"))
    assert not has_slots_apart(component("own_parts.three"))
    assert not has_slots_apart(OmegaConf.create(SHIPPED_ENVIRONMENT))
