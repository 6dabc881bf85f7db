"""Fast tokenizers of model folders encode as transformers does, and stop as their configs say."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from grpo_components.data.prompts import prompt_encoder
from grpo_components.data.tokenizers import hugging_face_tokenizer
from grpo_components.rollout.observation_text import encode_text

SPECIAL = ["<s>", "</s>", "<|turn|>"]
CHAT = "{% for m in messages %}<|turn|>{{ m['role'] }}:{{ m['content'] }}{% endfor %}<|turn|>a:"
TEXTS = ["3 + 4 = 7", "  two spaces\n\nand lines ", "\u00fcber <|turn|> user", "x"]


@pytest.fixture(params=[False, True], ids=["byte-level", "leading space"])
def folder(request, tmp_path):
    """Train a small tokenizer: byte-level as Qwen's, or with a leading space as Llama 2's."""
    leading_space = request.param
    tokenizer = Tokenizer(models.BPE(unk_token=None, byte_fallback=leading_space))
    if leading_space:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
        alphabet = sorted({c for text in TEXTS for c in text} - {" "})
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 300, "special_tokens": SPECIAL, "show_progress": False}
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **options)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    marks = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    return str(tmp_path)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(folder, text):
    theirs, ours = AutoTokenizer.from_pretrained(folder), hugging_face_tokenizer(folder)
    assert ours.encode(text, add_bos=True, add_eos=False) == theirs(text)["input_ids"]
    alone = theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text, add_bos=False, add_eos=True) == [*alone, 1]
    assert ours.decode(alone) == theirs.decode(alone)
    assert ours.stop_tokens == [2, 1]


def test_a_text_that_continues_gets_no_leading_space(folder):
    tokenizer = hugging_face_tokenizer(folder)
    ids = tokenizer.encode("x = 7", add_bos=False, add_eos=False)
    for text in ("user", "7 = x"):
        joined = tokenizer.decode([*ids, *encode_text(tokenizer, f"<|turn|>{text}")])
        assert joined == f"x = 7<|turn|>{text}"


def test_the_chat_template_of_the_folder_makes_prompts(folder):
    tokenizer = hugging_face_tokenizer(folder)
    encode = prompt_encoder(tokenizer, "{question}", folder, "be brief")
    ids, text = encode("3 + 4")
    assert text == "<|turn|>system:be brief<|turn|>user:3 + 4<|turn|>a:"
    assert [i for i in ids if i == 2] == [2, 2, 2]


def test_without_a_generation_config_the_tokenizers_end_stops(folder, tmp_path):
    (tmp_path / "generation_config.json").unlink()
    assert hugging_face_tokenizer(folder).stop_tokens == [1]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer.path: no tokenizer loads from .*; allowed:"):
        hugging_face_tokenizer(str(tmp_path))
