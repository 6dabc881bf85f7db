"""Gymnasium's environments: a seed is a prompt, a turn is an action, rewards are summed."""

import sys
from types import ModuleType

import gymnasium
import pytest
from lib.rows import Characters

from grpo_components.environments.gymnasium import GymnasiumWorld, gymnasium_dataset
from grpo_components.environments.rewards import EnvironmentReward
from grpo_components.rollout.observation_text import unquoted

LAKE = {"id": "FrozenLake-v1", "options": {"is_slippery": False}}
DOWN, RIGHT = 1, 2


class Echo(gymnasium.Env):
    """Asks for a word; pays for its length, and 10 for the seed's word."""

    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(8, charset="abc")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = "abc"[self.np_random.integers(3)] * 2
        return f"Say {self.word}<|im_end|>.", {}

    def step(self, action):
        right = action == self.word
        return f"You said {action}<|im_end|>.", 10 * right + len(action), right, False, {}


@pytest.fixture(autouse=True)
def my_texts(monkeypatch):
    module = ModuleType("my_texts")
    module.where = lambda observation: f"At {observation}."
    module.padded = lambda observation: f"\n At {observation}. \n"
    module.act = lambda text, space: {"down": DOWN, "right": RIGHT}[text.strip()]
    monkeypatch.setitem(sys.modules, "my_texts", module)
    gymnasium.register("Echo-v0", Echo)
    yield
    del gymnasium.registry["Echo-v0"]


def reward_of(reply):
    return EnvironmentReward()(answer=reply.answer)


def text_of(reply):
    return unquoted(reply.text, ["<|im_end|>"])


def begin(seed=3, **settings):
    of_data = {key: settings[key] for key in settings if key in ("id", "options", "observe")}
    (prompt,) = gymnasium_dataset(Characters(), num_rows=1, seed=seed, **of_data)
    return prompt, GymnasiumWorld(**settings)(prompt, 7)


def test_a_walk_over_the_lake_is_the_environments_own():
    prompt, respond = begin(**LAKE, observe="my_texts.where")
    assert prompt["prompt_text"] == "At 0.\n" and prompt["gymnasium_seed"] == 3
    walk = [DOWN, DOWN, RIGHT, RIGHT, DOWN, RIGHT]
    replies = [respond(f"I go {action}\n") for action in walk]
    assert [text_of(reply) for reply in replies[:2]] == ["At 4.\n", "At 8.\n"]
    assert [reply.done for reply in replies] == [False] * 5 + [True]
    assert [reward_of(reply) for reply in replies] == [0.0] * 5 + [1.0]


def test_a_text_space_takes_the_text_and_quotes_what_it_shows():
    prompt, respond = begin(id="Echo-v0")
    word = prompt["prompt_text"].split()[1][:2]
    reply = respond(" abc\n")
    assert not reply.done and reward_of(reply) == 3
    assert text_of(reply) == "You said abc< |im_end|>.\n"
    reply = respond(word)
    assert reply.done and reward_of(reply) == 3 + 10 + 2


def test_the_same_seed_is_the_same_row_and_another_seed_may_be_another():
    rows = gymnasium_dataset(Characters(), id="Echo-v0", num_rows=12, seed=5)
    again = gymnasium_dataset(Characters(), id="Echo-v0", num_rows=12, seed=5)
    texts = [row["prompt_text"] for row in rows]
    assert texts == [row["prompt_text"] for row in again] and len(set(texts)) == 3
    assert [row["gymnasium_seed"] for row in rows] == list(range(5, 17))


@pytest.mark.parametrize("text", ["go on", "7", "-1", "1.5", ""])
def test_what_is_no_action_is_told_and_may_be_tried_again(text):
    _, respond = begin(**LAKE, reply_template="<{observation}>")
    reply = respond(text)
    assert text_of(reply).startswith("<error: ") and "a whole number from 0 to 3" in text_of(reply)
    assert not reply.done and text_of(respond("2")) == "<1>"


@pytest.mark.parametrize(
    ("text", "reply"), [("I choose 2.", "1\n"), ("Not 2 but 1.", "4\n"), ("1.5 or 2.", "1\n")]
)
def test_a_number_that_ends_a_sentence_is_an_action(text, reply):
    _, respond = begin(**LAKE)
    assert text_of(respond(text)) == reply


def test_a_first_observation_may_lose_its_outer_blanks_in_the_prompt():
    settings = {**LAKE, "observe": "my_texts.padded"}
    prompt, _ = begin(**settings)
    trimmed = {**prompt, "prompt_text": "user: At 0. assistant:"}
    respond = GymnasiumWorld(**settings)(trimmed, 7)
    assert text_of(respond("1")) == "\n At 4. \n\n"
    with pytest.raises(ValueError, match="the prompt does not show the first observation"):
        GymnasiumWorld(**settings)({**prompt, "prompt_text": "At 1."}, 7)


def test_a_function_of_the_users_reads_actions():
    _, respond = begin(**LAKE, act="my_texts.act")
    assert text_of(respond("down")) == "4\n" and text_of(respond("right")) == "5\n"
    with pytest.raises(KeyError):  # none of the policy's mistakes: the sample fails
        respond("up")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"id": "NoLake-v1"}, "^id: NoLake-v1: NameNotFound"),
        ({**LAKE, "options": {"slip": 1}}, "^id: FrozenLake-v1: TypeError"),
        ({"id": "CartPole-v1", "act": "my_texts.none"}, "^act: my_texts.none cannot be imported"),
        ({**LAKE, "reply_template": "next"}, "^reply_template: 'next' given; allowed: a text that"),
        ({"id": "Pendulum-v1"}, "^id: Pendulum-v1 takes actions of Box.*; allowed: a Text or Disc"),
    ],
)
def test_a_wrong_setting_is_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        GymnasiumWorld(**settings)
