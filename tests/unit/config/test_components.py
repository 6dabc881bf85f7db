"""Components that take their arguments are accepted and built; what cannot be built is refused."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lib.config_errors import refusal_of
from omegaconf import OmegaConf

from grpo_components.config.components import (
    SHIPPED_ENVIRONMENT,
    build,
    build_environment,
    environment_kind,
)

GRPO = "grpo_components.objective.losses.GRPOLoss"
LOGGERS = "torchtune.training.metric_logging"
REWARDS = "grpo_components.rewards"
JUDGE = {"_component_": f"{REWARDS}.judge.LLMJudge", "base_url": "http://localhost:1/v1"}
JUDGE |= {"model": "m", "rubric": "{{ response }}"}

MULTI_TURN = (
    "environment._component_=grpo_components.rollout.multi_turn.MultiTurnEnvironment "
    "environment.max_turns=4 environment.world._component_=grpo_components.rollout.tools."
    "shipped_tools environment.world.tools=[calculator]"
)


def test_weights_and_biases_without_a_login_is_refused(refused, check, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))  # without a ~/.netrc
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    given = f"metric_logger._component_={LOGGERS}.WandBLogger"
    assert refused("~metric_logger.log_dir", given) == "metric_logger"
    monkeypatch.setenv("WANDB_MODE", "offline")
    check(given)


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
    part = {"_component_": "types.SimpleNamespace", "size": 4}
    made = build_environment(component("own_parts.Names", part=part), **OFFERED)
    assert made.given == {"num_slots": 2, "encode": list, "part": SimpleNamespace(size=4)}
    made = build_environment(component("own_parts.three", own=5), **OFFERED)
    assert made == {"num_slots": 2, "decode": str, "score": len, "own": 5}
    assert build_environment(component("own_parts.everything"), **OFFERED) == OFFERED


def test_the_shipped_environments_are_told_from_ones_own(own):
    kinds = {
        "own_parts.Names": "torchrl",
        "own_parts.three": "torchrl",
        SHIPPED_ENVIRONMENT["_component_"]: "single_turn",
        "grpo_components.rollout.multi_turn.MultiTurnEnvironment": "multi_turn",
        "grpo_components.agents.environment.AgentEnvironment": "agents",
    }
    assert {path: environment_kind(component(path)) for path in kinds} == kinds
