"""torchrl's chat environments, with their transforms, as worlds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice, repeat
from typing import Any

import torch
from omegaconf import OmegaConf
from tensordict import TensorDict, TensorDictBase, is_tensor_collection, set_list_to_stack
from torchrl.data.llm import History
from torchrl.envs import Compose, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer, RayDataLoadingPrimer
from torchrl.modules.llm.policies.common import ChatHistory, Text
from torchtune import config
from transformers import AutoTokenizer

from grpo_components.agents.chat import Chat
from grpo_components.data.columns import plain_value
from grpo_components.data.datasets import PromptDataset, prompt_dataset
from grpo_components.data.rows import read_rows
from grpo_components.environments.rewards import reward_as_answer
from grpo_components.errors import fail, shown
from grpo_components.rollout.environments import Prompt
from grpo_components.rollout.multi_turn import Reply

_COLUMN = "chat_env"
_OF_A_STEP = ("history", "text", "next", "reward", "done", "terminated", "truncated")
_MARK = "7f3b"


def chat_env_dataset(
    tokenizer: Any,
    *,
    env: Mapping[str, Any],
    model_path: str,
    source: str | None = None,
    split: str = "train",
    prompt_template: str = "{question}",
    chat_template: str | None = None,
    system_prompt: None = None,
    num_rows: int | None = None,
    max_prompt_tokens: int | None = None,
    too_long: str = "error",
) -> PromptDataset:
    """Make the prompts that a chat environment of torchrl shows after its resets.

    Args:
        tokenizer: not used: `model_path` has the one of the chat template.
        env: see `ChatEnvWorld`.
        model_path: see `ChatEnvWorld`.
        source: a file with rows for its resets: `question` goes to its data key, all other columns
            under their names; None resets an environment that has a data set of its own.
        split: split of a Hugging Face data set at `source`.
        prompt_template: text of the user's message; contains the `{question}` of a row once.
        chat_template: see `ChatEnvWorld`.
        system_prompt: null: the environment has its own.
        num_rows: number of prompts; None takes all rows of `source`.
        max_prompt_tokens: see `prompt_dataset`.
        too_long: see `prompt_dataset`.

    Raises:
        ValueError: a setting is wrong; names its key.
    """
    if system_prompt is not None:
        fail("dataset.system_prompt", "given, and the environment has its own", "null")
    if not isinstance(prompt_template, str) or prompt_template.count("{question}") != 1:
        allowed = "a text that contains {question} once"
        fail("dataset.prompt_template", f"{shown(prompt_template)} given", allowed)
    shown_env = _ShownEnv(env, model_path, chat_template)
    if source is None and (not shown_env.has_data or num_rows is None):
        allowed = "a source; or an environment with a data set, and num_rows"
        fail("dataset.source", f"null given, with num_rows: {shown(num_rows)}", allowed)
    given = None if source is None else read_rows(source, None, split)
    return prompt_dataset(
        _OfModel(shown_env.chat),
        source=source or f"of {env['_component_']}",
        rows=shown_env.rows(given, num_rows, prompt_template),
        prompt_template="{question}",
        max_prompt_tokens=max_prompt_tokens,
        too_long=too_long,
    )


class ChatEnvWorld:
    """World in which a chat environment of torchrl replies, with all its transforms.

    The environment gets each turn as `History`, and as text. What it adds to the history is what
    the policy reads next. The reward of a conversation is the sum of its rewards: see
    `EnvironmentReward`.

    Args:
        env: `_component_` and arguments of a function that makes the environment: a `ChatEnv` of
            batch size 1 with `input_mode="history"`, alone or in `TransformedEnv`s, such as a
            `DatasetChatEnv`.
        model_path: folder of the model, whose tokenizer has the chat template.
        chat_template: None for that of the model; `plain` writes the contents of the messages one
            after the other; or the path of a file with a Jinja template.

    Raises:
        ValueError: an argument is wrong; names its key.
    """

    def __init__(
        self, env: Mapping[str, Any], model_path: str, chat_template: str | None = None
    ) -> None:
        self._env = _ShownEnv(env, model_path, chat_template)

    def __call__(self, prompt: Prompt, seed: int) -> Callable[[str], Reply]:
        """Begin a conversation; it ends the one before, because the environment has one state."""
        if _COLUMN not in prompt:
            raise ValueError("the prompt has no reset; allowed: rows of chat_env_dataset")
        self._env.env.set_seed(seed % 2**31)
        state, text = self._env.reset(prompt[_COLUMN])
        if text != prompt["prompt_text"]:
            problem = f"it shows {text!r:.100}, the data set {prompt['prompt_text']!r:.100}"
            allowed = "the same env, model_path and chat_template in both"
            raise ValueError(f"the environment: {problem}; allowed: {allowed}")
        self._env.latest = conversation = _Conversation(self._env, state, text)
        return conversation


class _OfModel:
    """Encodes prompts with the model's own tokenizer, as its chat template needs it."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        return self._chat.encode(text)


