"""What a session records: the tokens that were sampled, each of them once, whatever is asked."""

import asyncio
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lib.engine import StandInEngine
from lib.properties import many
from lib.sessions import (
    CHATML,
    DROPS_THOUGHTS,
    PLAIN,
    Parser,
    Script,
    ask,
    make_session,
    parts_of,
    scripted_engine,
)

from grpo_components.agents.conversation import Call, Choice, Conversation
from grpo_components.agents.requests import RequestError

USER = [{"role": "user", "content": "abab?"}]


def converse(chat, talk, *texts, engine=None):
    engine = engine or scripted_engine(chat, *texts)

    async def run():
        session = make_session(chat, engine)
        await talk(session)
        return engine, session

    return asyncio.run(run())


def said(answer, *more):
    """The messages of a chat after an answer, and further ones of the user."""
    after = [{"role": "user", "content": text} for text in more]
    return [*USER, {"role": answer["role"], "content": answer["content"]}, *after]


def sampled(part):
    return part.response_ids[part.response_mask].tolist()


def test_a_chat_goes_on_with_the_tokens_that_were_sampled(make_chat):
    chat = make_chat()

    async def talk(session):
        first = await ask(session, USER)
        await ask(session, said(first, "more"))

    engine, session = converse(chat, talk, "abab<|im_end|>", "ab<|im_end|>")
    (part,) = parts_of(session)
    known = [*engine.requests[0].prompt_ids, *chat.encode("a"), *chat.encode("b")]
    assert engine.requests[1].prompt_ids[: len(known)] == known  # else `abab` would be one token
    assert chat.encode("abab") != [*chat.encode("a"), *chat.encode("b")] * 2
    assert part.prompt_ids.tolist() == engine.requests[0].prompt_ids
    whole = [*part.prompt_ids.tolist(), *part.response_ids.tolist()]
    assert whole[: len(engine.requests[1].prompt_ids)] == engine.requests[1].prompt_ids
    assert chat.decode(sampled(part)) == "abab<|im_end|>ab<|im_end|>"
    assert part.token_versions[part.response_mask].tolist() == [1] * 5 + [2] * 3
    assert (part.token_versions[~part.response_mask] == -1).all()


def test_a_template_that_drops_thoughts_forks_the_session(make_chat):
    chat = make_chat(DROPS_THOUGHTS)

    async def talk(session):
        first = await ask(session, USER)
        await ask(session, said(first, "sure?"))

    engine, session = converse(chat, talk, "<think>hm</think>yes<|im_end|>", "no<|im_end|>")
    first, second = parts_of(session)
    assert chat.decode(sampled(first)) == "<think>hm</think>yes<|im_end|>"
    assert chat.decode(sampled(second)) == "no<|im_end|>"
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
def test_another_spelling_of_the_same_tool_call_is_no_fork(make_chat, spelling, trajectories):
    chat = make_chat(parse=Parser())
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

    async def talk(session):
        answer = await ask(session, USER, tools=tools)
        call = answer["tool_calls"][0]
        call["function"]["arguments"] = '{"x": 1}'
        result = {"role": "tool", "content": "2", "tool_call_id": call["id"]}
        await ask(session, [*USER, answer, result], tools=tools)

    _, session = converse(chat, talk, f"<tool_call>{spelling}</tool_call><|im_end|>")
    assert session.facts()["trajectories"] == trajectories
    assert spelling in chat.decode(sampled(parts_of(session)[0]))


def test_a_long_loop_compares_its_prompt_with_the_last_answer_alone(make_chat, monkeypatch):
    chat, compared = make_chat(), []
    length = chat.turn_length
    monkeypatch.setattr(chat, "turn_length", lambda *all: compared.append(1) or length(*all))

    async def talk(session):
        messages = USER
        for _ in range(6):
            messages = [*messages, await ask(session, messages), {"role": "user", "content": "m"}]

    _, session = converse(chat, talk)
    assert session.facts()["trajectories"] == 1
    assert len(compared) == 5


