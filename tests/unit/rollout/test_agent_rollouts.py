"""Groups that agents make: whole, scored once per session, whatever an agent does."""

import asyncio
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from lib.rows import Characters, prompt
from lib.sessions import CHATML, build_tokenizer, scripted_engine
from tokenizers.processors import TemplateProcessing

from grpo_components.agents.environment import parser_names
from grpo_components.data.prompts import prompt_encoder
from grpo_components.data.tokenizers import HuggingFaceTokenizer
from grpo_components.errors import ConfigError, ReplayError
from grpo_components.rewards.pool import RewardPool, RewardSpec
from grpo_components.rollout.generator_options import EnvironmentOptions
from grpo_components.settings import GeneratorSettings

AGENT = """
import asyncio, time
import openai

def chat(client, *texts, **more):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    answer = client.chat.completions.create(model="m", messages=messages, **more)
    return answer.choices[0].message.content

def run(task):
    client = openai.OpenAI(max_retries=0)
    what = task["prompt_text"]
    if what == "nothing":
        return 1.0
    if what == "tool":
        return tool(client, what)
    if what == "cold":
        return float(len(chat(client, what, temperature=0.0)))
    first = chat(client, what)
    if what == "goes on":
        chat(client, what, first, "more")
    if what == "raises":
        raise ValueError("no more")
    if what == "hangs":
        time.sleep(600)
    if what == "many":
        asyncio.run(many())
        return 1.0
    if what == "forks":
        chat(client, what, "rewritten", "again")
    if what == "posts":
        client.post("/reward", cast_to=object, body={"reward": 0.25})
        return None
    return {"reward": len(first), "task": task["prompt_index"]}

def tool(client, text):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": text}]
    create = client.chat.completions.create
    said = create(model="m", messages=messages, tools=tools).choices[0].message
    (call,) = said.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": call.function.arguments}
    last = create(model="m", messages=[*messages, said.model_dump(), result], tools=tools)
    return float(last.choices[0].message.content == "done")

async def many():
    async with openai.AsyncOpenAI(max_retries=0) as client:
        message = [{"role": "user", "content": "x"}]
        ask = client.chat.completions.create
        asks = [ask(model="m", messages=message) for _ in range(1000)]
        await asyncio.gather(*asks, return_exceptions=True)
"""


@pytest.fixture(scope="module")
def module(engine_variables):
    from grpo_components.rollout import agent_rollouts

    return agent_rollouts


@pytest.fixture
def run(module, tmp_path, monkeypatch):
    """Runs one session for each text of a prompt; returns their trajectories."""
    (tmp_path / "session_agent.py").write_text(AGENT)
    (tmp_path / "template.jinja").write_text(CHATML)
    build_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = RewardSpec("grpo_components.agents.rewards.AgentReward", {}, 1.0, True)
    rewards = RewardPool({"agent": reward}, num_workers=1, timeout_s=30.0)

    def run_all(
        *texts,
        engine=None,
        agent="session_agent.run",
        timeout_s=20.0,
        tool_parser=None,
        template=str(tmp_path / "template.jinja"),
        data_tokenizer=None,
        **sample,
    ):
        limits = {"max_calls": 20, "tool_parser": tool_parser}
        build = partial(module.AgentEnvironment, agent, template, **limits)
        environment = EnvironmentOptions(
            build_environment=build, timeout_s=timeout_s, kind="agents"
        )
        settings = GeneratorSettings(
            max_response_tokens=200,
            temperature=1.0,
            stop_token_ids=[build_tokenizer().convert_tokens_to_ids("<|im_end|>")],
            max_model_len=400,
        )
        model = str(tmp_path / "model")
        engine = engine or scripted_engine(None)
        rollouts = module.AgentRollouts(
            engine, rewards, settings, environment, model, data_tokenizer or Characters()
        )
        engine.answer.chat = rollouts._chat
        samples = []
        for i, text in enumerate(texts):
            row, name = prompt(i, prompt_text=text, answer="", seed=i), f"group 3 sample {i}"
            samples.append(module.Sample(row, name, seed=100 + i, group_id=3, **sample))
        try:
            return [records for records, *_ in asyncio.run(rollouts.collect(samples))]
        finally:
            rollouts.close()

    yield run_all
    rewards.close()


def test_sessions_become_groups_with_one_reward_each(run):
    from grpo_components.trajectory import pack, response_numbers, summarize

    rows = [row for records in run("good", "forks", "posts", "nothing") for row in records]
    packed = pack(rows)
    assert response_numbers(packed).tolist() == [0, 1, 1, 2, 3]
    assert [row.reward for row in rows[:4]] == [1.0, 1.0, 1.0, 0.25]
    assert rows[4].error == "agent: it ended without an answer"
    summary = summarize(packed)
    assert np.allclose(summary.rewards, [1.0, 1.0, 0.25, np.nan], equal_nan=True)
    assert summary.response_tokens == [2, 4, 2, 0]
    assert summary.successes == [True, True, False, False]
    assert rows[1].session["trajectories"] == 2
    assert rows[2].session == {"sample": 1}


