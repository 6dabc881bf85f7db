"""The texts of tokens add up to the response, even if tokens split a character."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_components.rollout.token_texts import token_texts


def decode_bytes(token_ids):
    return bytes(token_ids).decode("utf-8", errors="replace")


def decode_words(token_ids):
    """Like SentencePiece: words begin with a space, which the first word of a text loses."""
    return "".join(" abc"[token_id] for token_id in token_ids).removeprefix(" ")


@given(st.text())
def test_the_texts_add_up_and_no_character_is_split(text):
    texts = token_texts(list(text.encode()), decode_bytes)
    assert len(texts) == len(text.encode())
    assert "".join(texts) == text
    assert [piece for piece in texts if piece] == list(text)


@given(st.lists(st.integers(0, 255), max_size=30))
def test_every_token_has_a_text_even_if_the_bytes_are_not_utf8(token_ids):
    texts = token_texts(token_ids, decode_bytes)
    assert len(texts) == len(token_ids)
    assert not token_ids or "".join(texts)


@given(st.lists(st.integers(0, 3), max_size=30))
def test_a_token_keeps_its_leading_space(token_ids):
    assert "".join(token_texts(token_ids, decode_words)) == decode_words(token_ids)