def test_parallel_calls_train_what_they_share_once(make_chat):
    chat = make_chat()

    async def talk(session):
        first = await ask(session, USER)
        await asyncio.gather(*(ask(session, said(first, text)) for text in "pq"))

    parts = parts_of(converse(chat, talk, "abc<|im_end|>", "d<|im_end|>", "e<|im_end|>")[1])
    texts = sorted(chat.decode(sampled(part)) for part in parts)
    assert len(parts) == 2
    assert "".join(texts).count("abc") == 1
    assert sorted("".join(texts).replace("<|im_end|>", "")) == list("abcde")


def test_several_choices_are_trajectories_of_one_prompt(make_chat):
    async def talk(session):
        answer = await session.answer({"messages": USER, "n": 2})
        session.deliver(answer)
        assert [choice["message"]["content"] for choice in answer.body["choices"]] == ["a", "b"]

    engine, session = converse(make_chat(), talk, "a<|im_end|>", "b<|im_end|>")
    assert len({request.seed for request in engine.requests}) == 2
    assert len({request.name for request in engine.requests}) == 2
    assert len(parts_of(session)) == 2


def test_an_answer_that_nobody_got_is_neither_trained_nor_continued(make_chat):
    chat = make_chat()

    async def talk(session):
        await ask(session, USER, deliver=False)
        first = await ask(session, USER)  # a client's second try
        await ask(session, said(first, "go on"))

    _, session = converse(chat, talk, "abc<|im_end|>", "abc<|im_end|>")
    (part,) = parts_of(session)
    assert (part.token_versions[part.response_mask] != 1).all()
    facts = session.facts()
    assert facts["sampled_tokens"] == 4 + int(part.response_mask.sum())
    assert facts["calls"] == 3 and facts["unanswered_tokens"] == 4


