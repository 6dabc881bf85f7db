"""What is no component of its kind is refused by its key before anything starts; ours pass."""

import random
import re
import runpy
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torchtune.config._utils import _merge_yaml_and_cli_args

from grpo_components.config import preflight
from grpo_components.config.building import build_data
from grpo_components.config.component_trial import check_logger
from grpo_components.config.objective import build_objective

RECIPES = Path(__file__).parents[3] / "recipes"
CONFIG = RECIPES / "configs" / "tiny_async_grpo.yaml"
grpo_loss = runpy.run_path(str(RECIPES / "async_grpo_full_finetune_distributed.py"))["grpo_loss"]
OBJECTIVE = "grpo_components.objective"
REWARDS = """
import os
import sys
import time


class Reward:
    def __init__(self, kind="right"):
        self.kind = kind
        if kind == "unbuilt":
            sys.exit(0)

    def __call__(self, *, prompt_text, response_text, answer, finish_reason):
        return {
            "right": lambda: 1.0,
            "sometimes": lambda: float(answer) / int(int(answer) % 2 == 0),
            "text": lambda: "good",
            "nan": lambda: float("nan"),
            "none": lambda: None,
            "ends": lambda: sys.exit(0),
            "dies": lambda: os._exit(0),
            "hangs": lambda: time.sleep(100),
        }[self.kind]()
"""
OWN = """
import random
import sys
import threading

import numpy as np
import torch
from torchrl.envs import EnvBase

from grpo_components.rollout.environments import SingleTurnEnvironment


class Loss:
    calls = 0

    def __init__(self, kind="right"):
        self.kind, self.own_calls = kind, 0

    def __call__(self, inputs):
        self.own_calls += 1
        random.random(), np.random.rand(), torch.rand(1)
        losses = -inputs.trainer_logprobs * inputs.advantages
        return {
            "right": lambda: (losses, {"loss/own": losses}),
            "mean": lambda: (losses.mean(), {}),
            "wide": lambda: (losses[:, None], {}),
            "detached": lambda: (losses.detach(), {}),
            "entropy": lambda: (inputs.entropy, {}),
            "nan": lambda: (losses * float("nan"), {}),
            "alone": lambda: losses,
            "whole": lambda: (losses.long(), {}),
            "metric": lambda: (losses, {"loss/own": losses.mean()}),
            "float": lambda: (losses, {"loss/own": 0.5}),
            "taken": lambda: (losses, {"loss/total": losses}),
            "steep": lambda: ((inputs.trainer_logprobs * 0).sqrt(), {}),
            "late": lambda: (losses if inputs.step == 0 else losses[1:], {}),
            "ends": lambda: sys.exit(0),
            "raises": lambda: 1 / 0,  # line 40
        }[self.kind]()


class Unsent(Loss):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Advantages:
    def __init__(self, kind="right"):
        self.kind = kind

    def __call__(self, rewards):
        centred = rewards - rewards.mean(axis=1, keepdims=True)
        return {
            "right": lambda: centred,
            "tensor": lambda: torch.tensor(centred),
            "groups": lambda: centred[:, 0],
            "flat": lambda: centred.ravel(),
            "turned": lambda: centred.T,
            "list": lambda: centred.tolist(),
            "whole": lambda: (rewards > 0).astype(int),
            "none": lambda: None,
            "unguarded": lambda: centred / rewards.std(axis=1, keepdims=True),
            "ends": lambda: sys.exit(0),
        }[self.kind]()


class Weights:
    def __init__(self, kind="right"):
        self.kind = kind

    def __call__(self, log_ratios, sequence_ids):
        return {
            "right": lambda: log_ratios.exp(),
            "one": lambda: log_ratios.exp().mean(),
            "mask": lambda: log_ratios < 1,
            "negative": lambda: -log_ratios.exp(),
            "nan": lambda: log_ratios * float("nan"),
            "ends": lambda: sys.exit(3),
        }[self.kind]()


class Shares:
    def __init__(self, kind="right"):
        self.kind = kind

    def __call__(self, token_counts):
        return {
            "right": lambda: 1 / (len(token_counts) * token_counts),
            "sum": lambda: 1 / token_counts.sum(),
            "nan": lambda: token_counts * float("nan"),
            "text": lambda: "TokenMean",
        }[self.kind]()


def no_environment(*, num_slots, **_):
    return object()


def wide(*, num_slots, decode, score):
    return SingleTurnEnvironment(num_slots=num_slots + 1, decode=decode, score=score)


class Forgetful(SingleTurnEnvironment):
    def _step(self, tensordict):
        after = super()._step(tensordict)
        for slot in after.unbind(0):
            slot["tokens"] = slot["tokens"][1:]
        return after


class Unasked(EnvBase):
    pass


class Ends(SingleTurnEnvironment):
    def _reset(self, tensordict=None, **_):
        sys.exit(0)


class Some(SingleTurnEnvironment):
    def _step(self, tensordict):
        if self._prompts[0]["prompt_index"] == 0:
            raise RuntimeError("no such level")
        return super()._step(tensordict)


class Rates:
    def __init__(self, optimizer, *, num_training_steps):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.param_groups[0]["lr"] = float("nan")
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Stand where a user stands who has components of their own."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_parts.py").write_text(OWN)
    (folder / "own_rewards.py").write_text(REWARDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield folder
    for name in ("own_parts", "own_rewards", "my_losses", "my_rewards", "my_environments"):
        sys.modules.pop(name, None)


def checked(*overrides):
    """The tiny config with a few prompts and other components."""
    given: Any = OmegaConf.to_container(OmegaConf.load(CONFIG))
    few = ("dataset.num_rows=8", "eval_dataset.num_rows=2", "num_steps=5")
    return preflight.check(_merge_yaml_and_cli_args(Namespace(**given), [*few, *overrides]))


@pytest.fixture(scope="module")
def data(tiny_policy, own):
    """Tokenizer and data set."""
    return build_data(checked("output_dir=/tmp/not-made"))[:2]


@pytest.fixture
def tried(own, data, tmp_path):
    """Build what the recipe's `setup` builds, and try it; returns the objective."""

    def run(*overrides):
        cfg = checked(*overrides, f"output_dir={tmp_path / 'run'}")
        objective = build_objective(cfg, grpo_loss, *data)
        assert not (tmp_path / "run").exists()
        return objective

    return run


