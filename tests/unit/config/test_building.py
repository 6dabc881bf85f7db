"""A component that cannot be built, or is not the checkpoint's, is named by its config key."""

import copy
import json
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torchtune.models.qwen2 import qwen2
from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf

from grpo_components.config.building import (
    SHIPPED_ENVIRONMENT,
    build,
    build_environment,
    check_components,
    has_slots_apart,
)

MODEL = {
    "vocab_size": 50,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 48,
    "max_seq_len": 64,
    "tie_word_embeddings": True,
}
HF_CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
GRPO = "grpo_components.objective.losses.GRPOLoss"
SCHEDULE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"


def component(path, **arguments):
    return OmegaConf.create({"_component_": path, **arguments})


def refusal(key, node, *args, **kwargs):
    with pytest.raises(ValueError) as refused:
        build(key, node, *args, **kwargs)
    return str(refused.value)


def test_a_component_gets_its_own_arguments_and_those_of_the_recipe():
    loss = build("loss", component(GRPO, clip_low=0.3), clip_high=0.4)
    assert (loss.clip_low(0), loss.clip_high(0)) == (0.3, 0.4)
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = build("optimizer", component("torch.optim.SGD", lr=0.5), [parameter])
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["params"] == [parameter]


def test_an_argument_that_does_not_exist_names_key_and_component():
    message = refusal("loss", component(GRPO, clip_lo=0.3))
    assert message.startswith(f"loss: {GRPO} cannot be built: TypeError: ")
    assert "clip_lo" in message


@pytest.mark.parametrize("path", ["no_such_module.Loss", "grpo_components.objective.losses.Nope"])
def test_a_component_that_does_not_exist_names_the_key(path):
    message = refusal("loss", component(path))
    assert message.startswith(f"loss: {path} cannot be built: ")


def test_a_value_that_the_component_refuses_is_told_once_with_its_key():
    assert refusal("loss", component(GRPO, clip_low=2)) == (
        "loss.clip_low: 2 given; allowed: above 0, at most 1"
    )
    message = refusal("optimizer", component("torch.optim.SGD", lr=-1.0), [torch.zeros(1)])
    assert message == "optimizer: Invalid learning rate: -1.0"


@pytest.mark.parametrize("raised", [SystemExit(0), SystemExit("bye"), GeneratorExit()])
def test_a_component_cannot_end_the_run_silently(monkeypatch, raised):
    def leave():
        raise raised

    module = types.ModuleType("leaving")
    module.leave = leave
    monkeypatch.setitem(sys.modules, "leaving", module)
    message = refusal("loss", component("leaving.leave"))
    assert message.startswith(f"loss: leaving.leave cannot be built: {type(raised).__name__}")


def test_what_a_component_raises_is_told_in_a_short_line():
    message = refusal("loss", component(GRPO, dual_clip="x\n" * 5000))
    assert message.startswith("loss.dual_clip: x") and len(message) <= 300
    assert "\n" not in message and message.endswith("or null")


def test_the_cause_stays_with_the_error():
    with pytest.raises(ValueError) as refused:
        build("loss", component(GRPO, nonsense=1))
    assert isinstance(refused.value.__cause__, TypeError)


# ---- before anything starts ---------------------------------------------------------------------


@pytest.fixture
def cfg(tmp_path):
    """A config over the checkpoint of a small policy."""
    torch.manual_seed(0)
    to_hf = partial(qwen2_tune_to_hf, num_heads=4, num_kv_heads=2, dim=32, tie_word_embeddings=True)
    weights = {n: t.contiguous() for n, t in to_hf(qwen2(**MODEL).state_dict()).items()}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    return OmegaConf.create(
        {
            "base_model_path": str(tmp_path),
            "num_steps": 10,
            "model": {"_component_": "torchtune.models.qwen2.qwen2", **MODEL},
            "checkpointer": {"model_type": "QWEN2"},
            "model_type": "${checkpointer.model_type}",
            "lora": None,
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
            "lr_scheduler": {"_component_": SCHEDULE, "num_warmup_steps": 2},
            "loss": {"load_balancing_coeff": 0.0},
            "compile": False,
            "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger"},
        }
    )


def wrong(cfg):
    with pytest.raises(ValueError) as refused:
        check_components(cfg)
    message = str(refused.value)
    return " ".join(message.split())  # as `exit_code` shows it


def test_what_fits_together_passes_with_and_without_a_scheduler(cfg):
    check_components(cfg)
    cfg.lr_scheduler = None
    check_components(cfg)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"embed_dim": 64},
            "model.embed_tokens.weight has shape [50, 64], the model's is [50, 32]",
        ),
        ({"vocab_size": 60}, "model.embed_tokens.weight has shape [60, 32]"),
        ({"intermediate_dim": 64}, "model.layers.0.mlp.down_proj.weight has shape [32, 64]"),
        ({"num_kv_heads": 4}, "model.layers.0.self_attn.k_proj.bias has shape [32]"),
        ({"num_layers": 1}, "missing tensor model.layers.1."),
        ({"num_layers": 3}, "unknown tensor model.layers.2."),
    ],
)
def test_a_model_of_another_shape_than_the_checkpoint_is_refused_by_its_tensor(
    cfg, change, problem
):
    cfg.model.update(change)
    message = wrong(cfg)
    assert message.startswith(f"model: {problem}")
    assert message.endswith(f"; allowed: the builder of {cfg.base_model_path}")


