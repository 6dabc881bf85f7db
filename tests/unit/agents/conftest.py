"""A tokenizer and a chat, for the tests of sessions."""

import openai
import pytest
from lib.sessions import CHATML, build_tokenizer, make_session, scripted_engine

from grpo_components.agents.chat import Chat
from grpo_components.agents.server import AgentServer


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


@pytest.fixture(scope="module")
def server():
    server = AgentServer()
    yield server
    server.close()


@pytest.fixture
def serve(server, make_chat):
    clients = []

    def open_session(*texts, parse=None):
        chat = make_chat(parse=parse)
        played = scripted_engine(chat, *texts)

        async def build():
            return make_session(chat, played)

        session = server.submit(build()).result(10)
        url = server.open(session)
        clients.append(openai.OpenAI(base_url=url, api_key=session.key, max_retries=0))
        return played, session, clients[-1]

    yield open_session
    for client in clients:
        client.close()