def component(key, path, **arguments):
    """Overrides that put a component in the place of the tiny config's."""
    drops = {
        "loss": ("clip_low", "clip_high"),
        "metric_logger": ("log_dir",),
        "optimizer": ("fused", "weight_decay"),
        "rewards.correctness": ("answer_format",),
    }
    return (
        *(f"{key}._component_={path}", *(f"~{key}.{name}" for name in drops.get(key, ()))),
        *(f"{key}.{name}={value}" for name, value in arguments.items()),
    )


def refusal(tried, *overrides):
    with pytest.raises(ValueError) as refused:
        tried(*overrides)
    message = str(refused.value)
    assert "\n" not in message and len(message) <= 300 and "allowed: " in message, message
    return message


LOSSES = {
    "mean": "shape ()",
    "wide": "shape [10, 1]",
    "detached": "without a gradient",
    "entropy": "gradient misses",
    "nan": "losses with nan",
    "alone": "a pair",
    "whole": "int64",
    "metric": "loss/own of shape ()",
    "float": "loss/own of type float",
    "taken": "loss/total",
    "steep": "with the gradient",
    "late": "shape [9]",
    "ends": "SystemExit",
    "raises": "ZeroDivisionError",
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_does_not_give_a_loss_for_each_token_is_refused(tried, kind):
    message = refusal(tried, *component("loss", "own_parts.Loss", kind=kind))
    assert message.startswith("loss: own_parts.Loss ") and LOSSES[kind] in message


def test_a_users_error_shows_its_own_file_and_line(tried, own):
    message = refusal(tried, *component("loss", "own_parts.Loss", kind="raises"))
    line = next(n for n, text in enumerate(OWN.splitlines(), 1) if "# line 40" in text)
    assert f"({own / 'own_parts.py'}:{line})" in message


@pytest.mark.parametrize(
    ("key", "path", "kind", "what"),
    [
        ("advantages", "own_parts.Advantages", "groups", "shape [3], float64 for [3, 8] rewards"),
        ("advantages", "own_parts.Advantages", "flat", "shape [24]"),
        ("advantages", "own_parts.Advantages", "turned", "shape [8, 3]"),
        ("advantages", "own_parts.Advantages", "list", "type list"),
        ("advantages", "own_parts.Advantages", "whole", "int64"),
        ("advantages", "own_parts.Advantages", "none", "None"),
        ("advantages", "own_parts.Advantages", "unguarded", "nan for response 0 of a group"),
        ("advantages", "own_parts.Advantages", "ends", "SystemExit"),
        ("off_policy", "own_parts.Weights", "one", "shape ()"),
        ("off_policy", "own_parts.Weights", "mask", "bool"),
        ("off_policy", "own_parts.Weights", "negative", "the weight -"),
        ("off_policy", "own_parts.Weights", "nan", "the weight nan"),
        ("off_policy", "own_parts.Weights", "ends", "SystemExit"),
        ("aggregation", "own_parts.Shares", "sum", "for the token counts of [5]"),
        ("aggregation", "own_parts.Shares", "nan", "no finite number"),
        ("aggregation", "own_parts.Shares", "text", "type str"),
    ],
)
def test_a_part_of_the_objective_with_another_output_is_refused(tried, key, path, kind, what):
    message = refusal(tried, *component(key, path, kind=kind))
    assert message.startswith(f"{key}: {path} ") and what in message


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("off_policy", "builtins.print"),
        ("loss", "builtins.list"),
        ("loss", "builtins.print"),
        ("loss", f"{OBJECTIVE}.aggregation.TokenMean"),
        ("loss", "torch.nn.CrossEntropyLoss"),
        ("aggregation", "os.getcwd"),
        ("aggregation", f"{OBJECTIVE}.losses.GRPOLoss"),
        ("advantages", f"{OBJECTIVE}.aggregation.TokenMean"),
        ("advantages", "torch.nn.CrossEntropyLoss"),
        ("advantages", "builtins.print"),
        ("off_policy", f"{OBJECTIVE}.losses.GRPOLoss"),
        ("environment", "builtins.id"),
        ("environment", "builtins.dict"),
        ("environment", "own_parts.no_environment"),
        ("environment", "own_parts.wide"),
        ("environment", "own_parts.Forgetful"),
        ("environment", "own_parts.Unasked"),
        ("environment", "own_parts.Ends"),
        ("metric_logger", "collections.Counter"),
        ("metric_logger", "torch.nn.CrossEntropyLoss"),
        ("lr_scheduler", "own_parts.Rates"),
        ("loss", "own_parts.Unsent"),
    ],
)
def test_what_is_no_such_component_is_refused_by_its_key(tried, key, path):
    assert refusal(tried, *component(key, path)).startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("text", "ValueError"),
        ("nan", "gave nan"),
        ("none", "TypeError"),
        ("ends", "SystemExit"),
        ("dies", "ended its process"),
        ("hangs", "within 1 s"),
        ("unbuilt", "cannot be built, SystemExit"),
    ],
)
def test_a_reward_that_gives_no_number_is_refused(tried, kind, what):
    own = component("rewards.correctness", "own_rewards.Reward", kind=kind)
    message = refusal(tried, *own, "timeouts.reward_s=1")
    assert message.startswith("rewards.correctness: own_rewards.Reward ") and what in message


