"""Answers that are sent while they are sampled, through the unmodified OpenAI client."""

import asyncio
import json
from queue import SimpleQueue

import pytest
from lib.sessions import Parser, scripted_engine

from grpo_components.agents.streams import AnswerWatch, first_of

USER = [{"role": "user", "content": "abab?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def stepped(chat, *texts):
    """An engine whose requests wait in `asked`, and sample when a test says so."""
    engine = scripted_engine(chat, *texts)
    engine.asked = SimpleQueue()
    engine.arrived = engine.asked.put
    return engine


def content(event):
    return event.choices[0].delta.content


def test_a_stream_comes_token_by_token_and_ends_like_a_whole_answer(serve):
    engine, session, client = serve("hello<|im_end|>", engine=stepped)
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="m", messages=USER, stream=True, stream_options=options, logprobs=True
    )
    assert next(stream).choices[0].delta.role == "assistant"
    request = engine.asked.get(timeout=10)
    for letter in "hello":
        request.step()
        assert content(next(stream)) == letter  # before the next token is sampled
    assert session.parts() == []  # nothing is delivered yet
    request.step()
    last, usage = stream
    assert last.choices[0].finish_reason == "stop"
    assert [entry.token for entry in last.choices[0].logprobs.content] == list("hello")
    assert usage.usage.completion_tokens == 6
    assert usage.usage.prompt_tokens_details.cached_tokens == 3
    (part,) = session.parts()
    assert part.response_ids.tolist() == request.answer.token_ids.tolist()
    assert session.facts()["cached_tokens"] == 3


def test_a_client_that_leaves_a_stream_gets_nothing_trained_and_all_of_it_counted(serve, server):
    engine, session, client = serve("hello<|im_end|>", engine=stepped)
    with client.chat.completions.create(model="m", messages=USER, stream=True) as stream:
        next(stream)
        request = engine.asked.get(timeout=10)
        request.step(2)
        assert content(next(stream)) == "h"
    # The session is still sampling for nobody: the record waits for it.
    settled = server.submit(session.settle())
    request.step(4)
    settled.result(10)
    assert session.facts()["sampled_tokens"] == 6
    assert session.parts() == []


def test_what_may_be_a_stop_or_a_tool_call_is_held_back(serve):
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    engine, _, client = serve(
        *(f"so {call}<|im_end|>", "1==2=>3xx"), engine=stepped, parse=Parser()
    )
    stream = client.chat.completions.create(model="m", messages=USER, tools=[TOOL], stream=True)
    next(stream)
    engine.asked.get(timeout=10).step(3 + len(call) + 1)
    events = [event.choices[0] for event in stream]
    assert "".join(e.delta.content or "" for e in events) == "so "
    (calls,) = [e.delta.tool_calls for e in events if e.delta.tool_calls]
    assert (calls[0].index, calls[0].function.name) == (0, "f")
    assert events[-1].finish_reason == "tool_calls"
    stream = client.completions.create(model="m", prompt="q", stop="=>", stream=True)
    request = engine.asked.get(timeout=10)
    request.step(9)
    events = [event.choices[0] for event in stream]
    assert [e.text for e in events] == ["1", "=", "=2", ""]
    assert events[-1].finish_reason == "stop"
    assert request.sampled == 6  # nothing is sampled after the stop


def test_several_choices_are_streamed_under_their_numbers(serve):
    _, session, client = serve("ab<|im_end|>", "cd<|im_end|>")
    texts = {0: "", 1: ""}
    for event in client.chat.completions.create(model="m", messages=USER, stream=True, n=2):
        texts[event.choices[0].index] += content(event) or ""
    assert texts == {0: "ab", 1: "cd"}
    assert len(session.parts()) == 2


def test_an_error_in_the_middle_of_a_stream_reaches_the_client(serve):
    import openai

    engine, session, client = serve("hello", engine=stepped)
    stream = client.chat.completions.create(model="m", messages=USER, stream=True)
    next(stream)
    request = engine.asked.get(timeout=10)
    request.step()
    request.future.set_exception(RuntimeError("no more"))
    with pytest.raises(openai.APIError, match="the policy cannot answer: no more"):
        list(stream)
    assert session.failure.result() == "call 1: no more"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="m", messages=USER, stream=True, temperature=3)


@pytest.mark.parametrize("text", ["añ€😀b=>c", "a=b=>", "=>", "no stop"])
def test_pieces_join_to_the_text_before_the_first_stop(make_chat, text):
    chat, pieces = make_chat(), []
    ids = chat.encode(text)
    watch = AnswerWatch(chat, [], ["=>", "zz"], pieces.append)
    ended = any(watch(ids[:size]) for size in range(1, len(ids) + 1))
    assert "".join(pieces) == text.partition("=>")[0]
    assert ended == ("=>" in text)
    assert first_of(["=>", "b"], "ab=>") == (1, "b")


def test_pieces_of_an_async_stream(serve):
    import openai

    _, session, client = serve("abc<|im_end|>")

    async def run():
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as own:
            ask = own.chat.completions.create
            return [e async for e in await ask(model="m", messages=USER, stream=True)]

    events = asyncio.run(run())
    assert "".join(content(e) or "" for e in events) == "abc"
    assert json.loads(json.dumps(session.facts()))["calls"] == 1