def test_a_tool_call_that_is_sampled_reaches_the_agent_and_its_tokens_go_on(run):
    """In the policy's own spelling, which is not the template's."""
    call = '<tool_call>{"arguments": {"x":1},  "name": "f"}</tool_call><|im_end|>'
    engine = scripted_engine(None, call, "done<|im_end|>")
    ((record,),) = run("tool", engine=engine, tool_parser="hermes")
    assert (record.error, record.reward) == (None, 1.0)
    assert (record.session["calls"], record.session["trajectories"]) == (2, 1)
    said = engine.answer.chat.decode(record.response_ids[record.response_mask].tolist())
    assert said == f"{call}done<|im_end|>"


def test_whatever_an_agent_does_its_sample_alone_fails(run):
    records = [record for (record,) in run("raises", "hangs", "good", timeout_s=6.0)]
    errors = [record.error for record in records]
    assert errors[0].startswith("agent: ValueError (")
    assert errors[0].splitlines()[0].endswith("): no more")
    limit = "session_agent.run did not end in 6 s, half of timeouts.rollout_s"
    assert errors[1] == f"agent: TimeoutError: {limit}"
    assert errors[2] is None
    assert not any(len(record.response_ids) for record in records[:2])


def test_an_agent_that_opens_a_thousand_calls_fails_its_sample_alone(run):
    (many,), (good,) = run("many", "good", timeout_s=120.0)
    limit = "agent: the agent opened more than 20 calls (environment.max_calls)"
    assert (many.error, good.error) == (limit, None)
    assert many.session["calls"] <= 20


def test_a_replay_says_at_which_call_the_agent_differs(run):
    def arrived(request):
        if len(engine.requests) == 2:
            raise ReplayError(f"the recorded run had no {request.name} here (any more)")
        request.finish()

    engine = scripted_engine(None, arrived=arrived)
    problem = "group 3 sample 0: the agent differs at call 2: the recorded run had no group 3"
    with pytest.raises(ReplayError, match=problem):
        run("forks", engine=engine)


def test_an_agent_without_a_module_ends_the_run(run):
    with pytest.raises(ConfigError, match=r"^environment.agent: no_such.run cannot be imported"):
        run("good", agent="no_such.run")


@pytest.mark.parametrize("has_beginning", [False, True])
def test_a_plain_prompt_has_the_tokens_of_the_data_set_and_begins_once(run, has_beginning):
    tokenizer, name = build_tokenizer(), "<|im_start|>"
    beginning = tokenizer.convert_tokens_to_ids(name)
    if has_beginning:
        adds = TemplateProcessing(f"{name} $A", None, [(name, beginning)])
        tokenizer.backend_tokenizer.post_processor = adds
    data_tokenizer, engine = HuggingFaceTokenizer(tokenizer, [0]), scripted_engine(None)
    more = {"template": "plain", "data_tokenizer": data_tokenizer}
    ((record,),) = run("goes on", engine=engine, **more)
    first, second = (request.prompt_ids for request in engine.requests)
    assert first == prompt_encoder(data_tokenizer, "{question}", None, None)("goes on")[0]
    assert first == record.prompt_ids.tolist() and (beginning in first) == has_beginning
    assert second == [*first, *tokenizer("xmore", add_special_tokens=False)["input_ids"]]


def test_tools_are_refused_without_a_parser(run):
    ((record,),) = run("tool", engine=scripted_engine(None))
    assert "environment.tool_parser" in record.error


def test_another_temperature_is_refused_but_in_an_evaluation(run):
    for evaluates in (False, True):
        ((record,),) = run("cold", engine=scripted_engine(None), evaluates=evaluates)
        assert (record.error is None) == evaluates


def test_an_evaluation_takes_any_temperature(run):
    engine = scripted_engine(None)
    ((record,),) = run("good", engine=engine, evaluates=True)
    assert record.error is None
    assert engine.requests[0].temperature == 1.0


def test_agents_run_where_vllm_does_not_exist():
    hidden = str(Path(__file__).parents[2] / "lib" / "without_vllm")
    code = "import grpo_components.rollout.agent_rollouts"
    environment = {**os.environ, "PYTHONPATH": hidden}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_vllms_parser_finds_calls_and_compares_turns(module):
    from grpo_components.agents.tool_calls import TurnParser

    parse = TurnParser("hermes", build_tokenizer())
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    turn = parse(f"so {call}", tools)
    assert turn.content.strip() == "so"
    assert [(name, json.loads(given)) for name, given in turn.calls] == [("f", {"x": 1})]
    assert parse("plain", tools) == ("plain", [])
    spelled = '<tool_call>\n{"arguments":{"x":1},"name":"f"}\n</tool_call>'
    assert parse.same(call, spelled)
    assert not parse.same(call, call.replace("1", "2"))
    assert not parse.same("plain", "plain")
    from vllm.tool_parsers import ToolParserManager

    assert parser_names() == ToolParserManager.list_registered()
    refused = r"^environment.tool_parser: 'nobody' given; allowed: null"
    with pytest.raises(ValueError, match=refused):
        TurnParser("nobody", build_tokenizer())


def test_a_server_that_ends_is_an_error_and_no_silence(run, module):
    def ends(request):
        def end():
            raise SystemExit("out of memory")

        asyncio.get_running_loop().call_soon(end)

    with pytest.raises(module.AgentServerError, match=r"server ended: SystemExit\('out of memory"):
        run("good", engine=scripted_engine(None, arrived=ends))
