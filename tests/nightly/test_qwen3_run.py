"""A tiny Qwen3 of transformers by the real `tune`: trained, pushed, pulled, saved, loaded again."""

import shutil
from pathlib import Path

import pytest
import torch
from lib.whole_runs import SHORT, audit, metrics, receipts, succeed, transformers_policy
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

pytestmark = pytest.mark.timeout(1800)  # a busy machine may take long

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
        vocab_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=64,
        head_dim=32,
        intermediate_size=128,
        max_position_embeddings=512,
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
    base = tmp_path / "policy"
    random_policy(tiny_policy, base)
    (tmp_path / "my_rewards.py").write_text(REWARD)
    _, output_dir = succeed(
        tune,
        *(*SHORT, "num_steps=2", "num_trainers=2", "max_staleness=0", "pull_every_m_rollouts=1"),
        *(f"base_model_path={base}", *transformers_policy(base), "optimizer.lr=1e-2"),
        "tokenizer._component_=grpo_components.data.tokenizers.hugging_face_tokenizer",
        *(f"tokenizer.path={base}", "~tokenizer.merges_file", "~tokenizer.special_tokens_path"),
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