class _ShownEnv:
    """A chat environment whose histories are written with a chat template."""

    def __init__(self, node: Mapping[str, Any], model_path: str, chat_template: str | None) -> None:
        tokenizer = _tokenizer(model_path)
        self.chat = chat = Chat(tokenizer, chat_template, ())
        self.latest: _Conversation | None = None
        with set_list_to_stack(True):
            try:
                made = config.instantiate(OmegaConf.create(dict(node)))
            except Exception as error:  # a user's function may raise anything
                problem = f"{node.get('_component_')}: {type(error).__name__}: {error}"
                raise ValueError(f"env: {problem}; allowed: a function that makes one") from error
            base, transforms, self.has_data = _parts_of(made)
            is_chat, size = isinstance(base, ChatEnv), tuple(getattr(base, "batch_size", ()))
            if not is_chat or base.input_mode != "history" or size != (1,):
                mode = f", input_mode {base.input_mode}" if is_chat else ""
                kind = f"a {type(base).__name__} of batch size {list(size)}{mode} given"
                allowed = "a ChatEnv of batch size [1], input_mode history, and its transforms"
                raise ValueError(f"env: {kind}; allowed: {allowed}")
            self._inputs = _KeepsInputs()
            added: list[Any] = [self._inputs, *transforms]
            self.env = TransformedEnv(base, Compose(*added))
        self._whole = made
        self._data_key = base.data_key
        self._role = base.policy_role or "assistant"
        # The template begins what follows a turn with its stop token, which the policy samples.
        marked = [{"role": "user", "content": "?"}, {"role": self._role, "content": _MARK}]
        after = chat.render(marked, (), {"add_generation_prompt": False}).rpartition(_MARK)[2]
        stops = [token for token in tokenizer.get_added_vocab() if after.startswith(token)]
        self.turn_end = max(stops, key=len, default="")
        """Stop token of a turn as text; empty if the template has none."""

    def rows(self, given: Any, num_rows: int | None, template: str) -> Iterator[dict[str, Any]]:
        """Yield rows for `prompt_dataset`, one for each reset of the environment."""
        values_of_rows = islice(repeat(None) if given is None else given, num_rows)
        for number, values in enumerate(values_of_rows, start=1):
            if values is None:
                with set_list_to_stack(True):
                    inputs = _inputs_of(self._whole.reset())
            else:
                plain = plain_value(values)
                question = plain.pop("question", None)
                if not isinstance(question, str):
                    raise ValueError(f"dataset row {number}: has no text as its question")
                inputs = {self._data_key: template.replace("{question}", question), **plain}
            _, text = self.reset(inputs)
            # The world tells the reward in the answer's place; before, it is 0.
            yield {"question": text, "answer": 0, _COLUMN: inputs}

    def reset(self, inputs: Mapping[str, Any]) -> tuple[TensorDictBase, str]:
        """Reset the environment; return its state, and the prompt that it shows."""
        with set_list_to_stack(True):
            self._inputs.names = tuple(inputs)
            asked = TensorDict({name: [value] for name, value in inputs.items()}, batch_size=(1,))
            state = self.env.reset(asked)
            return state, self.text_of(state)

    def step(self, state: TensorDictBase, turn: str) -> TensorDictBase:
        """Step the environment with a turn of the policy; return its next state."""
        with set_list_to_stack(True):
            prompt = _history_of(state)
            response = History.from_chats([[{"role": self._role, "content": turn}]])
            full = prompt.extend(response, inplace=False, dim=-1)
            before = self.text_of(state)
            state = state.exclude(*_OF_A_STEP).to_lazystack(0)
            state["history"] = ChatHistory(
                prompt=prompt, response=response, full=full, batch_size=(1,)
            )
            state["text"] = Text(
                prompt=[before], response=[turn], full=[before + turn], batch_size=(1,)
            )
            return self.env.step(state)["next"]

    def text_of(self, state: TensorDictBase) -> str:
        """Return the prompt of the policy's next turn."""
        messages = [_message(each) for each in _history_of(state)[0].unbind(0)]
        return self.chat.render(messages, (), {})


