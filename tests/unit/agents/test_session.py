"""What a session records: the tokens that were sampled, each of them once, whatever is asked."""

import asyncio
from itertools import chain

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lib.engine import StandInEngine, completion
from lib.properties import many
from lib.sessions import (
    CHATML,
    DROPS_THOUGHTS,
    PLAIN,
    Parser,
    ask,
    make_session,
    parts_of,
    scripted_engine,
)

from grpo_components.agents.conversation import Call, Choice, Conversation
from grpo_components.agents.requests import RequestError

pytestmark = pytest.mark.anyio


def user(text):
    return [{"role": "user", "content": text}]


USER = user("abab?")


def opened(chat, *texts):
    """An engine that says these texts, and a session over it."""
    engine = scripted_engine(chat, *texts)
    return engine, make_session(chat, engine)


def said(answer, more):
    """The messages of a chat after an answer, and a further one of the user."""
    return [*USER, {"role": answer["role"], "content": answer["content"]}, *user(more)]


def sampled(chat, session):
    """The texts that the policy sampled, one for each trajectory."""
    parts = parts_of(session)
    return [chat.decode(part.response_ids[part.response_mask].tolist()) for part in parts]


async def test_a_chat_goes_on_with_the_tokens_that_were_sampled(make_chat):
    chat = make_chat()
    engine, session = opened(chat, "abab<|im_end|>", "ab<|im_end|>")
    await ask(session, said(await ask(session, USER), "more"))
    (part,) = parts_of(session)
    known = [*engine.requests[0].prompt_ids, *chat.encode("a"), *chat.encode("b")]
    assert engine.requests[1].prompt_ids[: len(known)] == known  # else `abab` would be one token
    assert chat.encode("abab") != [*chat.encode("a"), *chat.encode("b")] * 2
    assert part.prompt_ids.tolist() == engine.requests[0].prompt_ids
    whole = [*part.prompt_ids.tolist(), *part.response_ids.tolist()]
    assert whole[: len(engine.requests[1].prompt_ids)] == engine.requests[1].prompt_ids
    assert sampled(chat, session) == ["abab<|im_end|>ab<|im_end|>"]
    assert part.token_versions[part.response_mask].tolist() == [1] * 5 + [2] * 3
    assert (part.token_versions[~part.response_mask] == -1).all()


async def test_a_template_that_drops_thoughts_forks_the_session(make_chat):
    chat = make_chat(DROPS_THOUGHTS)
    engine, session = opened(chat, "<think>hm</think>yes<|im_end|>", "no<|im_end|>")
    await ask(session, said(await ask(session, USER), "sure?"))
    assert sampled(chat, session) == ["<think>hm</think>yes<|im_end|>", "no<|im_end|>"]
    _, second = parts_of(session)
    assert second.prompt_ids.tolist() == engine.requests[1].prompt_ids
    assert "think" not in chat.decode(second.prompt_ids.tolist())


@pytest.mark.parametrize(
    ("spelling", "trajectories"),
    [
        ('{"name": "f", "arguments": {"x": 1}}', 1),
        ('{"arguments":{"x":1},"name":"f"}', 1),
        ('{"name": "f", "arguments": {"x": 2}}', 2),
    ],
)
async def test_another_spelling_of_the_same_tool_call_is_no_fork(make_chat, spelling, trajectories):
    chat = make_chat(parse=Parser())
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    _, session = opened(chat, f"<tool_call>{spelling}</tool_call><|im_end|>")
    answer = await ask(session, USER, tools=tools)
    call = answer["tool_calls"][0]
    call["function"]["arguments"] = '{"x": 1}'
    result = {"role": "tool", "content": "2", "tool_call_id": call["id"]}
    await ask(session, [*USER, answer, result], tools=tools)
    assert session.facts()["trajectories"] == trajectories
    assert spelling in sampled(chat, session)[0]


async def test_a_long_loop_compares_its_prompt_with_the_last_answer_alone(make_chat, monkeypatch):
    chat, compared, messages = make_chat(), [], USER
    length = chat.turn_length
    monkeypatch.setattr(chat, "turn_length", lambda *all: compared.append(1) or length(*all))
    _, session = opened(chat)
    for _ in range(6):
        messages = [*messages, await ask(session, messages), *user("m")]
    assert session.facts()["trajectories"] == 1
    assert len(compared) == 5


async def test_parallel_calls_train_what_they_share_once(make_chat):
    chat = make_chat()
    _, session = opened(chat, "abc<|im_end|>", "d<|im_end|>", "e<|im_end|>")
    first = await ask(session, USER)
    await asyncio.gather(*(ask(session, said(first, text)) for text in "pq"))
    texts = sampled(chat, session)
    assert len(texts) == 2
    assert "".join(texts).count("abc") == 1
    assert sorted("".join(texts).replace("<|im_end|>", "")) == list("abcde")


