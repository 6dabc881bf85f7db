"""torchrl's chat environments: prompts, turns and rewards are theirs, tokens stay as sampled."""

import json
import sys
from types import ModuleType

import pytest
import torch
from torchrl.data.llm import History
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv, DatasetChatEnv, GSM8KRewardParser
from torchrl.envs.transforms import Transform
from transformers import AutoTokenizer

from grpo_components.environments.chat_env import ChatEnvWorld, chat_env_dataset
from grpo_components.environments.rewards import EnvironmentReward

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Guesses(Transform):
    """Rewards a right last turn, else lets the user say so; three turns at most."""

    def __init__(self):
        super().__init__()
        self.turns = 0

    def _reset(self, tensordict, tensordict_reset):
        self.turns = 0
        return tensordict_reset

    def _step(self, tensordict, next_tensordict):
        self.turns += 1
        right = tensordict["text"].response[0].strip() == tensordict["answer"][0].split()[-1]
        done = torch.tensor([[right or self.turns == 3]])
        next_tensordict["reward"] = torch.tensor([[1.0 if right else -0.25]])
        next_tensordict["done"] = next_tensordict["terminated"] = done
        history = next_tensordict["history"].prompt
        said = History.from_chats([[{"role": "user", "content": "Wrong.\n"}]])
        next_tensordict["history"].prompt = history.extend(said, inplace=False, dim=-1)
        return next_tensordict


class Forgets(Transform):
    def _step(self, tensordict, next_tensordict):
        next_tensordict["history"].prompt = tensordict["history"].response
        return next_tensordict


def guessing(**kwargs):
    return TransformedEnv(ChatEnv(batch_size=(1,), **kwargs), Guesses())


def forgetting():
    return TransformedEnv(ChatEnv(batch_size=(1,)), Forgets())


def parsed():
    return TransformedEnv(ChatEnv(batch_size=(1,)), GSM8KRewardParser(eos_token="<|im_end|>"))


def of_files(folder):
    def collate(rows):
        return {name: [row[name] for row in rows] for name in ("query", "answer")}

    made = DatasetChatEnv(dataset=str(folder), shuffle=False, seed=0, collate_fn=collate)
    made.append_transform(Guesses())
    return made


@pytest.fixture(autouse=True)
def my_envs(monkeypatch):
    module = ModuleType("my_envs")
    for made in (guessing, forgetting, parsed, of_files):
        setattr(module, made.__name__, made)
    monkeypatch.setitem(sys.modules, "my_envs", module)


@pytest.fixture
def chatml(tmp_path):
    (tmp_path / "chatml.jinja").write_text(CHATML)
    return str(tmp_path / "chatml.jinja")


@pytest.fixture
def rows(tmp_path):
    rows = [{"question": f"{n}+0?\n", "answer": f"{n}+0\n#### {n}"} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "rows.jsonl")


@pytest.fixture
def begun(tiny_policy, rows):
    def begin(name, chat_template, row=3, **arguments):
        node = {"_component_": f"my_envs.{name}", **arguments}
        settings = {
            "env": node,
            "model_path": str(tiny_policy),
            "chat_template": chat_template,
        }
        prompts = chat_env_dataset(None, source=rows, **settings)
        return prompts[row], ChatEnvWorld(**settings)(prompts[row], 5)

    return begin


def reward_of(reply):
    return EnvironmentReward()(
        prompt_text="", response_text="", answer=reply.answer, finish_reason="stop"
    )


def test_the_prompt_is_what_the_environment_shows(begun, chatml, tiny_policy):
    prompt, _ = begun("guessing", chatml, system_prompt="Add.")
    text = "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n3+0?\n<|im_end|>\n"
    assert prompt["prompt_text"] == f"{text}<|im_start|>assistant\n"
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    assert tokenizer.decode(prompt["prompt_ids"]) == prompt["prompt_text"]
    assert prompt["chat_env"] == {"query": "3+0?\n", "answer": "3+0\n#### 3"}


