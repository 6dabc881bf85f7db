"""A tiny Qwen3 of transformers by the real `tune`: trained, pushed, pulled, saved, loaded again."""

import shutil
from pathlib import Path

import torch
from equivalence.families import HF_FAMILIES, save_random
from lib.whole_runs import SHORT, assert_audited, metrics, receipts, succeed, transformers_policy
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

REWARD = '''
class Digits:
    """The share of digits, which the samples of a random policy have in different numbers."""

    def __call__(self, *, response_text, **sample):
        return sum(c.isdigit() for c in response_text) / (len(response_text) or 1)
'''


def random_policy(tiny_policy, folder):
    """The tiny policy's tokenizer and data, with a random Qwen3."""
    shutil.copytree(tiny_policy, folder)
    config = HF_FAMILIES["Qwen3"]()
    config.vocab_size = 384
    save_random(config, folder, seed=0)


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
    assert_audited(output_dir)
