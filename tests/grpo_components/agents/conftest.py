"""A tokenizer and a chat, for the tests of sessions."""

import pytest
from sessions import CHATML, build_tokenizer

from grpo_components.agents.chat import Chat


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def make_chat(tokenizer, tmp_path):
    """Builds a `Chat` with a template; a turn ends with <|im_end|>."""

    def make(template=CHATML, parse=None):
        path = tmp_path / "template.jinja"
        path.write_text(template)
        stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
        return Chat(tokenizer, str(path), [stop], parse)

    return make