class _Conversation:
    """One conversation with an environment."""

    def __init__(self, env: _ShownEnv, state: TensorDictBase, text: str) -> None:
        self._env, self._state, self._text, self._total = env, state, text, 0.0

    def __call__(self, turn: str) -> Reply:
        """Give the environment a turn of the policy."""
        assert self._env.latest is self, "another conversation has begun"
        end = self._env.turn_end
        turn = turn.removesuffix(end) if end else turn
        self._state = self._env.step(self._state, turn)
        reward = self._state.get("reward", None)
        if reward is not None:
            self._total += float(torch.as_tensor(reward).sum())
        answer = reward_as_answer(self._total)
        if bool(self._state["done"].any()):
            return Reply(done=True, answer=answer)
        known, self._text = self._text + turn, self._env.text_of(self._state)
        if not self._text.startswith(known):
            problem = "the environment, or its chat template, changed earlier turns"
            raise ValueError(f"{problem}: {self._text[-200:]!r} does not continue {known[-200:]!r}")
        return Reply(self._text[len(known) :].removeprefix(end), answer=answer)


class _KeepsInputs(Transform):
    """Carries what a reset was given from state to state, as the transform that draws rows does."""

    names: tuple[str, ...] = ()
    """Keys that the latest reset was given."""

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return tensordict_reset

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.update(tensordict.select(*self.names))


def _history_of(state: TensorDictBase) -> Any:
    """Return the history that the policy is shown in a state."""
    history: Any = state["history"]
    return history.prompt


def _parts_of(env: Any) -> tuple[Any, list[Transform], bool]:
    """Return the innermost environment, the transforms around it, and whether some draw rows.

    Those that draw rows are left out.
    """
    if not isinstance(env, TransformedEnv):
        return env, [], False
    base, inner, had_data = _parts_of(env.base_env)
    own = list(env.transform) if isinstance(env.transform, Compose) else [env.transform]
    others = [t for t in own if not isinstance(t, DataLoadingPrimer | RayDataLoadingPrimer)]
    clones = [transform.clone() for transform in others]
    return base, [*inner, *clones], had_data or len(others) < len(own)


def _inputs_of(state: TensorDictBase) -> dict[str, Any]:
    """Return what a data set put into the state of an environment, as plain values."""
    inputs = {}
    for name in state.keys():  # noqa: SIM118 -- of a TensorDict
        if name in _OF_A_STEP:
            continue
        value = state.get(name)
        if is_tensor_collection(value) and not hasattr(value, "tolist"):
            raise ValueError(f"dataset.env: its data set has {name} as a {type(value).__name__}")
        inputs[name] = plain_value(value.tolist()[0])
    return inputs


def _message(message: Any) -> dict[str, Any]:
    """Return one message of a history as chat templates expect it."""
    written = {"role": message.role, "content": message.content}
    calls = message.tool_calls
    return written if calls is None else {**written, "tool_calls": list(calls)}


def _tokenizer(model_path: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except Exception as error:  # broken tokenizer files may raise anything
        problem = f"cannot load a tokenizer from {model_path}: {type(error).__name__}: {error}"
        raise ValueError(f"model_path: {problem}; allowed: a model's folder") from error
