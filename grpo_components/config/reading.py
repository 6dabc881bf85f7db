"""Reads a config into `Settings`; the first wrong value becomes a one-line error."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, NoReturn, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from grpo_components._plugin import config_files, recipes_folder
from grpo_components.errors import ConfigError, fail, shown
from grpo_components.settings import Settings

_ELSEWHERE = {
    "group_size": "num_generations grpo_samples G n",
    "groups_per_step": "batch_size train_batch_size per_device_train_batch_size",
    "tokens_per_micro_batch": "micro_batch_size forward_batch_size ppo_micro_batch_size_per_gpu",
    "ppo_epochs": "num_iterations num_ppo_epochs",
    "num_steps": "max_steps epochs num_train_epochs total_epochs max_steps_per_epoch",
    "generator.max_response_tokens": "max_completion_length max_generated_tokens max_tokens",
    "dataset.max_prompt_tokens": "max_prompt_length",
    "dataset.source": "path data_files train_files dataset_name",
    "loss.kl_coeff": "beta kl_coeff kl_coef kl_loss_coef kl_loss_coeff",
    "loss.clip_low": "epsilon eps_clip clip_ratio clip_ratio_low cliprange",
    "loss.clip_high": "epsilon_high clip_ratio_high",
    "optimizer.lr": "learning_rate lr",
    "clip_grad_norm": "max_grad_norm grad_clip",
    "rewards": "reward_funcs reward_functions",
}
"""Our keys, each with the names that TRL, torchtune, verl and others have for it."""
_OURS = {name: key for key, names in _ELSEWHERE.items() for name in names.split()}


def read_config_file(name: str, overrides: Sequence[str]) -> DictConfig:
    """Read a config by its name in `tune ls` or its path, with overrides as for `tune run`."""
    shipped = config_files(recipes_folder() / "configs")
    allowed = f"a YAML file, or {', '.join(shipped)}"
    try:
        given: Any = OmegaConf.to_container(OmegaConf.load(shipped.get(name, name)))
    except FileNotFoundError:
        near = get_close_matches(name, shipped, n=1, cutoff=0.75)
        fail("--config", f"no config {name}", f"did you mean {near[0]}?" if near else allowed)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        why = f"line {mark.line + 1}: {getattr(error, 'problem', error)}" if mark else error
        fail("--config", f"{name} cannot be read: {why}", allowed)
    if not isinstance(given, dict):
        fail("--config", f"{name} has no keys", allowed)
    return merge_overrides(given, overrides)


def merge_overrides(given: dict[str, Any], overrides: Sequence[str]) -> DictConfig:
    """Merge a config with overrides as torchtune does, but also accept `=` in a value.

    `loss=<path>` sets `loss._component_`, even if the config's `loss` has no component.
    """
    merged: list[Any] = [given]
    for override in overrides:
        key, separator, value = override.partition("=")
        if key.startswith("~"):
            try:
                _remove(given, *key[1:].split("."))
            except (KeyError, ValueError, TypeError):
                fail(key, "cannot be removed", f"a key of the config; a component: {key[1:]}=null")
            continue
        if not (key and separator):
            fail("overrides", f"{override} given", "key=value")
        rewards = given.get("rewards") or {}
        if value == "null" and key.startswith("rewards.") and key.split(".")[1] not in rewards:
            fail(key, "null given, and the config has no such reward", ", ".join(rewards))
        section, name = f"{key}.".split(".")[:2]
        known = given.get("user") if section == "user" else None
        names = map(str, known if isinstance(known, Mapping) else ())
        near = get_close_matches(name, names, cutoff=0.75)  # the name itself comes first
        if near and near[0] != name:
            fail(key, "unknown key", f"did you mean user.{near[0]}? A new one stands in the config")
        node = given.get(key)
        has_component = isinstance(node, Mapping) and "_component_" in node
        if has_component or (key == "loss" and not value.startswith("{")):
            key += "._component_"
        if "max_filename" in key:
            value = f"!!str {value}"  # else 00003 would be a number
        try:
            merged.append(OmegaConf.from_dotlist([f"{key}={'null' if value == 'None' else value}"]))
            OmegaConf.merge(given, merged[-1])
        except YAMLError as error:
            problem = f"{shown(value)} given: {getattr(error, 'problem', error)}"
            fail(key, problem, "YAML, with a text of several signs in quotes")
        except (TypeError, OmegaConfBaseException):
            problem = f"{shown(value)} given, which does not go with the config's value"
            fail(key, problem, "a section in place of a section, a list in place of a list")
    return cast(DictConfig, OmegaConf.merge(*merged))


def _remove(section: dict[str, Any], name: str, *rest: str) -> None:
    """Remove a key and sections that become empty; like torchtune, refuse to remove a component."""
    if rest:
        _remove(section[name], *rest)
    if not (rest and section[name]):
        if isinstance(section[name], Mapping) and "_component_" in section[name]:
            raise ValueError(name)
        del section[name]


def read_settings(given: Mapping[str, Any] | DictConfig) -> Settings:
    """Make `Settings` of a config: check values, fill in defaults, `${key}` and a leading `~`.

    A null reward is left out, so that `rewards.format=null` on a command line removes it.
    """
    values: Any = given
    try:
        if isinstance(given, DictConfig):
            values = OmegaConf.to_container(given, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        allowed = "a value of its own, or ${key} of a key that the config has"
        fail(error.full_key or "config", str(error).splitlines()[0], allowed)
    rewards = values.get("rewards")
    if isinstance(rewards, Mapping):
        left = {name: node for name, node in rewards.items() if node is not None}
        values = {**values, "rewards": left}
    try:
        return Settings.model_validate(_expanded(values))
    except ValidationError as error:
        errors = error.errors(include_url=False)
        unknown = (each for each in errors if each["type"] == "extra_forbidden")
        _refuse(values, next(unknown, errors[0]))


def _expanded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _expanded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_expanded(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) else value


def _refuse(given: Mapping[str, Any], error: Mapping[str, Any]) -> NoReturn:
    """Raise a one-line ConfigError for a pydantic error, from `ValidationError.errors()`."""
    # Members of a union are in the location too, as `<name>`, and so is the number of a list item.
    names = [name for name in error["loc"] if isinstance(name, str) and name[0] not in "<["]
    key = ".".join(names)
    if isinstance(own := error.get("ctx", {}).get("error"), ConfigError):  # a validator of ours
        key = ".".join(filter(None, (key, own.key.lstrip("."))))
        raise ConfigError(key, own.problem, own.allowed)
    if error["type"] == "extra_forbidden":
        *section, name = names
        prefix = "".join(f"{each}." for each in section)
        hint = nearest(name, _keys_of(section), prefix)
        if section == ["loss"]:  # a loss of the recipe's own
            hint += f" (for a loss of your own: user.{name}, passed by `partial`)"
        fail(key, "unknown key", hint)
    if error["type"] == "missing":
        fail(key, "missing", "a value, such as `tune cat tiny_async_grpo` shows")
    value: Any = given
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else value
    allowed = error["msg"].partition("Input should be ")[2] or error["msg"]
    allowed = allowed.partition(" or instance of ")[0].replace("valid tuple", "valid list")
    allowed = allowed.replace("valid dictionary", "section")
    fail(key, f"{shown(value)} given", allowed)


def nearest(name: str, keys: Iterable[str], prefix: str) -> str:
    """Return a hint for an unknown key: the key that was probably meant, else the existing keys."""
    keys = list(dict.fromkeys(keys))
    ours = _OURS.get(name, "")
    leaf = ours.rpartition(".")[2]
    if ours and (not prefix or leaf in keys):
        return f"did you mean {prefix}{leaf}?" if prefix else f"did you mean {ours}?"
    if near := get_close_matches(name, keys, n=1, cutoff=0.75):
        return f"did you mean {prefix}{near[0]}?"
    anywhere = {leaf: f"{key}.{leaf}" for key in reversed(_keys_of([])) for leaf in _keys_of([key])}
    anywhere |= {key: key for key in _keys_of([])}
    anywhere = {leaf: key for leaf, key in anywhere.items() if key != f"{prefix}{name}"}
    if near := get_close_matches(name, anywhere, n=1, cutoff=0.8):
        return f"did you mean {anywhere[near[0]]}?"
    return ", ".join(keys) or "none" if prefix else "the keys that `tune cat tiny_async_grpo` shows"


@cache
def _json_schema() -> dict[str, Any]:
    return Settings.model_json_schema()


def _keys_of(section: Iterable[str]) -> list[str]:
    schemas = [_json_schema()]
    for name in section:
        inner = [schema.get("properties", {}).get(name, {}) for schema in schemas]
        schemas = [part for each in inner for part in _alternatives(each)]
    return [key for schema in schemas for key in schema.get("properties", ())]


def _alternatives(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the members of a union schema, else the schema itself; references are followed."""
    if "$ref" in schema:
        return _alternatives(_json_schema()["$defs"][schema["$ref"].rpartition("/")[2]])
    union = schema.get("anyOf") or schema.get("oneOf")
    return [part for each in union for part in _alternatives(each)] if union else [schema]
