"""Names of control tokens are encoded as such in a frame, but never in quoted text."""

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Tokenizers
from torchtune.models.gemma import gemma_tokenizer
from torchtune.models.llama2 import llama2_tokenizer
from torchtune.models.phi3 import phi3_mini_tokenizer
from transformers import PreTrainedTokenizerFast

from grpo_components.data.tokenizers import hugging_face_tokenizer
from grpo_components.examples import tiny_policy
from grpo_components.rollout.observation_text import encode_text, quoted


class Tokenizer:
    """Spells out every text, like torchtune's Llama 3 tokenizer with control tokens."""

    def __init__(self, special_tokens):
        self.special_tokens = special_tokens

    def encode(self, text, add_bos, add_eos):
        assert not add_bos and not add_eos
        return [ord(letter) for letter in text]


NAMES = [
    *("<|eot_id|>", "<|im_end|>", "<|im_end|>|", "<tool_call>", "</tool_response>", "<think>"),
    *("</think>", "<s>", "</s>", "<bos>", "<eos>", "<tools>", "</tools>", "[INST]", "[/INST]"),
    *("<<SYS>>", "[TOOL_CALLS]", "<start_of_image>", "<unk>", "<end_of_turn>", "<start_of_turn>"),
    "<\uff5cUser\uff5c>",
]
NUMBERS = {name: -1 - number for number, name in enumerate(NAMES)}
PARTS = st.lists(st.one_of(st.sampled_from(NAMES[:3]), st.text(alphabet="ab \n", min_size=1)))


@given(PARTS)
def test_control_tokens_are_one_id_each_and_the_rest_is_spelled_out(parts):
    """Of several that match, the longest is taken."""
    expected = [
        token
        for part in parts
        for token in ([NUMBERS[part]] if part in NUMBERS else [ord(letter) for letter in part])
    ]
    assert encode_text(Tokenizer(NUMBERS), "".join(parts)) == expected


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


def spelled(tokenizer, text):
    """Encode a text between two control tokens, and return what it became."""
    ids = encode_text(tokenizer, f"<|im_end|>{quoted(text)}<|im_end|>")
    return "".join(map(chr, ids[1:-1])) if ids[0] == ids[-1] == NUMBERS["<|im_end|>"] else ids


@given(st.lists(st.one_of(st.sampled_from(NAMES), st.text(alphabet="<|/>ab"))))
def test_nothing_quoted_is_a_control_token(parts):
    text = spelled(Tokenizer(NUMBERS), "".join(parts))  # no id is negative
    assert not any(name in text for name in NAMES)
    assert text.replace(" ", "") == "".join(parts)


@given(st.text(alphabet="abc123+-=() \n\ufdd0\ufdd1"))
def test_ordinary_text_is_quoted_unchanged(text):
    marks = str.maketrans("", "", "\ufdd0\ufdd1")
    assert spelled(Tokenizer(NUMBERS), text) == text.translate(marks)


@pytest.mark.parametrize(
    "text",
    ["1 < 2", "[1, 2]", "<class 'int'>", "list[T]", "a << 2", "<b>", "List<String>", "<|x|>"],
)
def test_brackets_that_are_not_control_tokens_are_quoted_unchanged(text):
    assert spelled(Tokenizer(NUMBERS), text) == text


def test_a_quote_cannot_complete_a_control_token_of_its_frame():
    ids = encode_text(Tokenizer(NUMBERS), f"<|im_{quoted('end|')}><|eot_id|>")
    assert ids[-1] == NUMBERS["<|eot_id|>"] and all(token >= 0 for token in ids[:-1])


def test_a_quote_cannot_spell_a_marker_of_its_frame_that_is_no_token():
    text = f"<out>{quoted('1</out> [/INST]')}</out>[/INST]"
    ids = encode_text(Tokenizer({}), text)
    assert "".join(map(chr, ids)) == "<out>1< /out> [ /INST]</out>[/INST]"


FAMILIES = {
    "ChatML": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "<think>", "</think>"],
    "Llama 3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "Mistral": ["<s>", "</s>"],
    "DeepSeek": ["<\uff5cUser\uff5c>", "<\uff5ctool\u2581outputs\u2581end\uff5c>", "<think>"],
    "GLM": ["[gMASK]", "[sMASK]", "<sop>", "<arg_key>", "<|user|>"],
    "Cohere": ["<BOS_TOKEN>", "<EOS_TOKEN>", "<|START_OF_TURN_TOKEN|>"],
    "Gemma": ["<bos>", "<turn|>", "<|turn>", "<unused7>", "\n\n", "  ", "\u2581"],
    "no family": ["%%end%%", "EOT", "@", " pad "],
}
TEMPLATES = {"Mistral": "{{ '[INST] ' + messages[0]['content'] + '[/INST]' }}<<SYS>>"}


@pytest.fixture(scope="module", params=[*FAMILIES, "tiny policy"])
def family(request, tmp_path_factory):
    """A tokenizer, its special tokens and the markers of its chat template."""
    folder = tiny_policy.DEFAULT_OUTPUT_DIR
    tokenizer = Tokenizers.from_file(f"{folder}/tokenizer.json")
    names = FAMILIES.get(request.param)
    if names is None:
        names, template = [t.content for t in tokenizer.get_added_tokens_decoder().values()], None
    else:
        folder, template = tmp_path_factory.mktemp("model"), TEMPLATES.get(request.param)
        tokenizer = Tokenizers(models.BPE(vocab=tokenizer.get_vocab(False), merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        special = [AddedToken(name, special=bool(i % 2)) for i, name in enumerate(names)]
        tokenizer.add_tokens(special)
        made = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token=names[1], chat_template=template
        )
        made.save_pretrained(folder)
    shown = ["[INST]", "[/INST]", "<<SYS>>"] if template else []
    return hugging_face_tokenizer(str(folder)), names, shown


def test_no_result_acts_as_a_control_token_of_the_tokenizer_in_use(family):
    tokenizer, names, shown = family
    special = tokenizer.special_tokens.items()
    control = {token_id for name, token_id in special if len(name.strip()) > 1}
    assert control and set(names) <= {*tokenizer.special_tokens}
    for text in (*names, *shown, "".join(names), f"<{names[0]}{names[0][1:]} a {names[-1]}"):
        ids = encode_text(tokenizer, f"{names[0]}\n{quoted(text)}\n{names[1]}")
        inside = [i for i in ids if i in control]
        assert inside == [tokenizer.special_tokens[name] for name in names[:2]]
        decoded = tokenizer.decode(ids[1:-1])
        assert not any(marker in decoded for marker in shown)
        assert "".join(decoded.split()) == "".join(text.split())


def test_no_result_acts_as_a_control_token_that_only_sentencepiece_knows(train):
    tokenizer = gemma_tokenizer(train(user_defined_symbols=["<end_of_turn>", "<unused7>"]))
    ids = encode_text(tokenizer, f"too{quoted('<end_of_turn> low <unused7>')}<end_of_turn>")
    pieces = [tokenizer._spm_model.spm_model.IdToPiece(token) for token in ids]
    assert pieces.count("<end_of_turn>") == 1 and "<unused7>" not in pieces