async def test_several_choices_are_trajectories_of_one_prompt(make_chat):
    engine, session = opened(make_chat(), "a<|im_end|>", "b<|im_end|>")
    answer = await session.answer({"messages": USER, "n": 2})
    session.deliver(answer)
    assert [choice["message"]["content"] for choice in answer.body["choices"]] == ["a", "b"]
    assert len({request.seed for request in engine.requests}) == 2
    assert len({request.name for request in engine.requests}) == 2
    assert len(parts_of(session)) == 2


async def test_an_answer_that_nobody_got_is_neither_trained_nor_continued(make_chat):
    _, session = opened(make_chat(), "abc<|im_end|>", "abc<|im_end|>")
    await ask(session, USER, deliver=False)
    second_try = await ask(session, USER)
    await ask(session, said(second_try, "go on"))
    (part,) = parts_of(session)
    assert (part.token_versions[part.response_mask] != 1).all()
    facts = session.facts()
    assert facts["sampled_tokens"] == 4 + int(part.response_mask.sum())
    assert facts["calls"] == 3 and facts["unanswered_tokens"] == 4


@pytest.mark.parametrize("stop", ["=3", "2=3", "="])
async def test_a_stop_ends_the_record_where_it_ends_the_answer(make_chat, stop):
    chat = make_chat(PLAIN)
    before = "1+2=3".partition(stop)[0]
    _, session = opened(chat, "1+2=3abc", "9<|im_end|>")
    answer = await session.answer({"messages": user("abab"), "stop": [stop, "zz"]})
    session.deliver(answer)
    (choice,) = answer.body["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (before, "stop")
    await ask(session, user(f"abab{before}{stop}!"))
    (part,) = parts_of(session)
    assert sampled(chat, session) == [f"{before}{stop}9<|im_end|>"]
    assert chat.decode(part.response_ids.tolist()) == f"{before}{stop}!9<|im_end|>"
    assert session.facts()["sampled_tokens"] == len(before + stop) + 2  # none after the stop


async def test_a_long_stop_is_cut_off_with_few_decodes(make_chat, monkeypatch):
    chat, stop, decoded = make_chat(), "=+" * 50, []
    _, session = opened(chat, f"ab{stop}", "c<|im_end|>")
    decode = chat.decode_after
    monkeypatch.setattr(
        chat, "decode_after", lambda *tokens: decoded.append(tokens) or decode(*tokens)
    )
    assert (await ask(session, user("q"), stop=stop))["content"] == "ab"
    assert len(decoded) < 25, "one for each token of the stop would be 100"
    await ask(session, [*user("q"), {"role": "assistant", "content": "ab"}, *user("!")])
    assert session.facts()["trajectories"] == 1  # it goes on from the tokens before the stop


async def test_a_stop_inside_a_token_ends_the_answer_before_it(make_chat):
    chat = make_chat(PLAIN)
    merged = completion(chat.encode("añ€😀abab"), finish_reason="length")
    session = make_session(chat, StandInEngine(lambda request: merged))
    assert (await ask(session, user("q"), stop=["b"]))["content"] == "añ€😀a"
    (part,) = parts_of(session)
    assert chat.decode(part.response_ids.tolist()) == "añ€😀abab"  # its last token has the stop


async def test_a_text_that_goes_on_without_the_stop_continues_what_was_sampled_before_it(make_chat):
    chat, prompt = make_chat(PLAIN), "q"
    engine, session = opened(chat, "abab\nc", "d\n", "e<|im_end|>")
    for _ in range(3):
        answer = await ask(session, user(prompt), stop="\n")
        prompt += answer["content"] + "!"
    (part,) = parts_of(session)
    assert chat.decode(part.response_ids.tolist()) == "abab!d!e<|im_end|>"
    assert sampled(chat, session) == ["ababde<|im_end|>"]
    assert engine.requests[1].prompt_ids[1:3] == [*chat.encode("a"), *chat.encode("b")]
    assert session.facts()["sampled_tokens"] == 5 + 2 + 2
    assert session.facts()["unanswered_tokens"] == 2  # the ends of two answers


async def test_nothing_continues_an_answer_that_is_empty_but_for_its_stop(make_chat):
    chat = make_chat(PLAIN)
    _, session = opened(chat, "\nc", "d<|im_end|>")
    assert (await ask(session, user("q"), stop="\n"))["content"] == ""
    await ask(session, user("q!"))
    assert sampled(chat, session) == ["\n", "d<|im_end|>"]


async def test_an_answer_keeps_its_end_if_no_call_continues_it(make_chat, monkeypatch):
    chat = make_chat(PLAIN)
    _, session = opened(chat, "abab\nc", "d<|im_end|>")
    answer = await ask(session, user("q"), stop="\n")
    with pytest.raises(RequestError, match="max_response_tokens"):
        await ask(session, user(f"q{answer['content']}{'c' * 200}"))
    monkeypatch.setattr(chat, "encode_after", lambda *_: None)  # as if the tokens said more
    await ask(session, user(f"q{answer['content']}!"))
    assert sampled(chat, session) == ["abab\n", "d<|im_end|>"]


REFUSED = [
    ({"temperature": 0.5}, "temperature", "allowed: leave it out, or 1, that of the run"),
    ({"top_p": 0.9}, "top_p", "allowed: leave it out, or 1"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "leave it out"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tool_parser is null"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"tool_choice": "required"}, "tool_choice", "allowed: auto, none"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls", "leave it out, or True"),
    ({"top_logprobs": 2}, "top_logprobs", "leave it out, or 0"),
    ({"prompt": "x"}, "prompt", "not supported"),
    ({"seed": "x"}, "seed", "a whole number"),
    ({"stream": "yes"}, "stream", "true, false"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "without"),
    ({"n": 1000}, "n", "at most 128"),
    ({"stop": 5}, "stop", "a text, or a list"),
    *(({"stop": stop}, "stop", "at most 64, each") for stop in (["x"] * 65, "x" * 1001)),
    ({"messages": []}, "messages", "a list of messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "parts"),
]


@pytest.mark.parametrize(("body", "parameter", "problem"), REFUSED)
async def test_what_would_change_the_distribution_is_refused(make_chat, body, parameter, problem):
    engine, session = opened(make_chat())
    with pytest.raises(RequestError, match=problem) as caught:
        await session.answer({"messages": USER, **body})
    assert caught.value.body()["error"]["param"] == parameter
    assert engine.requests == []


async def test_what_changes_nothing_is_taken(make_chat):
    same = {"temperature": 1.0, "top_p": 1, "presence_penalty": 0, "user": "me", "logprobs": None}
    _, session = opened(make_chat())
    assert (await ask(session, USER, **same))["content"] == "x"


async def test_a_conversation_without_room_is_refused_by_its_limit(make_chat):
    engine, session = opened(make_chat(), "a" * 200)
    too_long = said(await ask(session, USER), "more")
    assert engine.requests[0].max_tokens == 120
    for messages, limit in [
        (too_long, "max_response_tokens is 120"),
        (user("c" * 500), "max_model_len is 400"),
    ]:
        with pytest.raises(RequestError, match=limit) as refused:
            await ask(session, messages)
        assert refused.value.code == "context_length_exceeded"


async def test_names_and_seeds_do_not_depend_on_the_order_of_arrival(make_chat):
    async def found(*texts):
        engine, session = opened(make_chat())
        for text in texts:
            await ask(session, user(text))
        asked = {(request.name, request.seed) for request in engine.requests}
        return asked, [part.prompt_ids.tolist() for part in parts_of(session)]

    assert await found("one", "two", "one") == await found("two", "one", "one")


@settings(
    max_examples=many(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_each_delivered_token_is_in_one_trajectory_once(make_chat, monkeypatch, data):
    """Random trees of calls; some answers nobody got, some are continued without their end."""
    chat = make_chat(CHATML)
    tree, texts, token = Conversation(chat), ["abq"], 0
    for number in range(data.draw(st.integers(1, 8))):
        prompt = data.draw(st.sampled_from(texts))
        with monkeypatch.context() as patched:
            patched.setattr(Call, "path", [])  # then each answer is compared
            slow = tree.place(prompt)
        call = tree.place(prompt)
        assert (call.parent, call.prompt_ids) == (slow.parent, slow.prompt_ids)
        call.key = len(call.prompt_ids), f"{number}", 0
        call.delivered = data.draw(st.booleans())
        tree.add(call)
        for _ in range(data.draw(st.integers(1, 2))):
            letters = data.draw(st.text("abc", min_size=1, max_size=4))
            size = len(letters)
            ids = np.array([chat.encode(letter)[0] for letter in letters], np.int64)
            unique = np.arange(token, token + size, dtype=np.float32)  # marks the tokens
            token += size
            end = data.draw(st.integers(0, size))
            fields = np.zeros(size, np.int32), "stop", letters, size, letters[:end], end
            call.choices.append(Choice(ids, unique, *fields))
            said = data.draw(st.sampled_from([letters, letters[:end]]))
            texts.append(f"{prompt}{said}{data.draw(st.text('ab-', max_size=3))}")
    found = [part.generator_logprobs[part.response_mask].tolist() for part in parts_of(tree)]
    calls = [call for call in tree.calls if call.delivered]
    delivered = [choice.logprobs.tolist() for call in calls for choice in call.choices]
    assert sorted(chain(*found)) == sorted(chain(*delivered))
    for part in parts_of(tree):
        whole = chat.decode([*part.prompt_ids.tolist(), *part.response_ids.tolist()])
        assert whole.startswith("abq")
        assert part.response_mask[0] and part.response_mask[-1]


async def test_a_seed_repeats_an_answer_and_its_absence_does_not(make_chat):
    async def seeds(**body):
        engine, session = opened(make_chat())
        for _ in range(2):
            await ask(session, USER, **body)
        return [request.seed for request in engine.requests]

    first, second = await seeds(seed=0)
    assert first == second
    assert len({first, *await seeds(), *await seeds(seed=1)}) == 4
