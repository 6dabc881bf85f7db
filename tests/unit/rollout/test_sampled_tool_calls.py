"""A policy that has learned to call a tool samples the call itself, and reads its result."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from grpo_components.rewards.pool import RewardPool, RewardSpec
from grpo_components.rollout.generator_options import EnvironmentOptions
from grpo_components.settings import GeneratorSettings

# As Qwen2.5's template writes turns, tool calls and results.
TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == "tool" %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QUESTION, RESULT = "3+4?", "7"
# Not as the template writes it: this spelling is what was sampled, and stays.
CALL = '<tool_call>\n{"arguments": {"sum":"3+4"}, "name": "add"}\n</tool_call><|im_end|>'
ANSWER = "It is 7.<|im_end|>"
AGENT = """
import json

from openai import OpenAI

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def run(task):
    client = OpenAI(max_retries=0)
    messages = [{"role": "user", "content": task["prompt_text"]}]
    while True:
        asked = {"model": "policy", "messages": messages, "tools": TOOLS}
        if task["seed"] % 2:
            with client.chat.completions.stream(**asked) as stream:
                choice = stream.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**asked).choices[0]
        messages.append(choice.message.to_dict())
        if choice.finish_reason != "tool_calls":
            return float(choice.message.content == "It is 7.")
        for call in choice.message.tool_calls:
            left, right = json.loads(call.function.arguments)["sum"].split("+")
            result = str(int(left) + int(right))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
"""


@pytest.fixture
def caller(tiny_policy, tmp_path):
    """Folder of a model that was fitted to one conversation with a tool call."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    prompt = f"<|im_start|>system\nadd <|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n"
    prompt += "<|im_start|>assistant\n"
    result = f"\n<|im_start|>user\n<tool_response>\n{RESULT}\n</tool_response><|im_end|>\n"
    result += "<|im_start|>assistant\n"
    parts = [tokenizer(text)["input_ids"] for text in (prompt, CALL, result, ANSWER)]
    ids = torch.tensor([[token_id for part in parts for token_id in part]])
    sampled = np.repeat([False, True, False, True], [len(part) for part in parts])
    labels = ids.masked_fill(~torch.tensor(sampled), -100)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other on a busy machine
    for _ in range(200):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    assert loss.item() < 1e-2  # nearly every sample at temperature 1 is the conversation
    model.save_pretrained(tmp_path / "caller")
    tokenizer.save_pretrained(tmp_path / "caller")
    return tmp_path / "caller"


@pytest.mark.nightly
def test_a_tool_call_that_the_policy_samples_is_answered_and_its_tokens_go_on(
    caller, make_engine, tmp_path, monkeypatch
):
    from grpo_components.rollout import agent_rollouts

    (tmp_path / "tool_agent.py").write_text(AGENT)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    monkeypatch.syspath_prepend(str(tmp_path))
    engine = make_engine(caller)
    tokenizer = AutoTokenizer.from_pretrained(caller)
    reward = RewardSpec("grpo_components.agents.rewards.AgentReward", {}, 1.0, True)
    rewards = RewardPool({"agent": reward}, num_workers=1, timeout_s=30.0)
    rollouts = agent_rollouts.AgentRollouts(
        engine,
        rewards,
        GeneratorSettings(
            max_response_tokens=200,
            temperature=1.0,
            stop_token_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")],
            max_model_len=400,
        ),
        EnvironmentOptions(
            build_environment=lambda: agent_rollouts.AgentEnvironment(
                "tool_agent.run", str(tmp_path / "template.jinja"), tool_parser="hermes"
            ),
            timeout_s=60.0,
            runs_agents=True,
        ),
        str(caller),
    )
    prompt = {"prompt_ids": np.array([1]), "prompt_text": QUESTION, "answer": RESULT}
    samples = [
        agent_rollouts.Sample(
            {**prompt, "prompt_index": 0, "seed": i}, f"group 0 sample {i}", seed=i
        )
        for i in range(8)
    ]
    try:
        slots = asyncio.run(rollouts.collect(samples, 1.0))
    finally:
        rollouts.close()
        rewards.close()
    right = [slot for slot in slots if slot.score.reward == 1.0]
    assert len(right) >= 6
    call, answer = (tokenizer(text)["input_ids"] for text in (CALL, ANSWER))
    for slot in right:
        assert (slot.session["calls"], slot.session["trajectories"]) == (2, 1)
        assert slot.response_ids[slot.response_mask].tolist() == [*call, *answer]
        assert (np.exp(slot.logprobs[slot.response_mask]) > 0.5).all()