def text(content):
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("stop", ["=3", "2=3", "="])
def test_a_stop_ends_the_record_where_it_ends_the_answer(make_chat, stop):
    chat = make_chat(PLAIN)
    before = "1+2=3".partition(stop)[0]

    async def talk(session):
        answer = await session.answer({"messages": text("abab"), "stop": [stop, "zz"]})
        session.deliver(answer)
        (choice,) = answer.body["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (before, "stop")
        await ask(session, text(f"abab{before}{stop}!"))

    _, session = converse(chat, talk, "1+2=3abc", "9<|im_end|>")
    (part,) = parts_of(session)
    assert chat.decode(sampled(part)) == f"{before}{stop}9<|im_end|>"
    assert chat.decode(part.response_ids.tolist()) == f"{before}{stop}!9<|im_end|>"
    assert session.facts()["sampled_tokens"] == len(before + stop) + 2  # none after the stop


def test_a_stop_inside_a_token_ends_the_answer_before_it(make_chat):
    chat = make_chat(PLAIN)

    def merged(script, request):
        said = script(request)
        ids = np.array(chat.encode("añ€😀abab"), np.int64)
        columns = {"logprobs": np.zeros(len(ids), np.float32)}
        columns["token_versions"] = np.zeros(len(ids), np.int32)
        return replace(said, token_ids=ids, finish_reason="length", **columns)

    async def talk(session):
        assert (await ask(session, text("q"), stop=["b"]))["content"] == "añ€😀a"

    _, session = converse(chat, talk, engine=StandInEngine(partial(merged, Script(chat))))
    (part,) = parts_of(session)
    assert chat.decode(part.response_ids.tolist()) == "añ€😀abab"  # its last token has the stop


def test_a_text_that_goes_on_without_the_stop_continues_what_was_sampled_before_it(make_chat):
    chat = make_chat(PLAIN)

    async def talk(session):
        prompt = "q"
        for _ in range(3):
            answer = await ask(session, text(prompt), stop="\n")
            prompt += answer["content"] + "!"

    engine, session = converse(chat, talk, "abab\nc", "d\n", "e<|im_end|>")
    (part,) = parts_of(session)
    assert chat.decode(part.response_ids.tolist()) == "abab!d!e<|im_end|>"
    assert chat.decode(sampled(part)) == "ababde<|im_end|>"
    assert engine.requests[1].prompt_ids[1:3] == [*chat.encode("a"), *chat.encode("b")]
    assert session.facts()["sampled_tokens"] == 5 + 2 + 2
    assert session.facts()["unanswered_tokens"] == 2  # the ends of two answers


def test_an_answer_keeps_its_end_if_no_call_continues_it(make_chat, monkeypatch):
    chat = make_chat(PLAIN)

    async def talk(session):
        answer = await ask(session, text("q"), stop="\n")
        with pytest.raises(RequestError, match="max_response_tokens"):
            await ask(session, text(f"q{answer['content']}{'c' * 200}"))
        monkeypatch.setattr(chat, "encode_after", lambda *_: None)  # as if the tokens said more
        await ask(session, text(f"q{answer['content']}!"))

    first, second = parts_of(converse(chat, talk, "abab\nc", "d<|im_end|>")[1])
    assert chat.decode(sampled(first)) == "abab\n"
    assert chat.decode(sampled(second)) == "d<|im_end|>"


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
def test_what_would_change_the_distribution_is_refused(make_chat, body, parameter, problem):
    async def talk(session):
        with pytest.raises(RequestError, match=problem) as caught:
            await session.answer({"messages": USER, **body})
        assert caught.value.body()["error"]["param"] == parameter

    engine, _ = converse(make_chat(), talk)
    assert engine.requests == []


def test_what_changes_nothing_is_taken(make_chat):
    same = {"temperature": 1.0, "top_p": 1, "presence_penalty": 0, "user": "me", "logprobs": None}

    async def talk(session):
        assert (await ask(session, USER, **same))["content"] == "x"

    converse(make_chat(), talk)


def test_a_conversation_without_room_is_refused_by_its_limit(make_chat):
    async def talk(session):
        first = await ask(session, USER)
        for messages, limit in [
            (said(first, "more"), "max_response_tokens is 120"),
            ([{"role": "user", "content": "c" * 500}], "max_model_len is 400"),
        ]:
            with pytest.raises(RequestError, match=limit) as refused:
                await ask(session, messages)
            assert refused.value.code == "context_length_exceeded"

    engine, _ = converse(make_chat(), talk, "a" * 200)
    assert engine.requests[0].max_tokens == 120


def test_names_and_seeds_do_not_depend_on_the_order_of_arrival(make_chat):
    chats = [[{"role": "user", "content": text}] for text in ("one", "two", "one")]

    def found(order):
        async def talk(session):
            for index in order:
                await ask(session, chats[index])

        engine, session = converse(make_chat(), talk)
        asked = {(request.name, request.seed) for request in engine.requests}
        return asked, [part.prompt_ids.tolist() for part in parts_of(session)]

    assert found([0, 1, 2]) == found([1, 2, 0])


@settings(
    max_examples=many(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_each_delivered_token_is_in_one_trajectory_once(make_chat, monkeypatch, data):
    """Random trees of calls; some answers nobody got, some are continued without their end."""
    chat = make_chat(CHATML)
    tree, texts = Conversation(chat), ["abq"]
    token = 0
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
            ids = np.array([chat.encode(letter)[0] for letter in letters], np.int64)
            unique = np.arange(token, token + len(ids), dtype=np.float32)  # marks the tokens
            token += len(ids)
            versions = np.zeros(len(ids), np.int32)
            end = data.draw(st.integers(0, len(ids)))
            fields = "stop", letters, len(ids), letters[:end], end
            call.choices.append(Choice(ids, unique, versions, *fields))
            said = data.draw(st.sampled_from([letters, letters[:end]]))
            texts.append(f"{prompt}{said}{data.draw(st.text('ab-', max_size=3))}")
    found = [part.generator_logprobs[part.response_mask].tolist() for part in parts_of(tree)]
    calls = [call for call in tree.calls if call.delivered]
    delivered = [choice.logprobs.tolist() for call in calls for choice in call.choices]
    assert sorted(chain(*found)) == sorted(chain(*delivered))
    for part in parts_of(tree):
        whole = chat.decode([*part.prompt_ids.tolist(), *part.response_ids.tolist()])
        assert whole.startswith("abq")
        assert part.response_mask[0]
        assert part.response_mask[-1]


def test_a_seed_repeats_an_answer_and_its_absence_does_not(make_chat):
    def seeds(**body):
        async def talk(session):
            for _ in range(2):
                await ask(session, USER, **body)

        return [request.seed for request in converse(make_chat(), talk)[0].requests]

    first, second = seeds(seed=0)
    assert first == second
    assert len({first, *seeds(), *seeds(seed=1)}) == 4
