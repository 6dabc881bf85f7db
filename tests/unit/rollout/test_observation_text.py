"""Names of control tokens are encoded as such in a frame, but never in quoted text."""

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from torchtune.models.gemma import gemma_tokenizer
from torchtune.models.llama2 import llama2_tokenizer
from torchtune.models.phi3 import phi3_mini_tokenizer

from grpo_components.rollout.observation_text import encode_text, quoted


class Tokenizer:
    """Spells out every text, like torchtune's Llama 3 tokenizer with control tokens."""

    def __init__(self, special_tokens):
        self.special_tokens = special_tokens

    def encode(self, text, add_bos, add_eos):
        assert not add_bos and not add_eos
        return [ord(letter) for letter in text]


NAMES = ["<|eot_id|>", "<|im_end|>", "<|im_end|>|", "<tool_call>", "</tool_response>"]
NAMES += ["<think>", "</think>", "<s>", "</s>", "<bos>", "<eos>", "<tools>", "</tools>", "[INST]"]
NAMES += [
    "[/INST]",
    "<<SYS>>",
    "[TOOL_CALLS]",
    "<start_of_image>",
    "<unk>",
    "<end_of_turn>",
    "<start_of_turn>",
    "<\uff5cUser\uff5c>",
]
NUMBERS = {name: -1 - number for number, name in enumerate(NAMES)}
PARTS = st.lists(st.one_of(st.sampled_from(NAMES[:2]), st.text(alphabet="ab \n", min_size=1)))


@given(PARTS)
def test_control_tokens_are_one_id_each_and_the_rest_is_spelled_out(parts):
    expected = [
        token
        for part in parts
        for token in ([NUMBERS[part]] if part in NUMBERS else [ord(letter) for letter in part])
    ]
    assert encode_text(Tokenizer(NUMBERS), "".join(parts)) == expected


def test_the_longest_matching_control_token_wins():
    assert encode_text(Tokenizer(NUMBERS), "a<|im_end|>|") == [97, NUMBERS["<|im_end|>|"]]


def test_a_tokenizer_without_control_tokens_spells_out_everything():
    assert encode_text(Tokenizer({}), "a<") == [97, 60]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Train a small SentencePiece vocabulary."""

    def train(**settings):
        prefix = str(tmp_path_factory.mktemp("tokenizer") / "small")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the number is too low", "too high"] * 20),
            model_prefix=prefix,
            vocab_size=292,
            byte_fallback=True,
            remove_extra_whitespaces=False,
            normalization_rule_name="identity",
            model_type="bpe",
            minloglevel=2,
            **settings,
        )
        return f"{prefix}.model"

    return train


LIKE_GEMMA = {"add_dummy_prefix": False, "user_defined_symbols": ["\n", "\n\n"]}


@pytest.mark.parametrize(
    ("build", "settings"),
    [(llama2_tokenizer, {}), (phi3_mini_tokenizer, {}), (gemma_tokenizer, LIKE_GEMMA)],
)
def test_a_text_after_a_turn_decodes_unchanged(train, build, settings):
    """Even if the vocabulary puts a space before each text, or has a token of two newlines."""
    tokenizer = build(train(**settings))
    turn = tokenizer.encode("number", add_bos=False, add_eos=False)
    for text in ("too low", "\ntoo low\n", "\n\nthe", " the", "  ", ""):
        assert tokenizer.decode(turn + encode_text(tokenizer, text)) == f"number{text}"


@given(st.lists(st.one_of(st.sampled_from(NAMES), st.text(alphabet="<|/>ab"))))
def test_nothing_quoted_is_a_control_token(parts):
    ids = encode_text(Tokenizer(NUMBERS), quoted("".join(parts)))
    assert all(token >= 0 for token in ids)


@given(st.text(alphabet="abc123+-=() \n"))
def test_ordinary_text_is_quoted_unchanged(text):
    assert quoted(text) == text


@pytest.mark.parametrize("text", ["1 < 2", "[1, 2]", "<class 'int'>", "list[int]", "a << 2", "<b>"])
def test_brackets_that_are_not_control_tokens_are_quoted_unchanged(text):
    assert quoted(text) == text