def test_a_judge_that_is_down_is_refused_before_the_start(tried):
    own = component("rewards.judge", "grpo_components.rewards.judge.LLMJudge", model="m")
    own += ("rewards.judge.base_url=http://127.0.0.1:9/v1", "rewards.judge.retries=0")
    message = refusal(tried, *own, "rewards.judge.rubric='{{ response }}'")
    assert message.startswith("rewards.judge: ") and "JudgeError" in message
    assert "127.0.0.1:9" in message


@pytest.mark.parametrize("name", ["code_tests.CodeTests", "countdown.CountdownCorrectness"])
def test_a_reward_of_ours_that_cannot_judge_the_answers_of_the_data_is_refused(tried, name):
    message = refusal(tried, *component("rewards.correctness", f"grpo_components.rewards.{name}"))
    assert message.startswith("rewards.correctness: ") and "ValueError" in message
    assert "answer: " in message


def test_a_function_that_makes_no_reward_is_refused(tried):
    message = refusal(tried, *component("rewards.correctness", "builtins.print"))
    assert message.startswith("rewards.correctness: builtins.print makes a NoneType")


def test_what_contributing_prints_is_let_through(tried, own):
    page = (CONFIG.parents[2] / "CONTRIBUTING.md").read_text()
    for text in re.findall(r"```python\n(# my_\w+\.py\n.*?)```", page, re.DOTALL):
        (own / text.split()[1]).write_text(text)
    weighs = "off_policy._component_=grpo_components.objective.off_policy.GeometricMask"
    tried(*component("loss", "my_losses.TruncatedImportance", max_ratio=2.0), weighs)
    tried(*component("rewards.correctness", "my_rewards.Brevity", max_words=40))
    tried("environment=my_environments.after_the_thought")