def test_a_model_of_the_checkpoints_shapes_and_another_function_is_refused_by_its_key(cfg):
    for key, value in (("norm_eps", 2.0), ("attn_dropout", 0.9), ("rope_base", 10.0)):
        changed = copy.deepcopy(cfg)
        changed.model[key] = value
        assert wrong(changed).startswith(f"model.{key}: {value} given, and ")
    cfg.model.update(num_heads=2, num_kv_heads=1)
    assert wrong(cfg).startswith("model.num_heads: 2 given, and ")


def test_load_balancing_of_a_model_without_experts_is_refused(cfg):
    cfg.loss.load_balancing_coeff = 0.01
    assert wrong(cfg).startswith("loss.load_balancing_coeff: a number above 0 given")


def test_a_model_of_another_family_is_refused(cfg):
    cfg.model = {
        "_component_": "torchtune.models.llama3.llama3",
        **{key: value for key, value in MODEL.items() if key != "tie_word_embeddings"},
    }
    assert wrong(cfg).startswith("model: missing tensor model.layers.0.self_attn.")


def test_a_model_type_of_another_family_than_the_model_is_refused(cfg):
    cfg.checkpointer.model_type = "LLAMA3"
    message = wrong(cfg)
    assert message.startswith("checkpointer.model_type: LLAMA3 given, and torchtune.models.qwen2")


def test_a_model_that_is_none_is_refused(cfg):
    cfg.model = {"_component_": "collections.Counter"}
    assert "AttributeError" in wrong(cfg)


@pytest.mark.parametrize(
    ("key", "change", "start"),
    [
        ("optimizer", {"lr": -1.0}, "optimizer: Invalid learning rate"),
        ("optimizer", {"_component_": "torch.optim.LBFGS"}, "optimizer: torch.optim.LBFGS fails"),
        ("optimizer", {"_component_": "torch.optim.SparseAdam"}, "optimizer: torch.optim.Sparse"),
        ("optimizer", {"no_such": 1}, "optimizer: torch.optim.AdamW cannot be built: TypeError"),
        ("lr_scheduler", {"no_such": 1}, f"lr_scheduler: {SCHEDULE} cannot be built: TypeError"),
        ("model", {"no_such": 1}, "model: torchtune.models.qwen2.qwen2 cannot be built: TypeError"),
    ],
)
def test_what_the_trainer_could_not_build_is_refused_before_it_starts(cfg, key, change, start):
    cfg[key].update(change)
    assert wrong(cfg).startswith(start)


def test_a_checkpoint_without_its_weights_is_refused(cfg):
    (Path(cfg.base_model_path) / "model.safetensors").unlink()
    assert "base_model_path: no file" in wrong(cfg)


def test_checking_takes_no_memory_for_the_model(cfg):
    """A model of a thousand times this machine's memory is compared like any other."""
    cfg.model.vocab_size = 10**13
    assert wrong(cfg).startswith("model: model.embed_tokens.weight has shape [10000000000000, 32]")


# ---- environments -------------------------------------------------------------------------------

OFFERED = {"num_slots": 2, "decode": str, "encode": list, "score": len, "max_response_tokens": 9}
MODULE = """
class Metaclass(type):
    def __call__(cls, *args, **kwargs):  # as torchrl's has
        return super().__call__(*args, **kwargs)


class Part:
    def __init__(self, size):
        self.size = size


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
def environments(tmp_path, monkeypatch):
    (tmp_path / "their_environments.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda name, **arguments: component(f"their_environments.{name}", **arguments)
    sys.modules.pop("their_environments", None)


def test_an_environment_gets_what_its_signature_names(environments):
    made = build_environment(environments("Names"), **OFFERED)
    assert made.given == {"num_slots": 2, "encode": list, "part": None}
    made = build_environment(environments("three", own=5), **OFFERED)
    assert made == {"num_slots": 2, "decode": str, "score": len, "own": 5}
    assert build_environment(environments("everything"), **OFFERED) == OFFERED


def test_components_among_its_arguments_are_built(environments):
    part = {"_component_": "their_environments.Part", "size": 4}
    made = build_environment(environments("Names", part=part), **OFFERED)
    assert made.given["part"].size == 4


def test_only_a_class_that_says_so_has_its_slots_apart(environments):
    assert has_slots_apart(environments("Names"))
    assert not has_slots_apart(environments("three"))
    assert not has_slots_apart(OmegaConf.create(SHIPPED_ENVIRONMENT))
