"""A checkpoint whose output head is clear trains, whatever the policy; any other is refused."""

import itertools
from functools import partial

import pytest
import torch
from lib.config_errors import refused_key
from lib.logprobs import whole_logprobs
from lib.one_rank import one_rank
from lib.policies import SIZES, TRANSFORMERS_SIZES
from lib.trainer_ranks import RAGGED, trainer_arguments
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torchtune import config
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from grpo_components.config.model_trial import try_training
from grpo_components.exchange.weights import check_names_and_shapes, shapes_of
from grpo_components.models.logprobs import ResponseLogprobs, token_batch
from grpo_components.models.lora import pushed_shapes, trained_parameters
from grpo_components.models.meshes import Sharding, arrange_ranks
from grpo_components.settings import LoraSettings
from grpo_components.training.sharded_policy import load_policy
from grpo_components.training.weight_export import weight_exports

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LORA = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "save_merged": True}
TABLE = list(itertools.product([True, False], ["missing", "equal", "other"]))
REFUSED = {(True, "other"), (False, "missing")}
POLICIES = ["torchtune", "transformers"]


@pytest.fixture(scope="module")
def meshes(one_thread):
    with one_rank():
        yield arrange_ranks(1, "cpu", Sharding())


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Writes a random policy whose config and file say what they are asked to about its head."""

    def write(tied, head):
        folder = tmp_path_factory.mktemp("base")
        torch.manual_seed(0)
        written = Qwen2Config(**TRANSFORMERS_SIZES, tie_word_embeddings=tied, rope_theta=1e4)
        Qwen2ForCausalLM(written).save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        tensors.pop(HEAD, None)
        if head != "missing":
            tensors[HEAD] = tensors[EMBEDDING] + (head == "other")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return write


def config_of(folder, tied, policy, lora):
    builder = {"_component_": "torchtune.models.qwen2.qwen2", "tie_word_embeddings": tied}
    builder |= {**SIZES, "norm_eps": 1e-6, "rope_base": 1e4}
    transformers = {"_component_": "grpo_components.models.hugging_face", "path": str(folder)}
    own = {
        **{"base_model_path": str(folder), "compile": False, "dtype": "fp32", "num_steps": 1},
        "model": builder if policy == "torchtune" else transformers,
        "model_type": "QWEN2" if policy == "torchtune" else None,
        "lora": {**LORA, "target_modules": ["q_proj"]} if lora else None,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
        **{"lr_scheduler": None, "loss": {"load_balancing_coeff": 0.0}, "tensor_parallel_dim": 1},
        "dataset": {"max_prompt_tokens": 8},
        "generator": {"max_response_tokens": 8, "max_model_len": None},
        "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger"},
    }
    return OmegaConf.create(own)


def model_options(cfg, folder, tmp_path):
    own = {"build_model": partial(config.instantiate, cfg.model), "model_type": cfg.model_type}
    own |= {} if cfg.model_type else {"build_checkpointer": None}
    own |= {"lora": LoraSettings(**cfg.lora) if cfg.lora else None}
    return trainer_arguments(folder, 0, 1, None, tmp_path, **own)["options"]


def weights_of(export):
    return {name: t.clone() for layer in export.layers() for name, t in layer.items()}


def by_transformers(folder):
    model = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    return torch.cat([whole_logprobs(model, each)[0] for each in RAGGED])


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("tied", "head"), TABLE)
def test_a_checkpoint_trains_or_is_refused(base, meshes, tmp_path, tied, head, policy, lora):
    folder = base(tied, head)
    cfg = config_of(folder, tied, policy, lora)
    if (tied, head) in REFUSED:
        assert refused_key(try_training, cfg) == "base_model_path"
        return
    try_training(cfg)
    options = model_options(cfg, folder, tmp_path)
    policy = load_policy(options, meshes)
    exports = weight_exports(policy, options, torch.device("cpu"), 0)
    pushed, whole = weights_of(exports[0]), weights_of(exports[-1])
    check_names_and_shapes(shapes_of(pushed), pushed_shapes(folder, options.lora))
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() - whole.keys() <= ({HEAD} if tied else set()) >= whole.keys() - saved.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor, saved[EMBEDDING if name == HEAD and tied else name])
    found = ResponseLogprobs(policy, chunk_tokens=7)(token_batch(RAGGED))[0]
    torch.testing.assert_close(found, by_transformers(folder), rtol=1e-4, atol=1e-4)
    found.sum().backward()
    torch.optim.SGD(trained_parameters(policy), lr=0.1).step()
    after, changed = weights_of(exports[0]), {EMBEDDING} | (set() if tied else {HEAD})
    for name in after if lora else changed:
        assert (lora and "lora_A" in name) or not torch.equal(after[name], pushed[name])
    if HEAD in after and tied:
        torch.testing.assert_close(after[HEAD], after[EMBEDDING])
