"""Control tokens are found in a frame by their names, and never in what is quoted."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_components.rollout.observation_text import encode_text, quoted


class Tokenizer:
    """Spells every text out, as torchtune's Llama 3 tokenizer does with control tokens."""

    def __init__(self, special_tokens):
        self.special_tokens = special_tokens

    def encode(self, text, add_bos, add_eos):
        assert not add_bos and not add_eos
        return [ord(letter) for letter in text]


NAMES = ["<|eot_id|>", "<|im_end|>", "<|im_end|>|", "<tool_call>", "</tool_response>"]
NAMES += ["<end_of_turn>", "<start_of_turn>", "<\uff5cUser\uff5c>"]
NUMBERS = {name: -1 - number for number, name in enumerate(NAMES)}
PARTS = st.lists(st.one_of(st.sampled_from(NAMES[:2]), st.text(alphabet="ab \n", min_size=1)))


@given(PARTS)
def test_control_tokens_are_one_id_each_and_the_rest_is_spelled(parts):
    expected = [
        token
        for part in parts
        for token in ([NUMBERS[part]] if part in NUMBERS else [ord(letter) for letter in part])
    ]
    assert encode_text(Tokenizer(NUMBERS), "".join(parts)) == expected


def test_of_two_control_tokens_that_begin_alike_the_longer_is_meant():
    assert encode_text(Tokenizer(NUMBERS), "a<|im_end|>|") == [97, NUMBERS["<|im_end|>|"]]


def test_a_tokenizer_without_control_tokens_spells_all():
    assert encode_text(Tokenizer({}), "a<") == [97, 60]


@given(st.lists(st.one_of(st.sampled_from(NAMES), st.text(alphabet="<|/>ab"))))
def test_nothing_quoted_is_a_control_token(parts):
    ids = encode_text(Tokenizer(NUMBERS), quoted("".join(parts)))
    assert all(token >= 0 for token in ids)


@given(st.text(alphabet="abc123+-=() \n"))
def test_other_text_is_quoted_as_it_is(text):
    assert quoted(text) == text
