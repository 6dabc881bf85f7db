"""The server, through the unmodified OpenAI client."""

import json
import urllib.error
import urllib.request

import openai
import pytest
from lib.engine import Request
from lib.sessions import Parser, parts_of

USER = [{"role": "user", "content": "abab?"}]
LONG = b"c" * (1 << 20)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_a_chat_with_tools_goes_on_in_one_trajectory(serve):
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>'
    _, session, client = serve(f"so{call}", "two<|im_end|>", parse=Parser())
    create, messages = client.chat.completions.create, list(USER)
    first = create(model="any", messages=messages, tools=[TOOL], tool_choice="auto")
    choice = first.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("so", "tool_calls")
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"x": 1}
    tool_call_id = choice.message.tool_calls[0].id
    messages += [
        choice.message.model_dump(),  # with all its empty fields
        {"role": "tool", "tool_call_id": tool_call_id, "content": "2"},
    ]
    last = create(model="any", messages=messages, tools=[TOOL])
    assert last.choices[0].message.content == "two"
    assert last.usage.prompt_tokens > first.usage.prompt_tokens
    assert len(session.parts()) == 1
    assert [m["role"] for m in session.transcript] == ["user", "assistant", "tool", "assistant"]


def test_a_stream_has_the_same_answer(serve):
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call><|im_end|>'
    _, session, client = serve("abc<|im_end|>", call, "d<|im_end|>", "e", parse=Parser())
    create = client.chat.completions.create
    options = {"include_usage": True}
    events = [*create(model="m", messages=USER, stream=True, stream_options=options)]
    assert "".join(e.choices[0].delta.content or "" for e in events if e.choices) == "abc"
    assert events[0].choices[0].delta.role == "assistant"
    assert events[0].choices[0].finish_reason == "stop"
    assert events[-1].usage.completion_tokens == 4
    assert events[-1].usage.prompt_tokens_details.cached_tokens == 3
    with client.chat.completions.stream(model="m", messages=USER, tools=[TOOL]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.name == "f"
    assert final.choices[0].finish_reason == "tool_calls"
    events = [*create(model="m", messages=USER, stream=True, n=2)]
    said = {event.choices[0].index: event.choices[0].delta.content for event in events}
    assert said == {0: "d", 1: "e"}
    assert len(session.parts()) == 4


def test_a_policy_that_cannot_answer_fails_its_session_also_in_a_stream(serve):
    engine, session, client = serve("hello")
    error = RuntimeError("no more")
    engine.arrived = lambda request: request.future.set_exception(error)
    with pytest.raises(openai.APIError, match="the policy cannot answer: no more"):
        client.chat.completions.create(model="m", messages=USER, stream=True)
    assert session.failure.result() == "call 1: no more" and session.error is error


def test_errors_are_openais(serve, server):
    engine, session, client = serve()
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match=r"temperature: 0\.3 given") as caught:
        create(model="m", messages=USER, temperature=0.3)
    assert caught.value.param == "temperature"
    _, other, _ = serve()
    assert other.address != session.address
    for key in ("sk-other", other.key):
        with pytest.raises(openai.AuthenticationError, match="the key is wrong"):
            client.with_options(api_key=key).post("/reward", cast_to=object)
    with pytest.raises(openai.NotFoundError, match="responses: not served; allowed: POST chat"):
        client.responses.create(model="m", input="x")
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="m", messages=[{"role": "user", "content": "c" * 900}])
    assert caught.value.code == "context_length_exceeded"
    assert engine.requests == []
    server.loop.call_soon_threadsafe(server.close_session, session)
    with pytest.raises(openai.AuthenticationError, match="the session of this address is over"):
        create(model="m", messages=USER)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("reward", b'{"reward": NaN}', 400),
        ("reward", b'{"reward": "good"}', 400),
        ("reward", b'{"reward": {"a": -Infinity}}', 400),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', 400),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "\xff"}]}', 400),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "%b"}]}' % LONG, 400),
        ("chat/completions", b" " * (1 << 21) + b"{}", 413),
    ],
)
def test_a_request_that_cannot_be_read_is_refused_with_its_status(serve, path, body, status):
    _, _, client = serve("a<|im_end|>")
    headers = {"Authorization": f"Bearer {client.api_key}"}
    asked = urllib.request.Request(f"{client.base_url}{path}", body, headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked)
    assert refused.value.code == status and json.load(refused.value)["error"]["message"]
    assert client.chat.completions.create(model="m", messages=USER).choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_leaves_nothing_to_train(serve, server, stream):
    engine, session, client = serve("abc<|im_end|>", "abc<|im_end|>")
    held, engine.arrived = [], lambda request: held.append(request)
    ask = client.with_options(timeout=0.3).chat.completions.create
    with pytest.raises(openai.APITimeoutError):
        ask(model="m", messages=USER, stream=stream)
    # The session is still sampling for nobody: the record waits for it.
    settled = server.submit(session.settle())
    held.pop().finish()
    settled.result(10)
    assert session.facts()["sampled_tokens"] == 4
    engine.arrived = Request.finish
    client.chat.completions.create(model="m", messages=USER)
    facts = session.facts()
    assert (facts["calls"], facts["sampled_tokens"], facts["unanswered_tokens"]) == (2, 8, 4)
    assert facts["cached_tokens"] == 6
    (part,) = parts_of(session)
    assert part.token_versions[part.response_mask].tolist() == [2] * 4
