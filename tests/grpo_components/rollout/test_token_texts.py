"""Texts of tokens: joined they are the response, whatever characters its tokens cut in pieces."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_components.rollout.token_texts import token_texts


def decode_bytes(token_ids):
    return bytes(token_ids).decode("utf-8", errors="replace")


def decode_words(token_ids):
    """As sentencepiece does: words begin with a space, which the first of a text loses."""
    return "".join(" abc"[token_id] for token_id in token_ids).removeprefix(" ")


@given(st.text())
def test_joined_they_are_the_text_and_no_character_is_torn(text):
    texts = token_texts(list(text.encode()), decode_bytes)
    assert len(texts) == len(text.encode())
    assert "".join(texts) == text
    assert [piece for piece in texts if piece] == list(text)


@given(st.lists(st.integers(0, 255), max_size=30))
def test_every_token_has_a_text_also_where_the_bytes_are_no_text(token_ids):
    texts = token_texts(token_ids, decode_bytes)
    assert len(texts) == len(token_ids)
    assert not token_ids or "".join(texts)


@given(st.lists(st.integers(0, 3), max_size=30))
def test_a_token_keeps_the_space_that_it_begins_with(token_ids):
    assert "".join(token_texts(token_ids, decode_words)) == decode_words(token_ids)