def test_the_reply_is_what_follows_the_turns_stop_token(begun, chatml):
    _, respond = begun("guessing", chatml)
    reply = respond("7<|im_end|>")
    assert not reply.done and reward_of(reply) == -0.25
    assert reply.text == "\n<|im_start|>user\nWrong.\n<|im_end|>\n<|im_start|>assistant\n"
    reply = respond("3<|im_end|>")
    assert reply.done and reward_of(reply) == 0.75


def test_without_a_frame_the_contents_follow_each_other(begun):
    prompt, respond = begun("guessing", "plain")
    assert prompt["prompt_text"] == "3+0?\n"
    assert [respond("7\n").text for _ in range(2)] == ["Wrong.\n"] * 2
    assert respond("7\n").done  # the third: a transform keeps count


def test_a_conversation_begins_anew(begun):
    """A transform's state is reset with the environment."""
    prompt, respond = begun("guessing", "plain")
    world = respond._env
    assert [respond("7\n").done for _ in range(3)] == [False, False, True]
    assert world.env.transform[1].turns == 3
    world.reset(prompt["chat_env"])
    assert world.env.transform[1].turns == 0


def test_torchrls_own_reward_parser_scores_and_ends_the_conversation(begun):
    _, respond = begun("parsed", "plain")
    reply = respond("<think>nothing</think><answer>3</answer>")
    assert reply.done and reward_of(reply) == 1.0
    _, respond = begun("parsed", "plain")
    assert reward_of(respond("<think>nothing</think><answer>4</answer>")) == pytest.approx(0.1)


def test_an_environment_that_rewrites_its_history_fails(begun):
    _, respond = begun("forgetting", "plain")
    with pytest.raises(ValueError, match="the environment, or its chat template, changed earlier"):
        respond("7\n")


def test_a_data_set_of_the_environments_own_is_the_prompts(tiny_policy, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [json.dumps({"query": f"{n}+1?\n", "answer": str(n + 1)}) for n in range(4)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    node = {"_component_": "my_envs.of_files", "folder": str(folder)}
    settings = {"env": node, "model_path": str(tiny_policy), "chat_template": "plain"}
    prompts = chat_env_dataset(None, num_rows=3, **settings)
    assert [prompt["prompt_text"] for prompt in prompts] == ["0+1?\n", "1+1?\n", "2+1?\n"]
    world = ChatEnvWorld(**settings)
    for row in (2, 0):  # in any order: it draws nothing itself any more
        reply = world(prompts[row], 1)(prompts[row]["chat_env"]["answer"])
        assert reply.done and reward_of(reply) == 1.0
    with pytest.raises(ValueError, match=r"^dataset.source: null given, with num_rows: null"):
        chat_env_dataset(None, **settings)


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ({"_component_": "my_envs.guessing", "input_mode": "text"}, "input_mode text given"),
        ({"_component_": "my_envs.nothing"}, "env: my_envs.nothing: "),
        ({"_component_": "torchrl.envs.llm.ChatEnv", "batch_size": [2]}, r"batch size \[2\]"),
        ({"_component_": "torch.nn.Identity"}, "env: a Identity of batch size"),
    ],
)
def test_another_environment_is_refused(node, problem, tiny_policy):
    with pytest.raises(ValueError, match=problem):
        ChatEnvWorld(node, str(tiny_policy), "plain")


def test_a_row_of_another_data_set_is_refused(begun, tiny_policy):
    prompt, _ = begun("guessing", "plain")
    settings = {"model_path": str(tiny_policy), "chat_template": "plain"}
    node = {"_component_": "my_envs.guessing", "system_prompt": "Add."}
    with pytest.raises(ValueError, match=r"the environment: it shows 'Add\.3"):
        ChatEnvWorld(node, **settings)(prompt, 1)
    del prompt["chat_env"]
    with pytest.raises(ValueError, match="the prompt has no reset"):
        ChatEnvWorld(node, **settings)(prompt, 1)
