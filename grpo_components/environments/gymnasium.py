"""Gymnasium's environments as worlds: observations become texts, and texts become actions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from omegaconf import OmegaConf
from torchtune.config._utils import _get_component_from_path

from grpo_components.data.datasets import PromptDataset, prompt_dataset
from grpo_components.environments.extras import imported_extra
from grpo_components.environments.rewards import reward_as_answer
from grpo_components.errors import fail, shown
from grpo_components.rollout.multi_turn import Reply
from grpo_components.rollout.observation_text import quoted
from grpo_components.rollout.samples import Prompt

_COLUMN = "gymnasium_seed"
_OBSERVATION = "{observation}"


def gymnasium_dataset(
    tokenizer: Any,
    *,
    id: str,
    num_rows: int = 500,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    observe: str | None = None,
    prompt_template: str = "{question}\n",
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
    max_prompt_tokens: int | None = None,
    too_long: str = "error",
) -> PromptDataset:
    """Make a prompt from the first observation of each of an environment's seeds.

    Args:
        tokenizer: torchtune's tokenizer.
        id: see `GymnasiumWorld`.
        num_rows: number of seeds.
        seed: the first seed.
        options: see `GymnasiumWorld`.
        observe: see `GymnasiumWorld`.
        prompt_template: text of the prompt; contains `{question}`, the observation, once.
        chat_template: see `prompt_dataset`.
        chat_template_kwargs: see `prompt_dataset`.
        system_prompt: see `prompt_dataset`.
        max_prompt_tokens: see `prompt_dataset`.
        too_long: see `prompt_dataset`.

    Raises:
        ValueError: the package is missing, or a setting is wrong; names its key.
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
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        system_prompt=system_prompt,
        max_prompt_tokens=max_prompt_tokens,
        too_long=too_long,
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
        act: dotted path of a function of a text and the action space, which returns the action, or
            raises a ValueError, whose message the policy reads. None takes the text itself for a
            Text space, and its last whole number for a Discrete one.
        reply_template: text around each `{observation}` after the first, such as the frame of a
            chat's next turn.

    Raises:
        ValueError: the package is missing, or an argument is wrong; names its key.
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
            allowed = f"a text that contains {_OBSERVATION} once"
            raise ValueError(f"reply_template: {reply_template!r} given; allowed: {allowed}")
        self._reply_template = reply_template
        try:
            space = self._make().action_space
        except Exception as error:  # an environment of a user's may raise anything
            problem = f"{id}: {type(error).__name__}: {error}"
            allowed = "a registered environment with its options"
            raise ValueError(f"id: {problem}; allowed: {allowed}") from error
        act_of_text = _function("act", act)
        if act_of_text is None and not isinstance(
            space, gymnasium.spaces.Text | gymnasium.spaces.Discrete
        ):
            allowed = "a Text or Discrete space, or a function at `act`"
            raise ValueError(f"id: {id} takes actions of {space}; allowed: {allowed}")
        self._act: Callable[[str, Any], Any] = act_of_text or _default_action

    def begin(self, seed: int) -> tuple[Any, str]:
        """Make an environment, and return it with the text of its first observation.

        Args:
            seed: its seed.
        """
        env = self._make()
        observation, _ = env.reset(seed=seed)
        return env, self._text_of(observation)

    def __call__(self, prompt: Prompt, seed: int) -> Callable[[str], Reply]:
        """Begin a conversation."""
        if _COLUMN not in prompt:
            raise ValueError("the prompt has no seed; allowed: rows of gymnasium_dataset")
        env, text = self.begin(prompt[_COLUMN])
        if text not in prompt["prompt_text"]:
            raise ValueError(f"the prompt does not show the first observation {text!r:.100}")
        return _Episode(env, self._act, self._text_of, self._reply_template)

    def _text_of(self, observation: Any) -> str:
        text = self._observe(observation)
        if not isinstance(text, str):
            raise TypeError(f"observe returned {text!r:.100}; allowed: a text")
        return text


class _Episode:
    """One conversation: steps an environment with the texts of the policy."""

    def __init__(
        self,
        env: Any,
        act: Callable[[str, Any], Any],
        text_of: Callable[[Any], str],
        reply_template: str,
    ) -> None:
        self._env, self._act, self._text_of = env, act, text_of
        self._reply_template, self._total = reply_template, 0.0

    def __call__(self, text: str) -> Reply:
        """Take a turn of the policy as an action."""
        try:
            action = self._act(text, self._env.action_space)
        except ValueError as error:
            return self._reply(f"error: {error}", done=False)
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self._total += float(reward)
        done = bool(terminated or truncated)
        if done:
            self._env.close()
        return self._reply(self._text_of(observation), done)

    def _reply(self, observation: str, done: bool) -> Reply:
        text = self._reply_template.replace(_OBSERVATION, quoted(observation))
        return Reply(text, done=done, answer=reward_as_answer(self._total))


def _function(key: str, path: str | None) -> Callable[..., Any] | None:
    if path is None:
        return None
    try:
        found = _get_component_from_path(path)
    except Exception as error:  # a user's module may raise anything
        problem = f"{path} cannot be imported, {type(error).__name__}: {error}"
        raise ValueError(f"{key}: {problem}; allowed: the dotted path of a function") from error
    if not callable(found):
        raise ValueError(f"{key}: {path} cannot be called; allowed: a function")
    return found


def _discrete() -> Any:
    return imported_extra("gymnasium").spaces.Discrete


def _default_action(text: str, space: Any) -> Any:
    if not isinstance(space, _discrete()):
        return _checked(text.strip(), space, "allowed: a text of the environment's characters")
    first, last = int(space.start), int(space.start + space.n - 1)
    allowed = f"allowed: a whole number from {first} to {last}"
    numbers: Sequence[str] = re.findall(r"(?<![\d.])-?\d{1,9}(?![\d.])", text)
    if not numbers:
        raise ValueError(f"there is no action; {allowed}")
    return _checked(int(numbers[-1]), space, allowed)


def _checked(action: Any, space: Any, allowed: str) -> Any:
    if not space.contains(action):
        raise ValueError(f"{action!r:.50} is no action; {allowed}")
    return action
