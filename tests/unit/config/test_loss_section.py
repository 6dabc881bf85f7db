"""The sections `loss` and `user`: the recipe's own loss or a component, and a fork's own keys."""

from argparse import Namespace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from torchtune.config._utils import _merge_yaml_and_cli_args

from grpo_components.config import preflight
from grpo_components.config.objective import build_loss, build_penalties
from grpo_components.objective.losses import GSPOLoss

CONFIG = Path(__file__).parents[3] / "recipes" / "configs" / "tiny_async_grpo.yaml"
GSPO = "loss._component_=grpo_components.objective.losses.GSPOLoss"
OWN = """
class Takes:
    def __init__(self, kl_coeff=0.0):
        pass

    def __call__(self, tokens):
        raise NotImplementedError
"""


@pytest.fixture
def checked(tiny_policy, tmp_path, monkeypatch):
    def check(*overrides):
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        given = OmegaConf.to_container(OmegaConf.load(CONFIG))
        assert isinstance(given, dict)
        cfg = _merge_yaml_and_cli_args(Namespace(**given), list(overrides))
        cfg.output_dir = str(tmp_path / "run")
        return preflight.check(cfg)

    return check


def test_without_a_component_the_loss_is_the_recipes_own(checked):
    cfg = checked("loss.clip_high=0.3", "~loss.clip_low")
    assert build_loss(cfg, lambda tokens, **clip: clip)(Namespace(step=0)) == {
        "clip_low": 0.2,
        "clip_high": 0.3,
    }


def test_a_component_gets_its_own_arguments_and_the_penalties_get_theirs(checked):
    cfg = checked(GSPO, "loss.kl_coeff=0.1", "loss.kl_estimator=k2", "loss.entropy_coeff=0.01")
    loss, penalties = build_loss(cfg, lambda tokens: None), build_penalties(cfg)
    assert isinstance(loss, GSPOLoss) and loss.clip_low(0) == 0.2
    assert penalties.kl_coeff(0) == 0.1 and penalties.entropy_coeff == 0.01
    assert penalties.needs_reference


@pytest.mark.parametrize(
    ("overrides", "key", "allowed"),
    [
        (["loss.dual_clip=3.0"], "loss.dual_clip", "clip_low, clip_high, kl_coeff"),
        ([GSPO, "loss.epsilon=3.0"], "loss.epsilon", "clip_low, clip_high, dual_clip, kl_coeff"),
        ([GSPO, "loss.kl_estimator=k4"], "loss.kl_estimator", "k1 | k2 | k3"),
        (["loss.entropy_coeff=-1"], "loss.entropy_coeff", "at least 0"),
        (["loss=my.Loss"], "loss", "_component_"),
        (["loss._component_=takes.Takes"], "loss.kl_coeff", "without this argument"),
        (["user=3"], "user", "a mapping"),
    ],
)
def test_what_neither_takes_is_refused(checked, tmp_path, overrides, key, allowed):
    (tmp_path / "takes.py").write_text(OWN)
    with pytest.raises(ValueError) as refused:
        checked(*overrides)
    message = str(refused.value)
    assert message.startswith(f"{key}: ") and allowed in message.partition("allowed: ")[2]


def test_keys_of_a_fork_are_passed_through(checked):
    assert checked().user == {}
    cfg = checked("user.my_coeff=0.5", "user.names=[a,b]", "user.part._component_=no.such.Thing")
    assert cfg.user.my_coeff == 0.5 and cfg.user.names == ["a", "b"]
    assert cfg.user.part._component_ == "no.such.Thing"