def test_what_a_function_makes_for_a_logger_is_looked_at():
    with pytest.raises(ValueError, match=r"metric_logger: builtins\.print has no log_dict"):
        check_logger("builtins.print", None)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        component("loss", "own_parts.Loss"),
        component("advantages", "own_parts.Advantages"),
        component("advantages", "own_parts.Advantages", kind="tensor"),
        component("off_policy", "own_parts.Weights"),
        component("aggregation", "own_parts.Shares"),
        component("rewards.correctness", "own_rewards.Reward"),
        component("rewards.correctness", "own_rewards.Reward", kind="sometimes"),
        component("environment", "own_parts.Some"),
        (
            "environment._component_=grpo_components.rollout.multi_turn.MultiTurnEnvironment",
            "environment.max_turns=3",
            "environment.world._component_=grpo_components.rollout.tutor.Tutor",
        ),
        ("off_policy._component_=grpo_components.objective.off_policy.MaskedIS",),
        ("loss._component_=grpo_components.objective.losses.DecoupledPPOLoss", "loss.kl_coeff=0.1"),
        ("loss.entropy_coeff=0.1", "reward_shaping.kl_coeff=0.1"),
    ],
)
def test_what_fits_is_let_through_and_not_disturbed(tried, overrides):
    states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    objective = tried(*overrides)
    assert random.getstate() == states[0]
    np.testing.assert_equal(np.random.get_state(legacy=False), states[1])
    assert torch.equal(torch.get_rng_state(), states[2])
    assert getattr(objective.loss, "own_calls", 0) == 0


NOT_DETACHED = """
class Clipped:
    def __call__(self, tokens):
        ratio = (tokens.trainer_logprobs - tokens.anchor_logprobs).exp()
        return -ratio.clamp(0.8, 1.2) * tokens.advantages, {}
"""


def test_what_looks_wrong_is_a_warning_with_the_component_and_nothing_of_ours_does(
    tried, tmp_path, monkeypatch
):
    (tmp_path / "doubtful.py").write_text(NOT_DETACHED)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert tried("loss.kl_coeff=0.1").doubts == ()
    doubtful = component("loss", "doubtful.Clipped")
    (line,) = tried(*doubtful).doubts
    assert line.startswith("warning: loss: ") and "Clipped: a token whose ratio" in line
    assert tried(*doubtful, "max_staleness=0", "pull_every_m_rollouts=1").doubts == ()
