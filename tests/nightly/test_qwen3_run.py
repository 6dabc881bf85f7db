"""A run of a tiny Qwen3 by the real `tune`: trained, pushed, pulled, saved, and loaded again."""

import shutil
from pathlib import Path

import pytest
import torch
from lib.whole_runs import SHORT, audit, metrics, receipts, succeed
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

pytestmark = pytest.mark.timeout(1800)  # a busy machine may take long

SIZES = {"vocab_size": 384, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 64}
SIZES |= {"head_dim": 32, "intermediate_dim": 128, "max_seq_len": 512, "tie_word_embeddings": True}
REWARD = '''
class Digits:
    """The share of digits, which the samples of a random policy have in different numbers."""

    def __call__(self, *, response_text, **sample):
        return sum(c.isdigit() for c in response_text) / (len(response_text) or 1)
'''


def random_policy(tiny_policy, folder):
    """The tiny policy's tokenizer and data, with a random Qwen3."""
    shutil.copytree(tiny_policy, folder)
    ends = {"eos_token_id": 0, "pad_token_id": 0}
    config = Qwen3Config(
        vocab_size=SIZES["vocab_size"],
        num_hidden_layers=SIZES["num_layers"],
        num_attention_heads=SIZES["num_heads"],
        num_key_value_heads=SIZES["num_kv_heads"],
        hidden_size=SIZES["embed_dim"],
        head_dim=SIZES["head_dim"],
        intermediate_size=SIZES["intermediate_dim"],
        max_position_embeddings=SIZES["max_seq_len"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        **ends,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # also the norms of heads
        nn.init.normal_(parameter, std=0.3)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)


def test_two_trainer_ranks_train_a_tiny_qwen3_that_transformers_loads(tune, tiny_policy, tmp_path):
    base, models = tmp_path / "policy", "grpo_components.models.qwen3"
    random_policy(tiny_policy, base)
    (tmp_path / "my_rewards.py").write_text(REWARD)
    _, output_dir = succeed(
        tune,
        *(*SHORT, "num_steps=2", "num_trainers=2", "max_staleness=0", "pull_every_m_rollouts=1"),
        *(f"base_model_path={base}", f"model._component_={models}.qwen3", "optimizer.lr=1e-2"),
        *(f"model.{name}={value}" for name, value in SIZES.items()),
        f"tokenizer._component_={models}.qwen3_tokenizer",
        f"checkpointer._component_={models}_weights.Qwen3Checkpointer",
        "checkpointer.model_type=QWEN3",
        *("rewards.correctness.is_success=true", "rewards.digits._component_=my_rewards.Digits"),
    )
    steps = metrics(output_dir)[1:]
    assert [record["policy_version"] for record in steps] == [1, 2]
    # Also in the second step, whose responses are sampled with weights that were pulled.
    assert all(abs(record["mismatch/generator_kl"]) < 1e-6 for record in steps)
    assert all(record["grad_norm"] > 0 for record in steps)
    assert [list(receipt["token_versions"]) for receipt in receipts(output_dir)] == [["0"], ["1"]]
    latest = Path(output_dir, "checkpoints", "latest")
    before, after = (load_file(folder / "model.safetensors") for folder in (base, latest))
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    loaded = AutoModelForCausalLM.from_pretrained(latest).state_dict()
    assert all(torch.equal(loaded[name], after[name]) for name in after)
    code, table = audit(output_dir)
    assert code == 0, table
