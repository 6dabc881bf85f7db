"""The benchmark of growing work compares each case with the first of its kind."""

import json

import pytest
from omegaconf import OmegaConf
from scaling import CASES, MAX_TOKENS, POLICY, PROMPT_TOKENS, long_policy, table
from torchtune.models.qwen2_5 import qwen2_5_tokenizer


def test_each_case_stands_beside_the_first_of_its_kind():
    measured = {(kind, name): [4.0, 6.0, 5.0] for kind, cases in CASES.items() for name in cases}
    measured["prompt length", "x 16"] = [20.0]
    text = table(measured)
    assert "| prompt length: x 16 | 20.00 (20.00..20.00) | 4.00 |" in text
    assert "| generators: 4 | 5.00 (4.00..6.00) | 1.00 |" in text
    assert text.count("```mermaid") == 3 and "bar [5.00, 5.00, 20.00]" in text


def test_the_copied_policy_takes_the_longest_prompt(tiny_policy, tmp_path):
    copy = json.loads((long_policy(tmp_path) / "config.json").read_text())
    assert copy.pop("max_position_embeddings") == MAX_TOKENS
    before = json.loads((POLICY / "config.json").read_text())
    assert copy == {name: before[name] for name in copy}


@pytest.mark.parametrize(("name", "times"), [("x 1", 1), ("x 4", 4), ("x 16", 16)])
def test_longer_prompts_still_ask_their_question_once(name, times, tiny_policy):
    _, keys = CASES["prompt length"][name]
    template = OmegaConf.from_dotlist(list(keys)).dataset.prompt_template
    assert template.count("{question}") == 1
    question = "Tom had 6 balls and lost 0. How many are left?"
    prompt = template.replace("{question}", question)
    tokenizer = qwen2_5_tokenizer(
        path=str(POLICY / "vocab.json"),
        merges_file=str(POLICY / "merges.txt"),
        special_tokens_path=str(POLICY / "tokenizer.json"),
    )
    tokens = tokenizer.encode(prompt, add_bos=False, add_eos=False)
    assert len(tokens) == pytest.approx(PROMPT_TOKENS * times, rel=0.15)
