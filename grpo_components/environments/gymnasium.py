"""Wraps Gymnasium environments as worlds, which reply to the policy's turns with observations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from omegaconf import OmegaConf
from torchtune.config._utils import _get_component_from_path

from grpo_components.data.datasets import (
    PromptDataset,
    passes_on_to_prompt_dataset,
    prompt_dataset,
)
from grpo_components.environments.extras import imported_extra
from grpo_components.errors import fail, shown
from grpo_components.rollout.multi_turn import Reply
from grpo_components.rollout.observation_text import quoted
from grpo_components.rollout.samples import Prompt

_COLUMN = "gymnasium_seed"
_OBSERVATION = "{observation}"


@passes_on_to_prompt_dataset
def gymnasium_dataset(
    tokenizer: Any,
    *,
    id: str,
    num_rows: int = 500,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    observe: str | None = None,
    prompt_template: str = "{question}\n",
    **prompts: Any,
) -> PromptDataset:
    """Make a data set with one prompt per seed, which shows the environment's first observation.

    Args:
        tokenizer: torchtune's tokenizer.
        id: see `GymnasiumWorld`.
        num_rows: number of seeds.
        seed: the first seed.
        options: see `GymnasiumWorld`.
        observe: see `GymnasiumWorld`.
        prompt_template: text of the prompt; contains `{question}`, the observation, once.
        **prompts: chat_template, system_prompt, max_prompt_tokens, ...; see `prompt_dataset`.

    Raises:
        ValueError: the package is missing, or a setting is wrong; the message names the key.
    """
    for key, value, least in (("num_rows", num_rows, 1), ("seed", seed, 0)):
        if type(value) is not int or value < least:
            given = f"{shown(value)} given"
            fail(f"dataset.{key}", given, f"a whole number of at least {least}")
    world = GymnasiumWorld(id, options, observe)

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(seed, seed + num_rows):
            yield {"question": world.begin(number)[1], "answer": 0, _COLUMN: number}

    return prompt_dataset(
        tokenizer,
        source=f"gymnasium {id}",
        rows=rows(),
        prompt_template=prompt_template,
        **prompts,
    )


class GymnasiumWorld:
    """World in which each turn of the policy is an action in an environment of Gymnasium.

    The reply to a text that is no action is an error message, and the policy may try again. The
    reward of a conversation is the sum of the environment's rewards: see `EnvironmentReward`.

    Args:
        id: name under which the environment is registered; `module:name` imports the module first.
        options: arguments of the environment.
        observe: dotted path of a function that returns the text of an observation; None takes
            `str`.
        act: dotted path of a function `(text, action_space)` that returns the action. If it raises
            a ValueError, the policy reads the message. None takes the text itself for a Text space,
            and the last whole number in it for a Discrete space.
        reply_template: text around each `{observation}` after the first, such as the frame of a
            chat's next turn.

    Raises:
        ValueError: the package is missing, or an argument is wrong; the message names it.
    """

    def __init__(
        self,
        id: str,
        options: Mapping[str, Any] | None = None,
        observe: str | None = None,
        act: str | None = None,
        reply_template: str = "{observation}\n",
    ) -> None:
        gymnasium = imported_extra("gymnasium")
        settings: Any = OmegaConf.to_container(OmegaConf.create(dict(options or {})))
        self._make = partial(gymnasium.make, id, **settings)
        self._observe: Callable[[Any], str] = _function("observe", observe) or str
        if reply_template.count(_OBSERVATION) != 1:
            given = f"{reply_template!r} given"
            fail("reply_template", given, f"a text that contains {_OBSERVATION} once")
        self._reply_template = reply_template
        try:
            space = self._make().action_space
        except Exception as error:  # an environment of a user's may raise anything
            problem = f"{id}: {type(error).__name__}: {error}"
            fail("id", problem, "a registered environment with its options")
        act_of_text = _function("act", act)
        if act_of_text is None and not isinstance(
            space, gymnasium.spaces.Text | gymnasium.spaces.Discrete
        ):
            problem = f"{id} takes actions of {space}"
            fail("id", problem, "a Text or Discrete space, or a function at `act`")
        self._act: Callable[[str, Any], Any] = act_of_text or _default_action

    def begin(self, seed: int) -> tuple[Any, str]:
        """Make an environment, and return it with the text of its first observation."""
        env = self._make()
        observation, _ = env.reset(seed=seed)
        return env, self._text_of(observation)

    def __call__(self, prompt: Prompt, seed: int) -> Callable[[str], Reply]:
        """Begin a conversation; return the function that replies to each turn of the policy."""
        if _COLUMN not in prompt:
            raise ValueError("the prompt has no seed; allowed: rows of gymnasium_dataset")
        env, first = self.begin(prompt[_COLUMN])
        if first.strip() not in prompt["prompt_text"]:  # chat templates often trim a content
            raise ValueError(f"the prompt does not show the first observation {first!r:.100}")
        total = 0.0

        def respond(turn: str) -> Reply:
            nonlocal total
            try:
                action = self._act(turn, env.action_space)
            except ValueError as error:
                reply, done = f"error: {error}", False
            else:
                observation, reward, terminated, truncated, _ = env.step(action)
                reply, done = self._text_of(observation), bool(terminated or truncated)
                total += float(reward)
            if done:
                env.close()
            text = self._reply_template.replace(_OBSERVATION, quoted(reply))
            return Reply(text, done=done, answer=repr(total))

        return respond

    def _text_of(self, observation: Any) -> str:
        text = self._observe(observation)
        if not isinstance(text, str):
            raise TypeError(f"observe returned {text!r:.100}; allowed: a text")
        return text


def _function(key: str, path: str | None) -> Callable[..., Any] | None:
    if path is None:
        return None
    try:
        found = _get_component_from_path(path)
    except Exception as error:  # a user's module may raise anything
        problem = f"{path} cannot be imported, {type(error).__name__}: {error}"
        fail(key, problem, "the dotted path of a function")
    if not callable(found):
        fail(key, f"{path} cannot be called", "a function")
    return found


def _default_action(text: str, space: Any) -> Any:
    if isinstance(space, imported_extra("gymnasium").spaces.Discrete):
        numbers = re.findall(r"(?<![\d.])-?\d{1,9}(?!\d|\.\d)", text)
        action = int(numbers[-1]) if numbers else None
        allowed = f"a whole number from {space.start} to {space.start + space.n - 1}"
    else:
        action, allowed = text.strip(), "a text of the environment's characters"
    if action is None or not space.contains(action):
        given = "there is" if action is None else f"{action!r:.50} is"
        raise ValueError(f"{given} no action; allowed: {allowed}")
    return action
