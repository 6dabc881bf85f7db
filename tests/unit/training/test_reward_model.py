"""The learned reward: equals the classifier's own score, and changes only the rewards."""

import json
import math

import numpy as np
import pytest
import torch
from lib.trajectories import trajectory as record
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from grpo_components.settings import RewardModelSettings
from grpo_components.training.reward_model import RewardModel
from grpo_components.trajectory import batch_hash, pack, unpack

WORDS = ["[UNK]", "[END]", "[PAD]", "What", "is", "two", "plus", "three", "It", "five", "six"]
WORDS += [".", "?"]
SHAPE = {
    **{"vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 64},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64},
    "initializer_range": 0.5,
}
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} . {% endfor %}"
RESPONSES = ["It is five .", "six", "It is five ? It is six . It is", "five five five", ""]

FAMILIES = {"decoder": "gpt_neox", "encoder": "bert", "offset positions": "roberta"}
FAMILIES |= {"language model": "gpt_neox"}


def make_classifier(
    folder, kind="decoder", num_labels=1, ends=False, head_weight=None, chat_template=None, **tokens
):
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if ends:  # add the end token to every text, as many decoders expect
        words.post_processor = processors.TemplateProcessing("$A [END]", None, [("[END]", 1)])
    tokens = {"unk_token": "[UNK]", "eos_token": "[END]", **tokens}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **tokens)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(FAMILIES[kind], **SHAPE, num_labels=num_labels)
    is_language_model = kind == "language model"
    auto = AutoModelForCausalLM if is_language_model else AutoModelForSequenceClassification
    model = auto.from_config(config)
    if head_weight is not None:
        torch.nn.init.constant_(model.score.weight, head_weight)
    model.save_pretrained(folder)
    return str(folder)


def build(path, **changes):
    given = {"weight": 0.5, "chat_template": False, "tokens_per_micro_batch": 24, **changes}
    settings = RewardModelSettings(path=path, **given)
    return RewardModel(settings=settings, device="cpu", dtype="fp32")


def trajectory(reward, failed=False):
    scored = {"reward": reward, "reward_terms": {"correctness": reward}, "success": reward == 1.0}
    if failed:
        scored = {"finish_reason": "error", "error": "reward correctness: KeyError"}
        scored |= {"reward": math.nan, "reward_terms": {}, "success": False}
    return record([3], **scored)


def group_of(responses, failed=()):
    members = [trajectory(float(i % 2), failed=i in failed) for i in range(len(responses))]
    shown = [{"response": r, "response_tokens": 1, "reward": 0.0} for r in responses]
    return pack(members), {"prompt": "What is two plus three ? ", "responses": shown, "epoch": 0}


def scores_alone(path, texts):
    """The classifier's score of each text, without a batch and without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    token_ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    return [model(input_ids=ids).logits.item() for ids in token_ids]


@pytest.mark.parametrize(
    ("kind", "tokens", "budget"),
    [
        ("decoder", {"pad_token": None}, 24),
        *(("decoder", {"pad_token": "[PAD]"}, 10_000), ("encoder", {"pad_token": "[PAD]"}, 24)),
        *(("decoder", {"ends": True}, 10_000), ("decoder", {"eos_token": None}, 10_000)),
    ],
)
def test_every_response_gets_its_own_score_whatever_its_batch(tmp_path, kind, tokens, budget):
    """A classifier without a pad token reads to the last token."""
    path = make_classifier(tmp_path, kind, **tokens)
    group, text = group_of(RESPONSES)
    scored, summary, out_text = build(path, tokens_per_micro_batch=budget).add_scores(group, text)
    expected = scores_alone(path, [text["prompt"] + response for response in RESPONSES])
    assert len({round(score, 3) for score in expected}) == len(RESPONSES)
    before, after = unpack(group), unpack(scored)
    for old, new, score, shown in zip(before, after, expected, out_text["responses"], strict=True):
        assert new.reward_terms["reward_model"] == pytest.approx(score, abs=1e-5)
        assert new.reward == pytest.approx(old.reward + 0.5 * score, abs=1e-5)
        assert new.reward_terms["correctness"] == old.reward_terms["correctness"]
        assert (shown["reward"], shown["reward_terms"]) == (new.reward, new.reward_terms)
        assert (new.success, new.finish_reason) == (old.success, old.finish_reason)
        assert new.response_ids.tolist() == old.response_ids.tolist()
    assert summary.rewards == [t.reward for t in after]
    assert batch_hash(scored) == batch_hash(pack(after))
    assert out_text["prompt"] == text["prompt"]
    assert [shown["response"] for shown in out_text["responses"]] == RESPONSES
    assert unpack(group)[1].reward == 1.0  # the input is unchanged


def test_a_decoder_keeps_no_keys_and_values_of_what_it_scored(tmp_path):
    model = build(make_classifier(tmp_path))._model
    assert model(torch.tensor([[3, 4]])).past_key_values is None


def test_positions_that_start_above_zero_are_not_overrun(tmp_path):
    path = make_classifier(tmp_path, "offset positions", pad_token="[PAD]")  # 64 positions from 2
    scored, _, _ = build(path).add_scores(*group_of(["five " * 56, "five " * 57]))
    fits, too_long = unpack(scored)
    assert fits.error is None
    assert too_long.error == "reward reward_model: 63 tokens, the model reads 1 to 62"


def test_the_texts_may_be_messages_of_a_chat(tmp_path):
    path = make_classifier(tmp_path, chat_template=TEMPLATE)
    group, text = group_of(RESPONSES[:1])
    scored, _, _ = build(path, chat_template=True).add_scores(group, text)
    whole = f"user {text['prompt']} . assistant {RESPONSES[0]} . "
    terms = unpack(scored)[0].reward_terms
    assert terms["reward_model"] == pytest.approx(scores_alone(path, [whole])[0], abs=1e-5)


def test_a_failed_sample_stays_failed_and_a_response_that_is_too_long_fails(tmp_path):
    path = make_classifier(tmp_path)
    group, text = group_of(["five", "six", "five " * 99], failed=[0])
    scored, summary, out_text = build(path).add_scores(group, text)
    first, second, third = unpack(scored)
    assert first.error == "reward correctness: KeyError" and first.reward_terms == {}
    assert second.error is None and math.isfinite(second.reward)
    assert third.error == "reward reward_model: 105 tokens, the model reads 1 to 64"
    assert third.failed and math.isnan(third.reward) and not third.success
    shown = [out_text["responses"][number]["error"] for number in (0, 2)]
    assert summary.errors == [first.error, third.error] == shown
    assert np.isnan(summary.rewards).tolist() == [True, False, True]
    _, summary, _ = build(path).add_scores(*group_of(["five", "six"], failed=[0, 1]))
    assert len(summary.errors) == 2, "a group that failed as a whole is not scored"


def test_a_nan_score_fails_the_sample(tmp_path):
    path = make_classifier(tmp_path, head_weight=math.nan)
    scored, _, _ = build(path).add_scores(*group_of(["five"]))
    assert unpack(scored)[0].error == "reward reward_model: gave nan"


def test_a_model_without_a_single_score_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^reward_model.path: .* 2 outputs; allowed"):
        build(make_classifier(tmp_path / "two", num_labels=2))
    with pytest.raises(ValueError, match=r"^reward_model.path: .* score.weight; allowed"):
        build(make_classifier(tmp_path / "language", "language model"))
    assert "chat_template" not in json.loads((tmp_path / "two/tokenizer_config.json").read_text())
    with pytest.raises(ValueError, match=r"^reward_model.chat_template: true"):
        build(make_classifier(tmp_path / "one"), chat_template=True)
