"""Checks that every `_component_` of a config can be imported and takes the given arguments."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf
from torchtune import config
from torchtune.config._utils import _get_component_from_path

from grpo_components.config.building import (
    SHIPPED_ENVIRONMENT,
    build,
    nested_components,
    parameters_of,
    refused_by,
)
from grpo_components.config.column_checks import call_of, columns_taken
from grpo_components.config.reading import nearest
from grpo_components.data.columns import CALL
from grpo_components.errors import fail, shown
from grpo_components.setting_types import PENALTIES
from grpo_components.settings import Settings

# Arguments that the recipe adds to a component's: number of leading ones, names of the others.
_ADDED: dict[str, tuple[int, tuple[str, ...]]] = {
    "dataset": (1, ()),
    "eval_dataset": (1, ()),
    "environment": (0, ("num_slots", "decode", "encode", "score", "max_response_tokens")),
    "optimizer": (1, ()),
    "ptx": (1, ()),
    "lr_scheduler": (1, ("num_training_steps",)),
}
_FORMS_PROMPTS = (
    "prompt_template",
    "chat_template",
    "chat_template_kwargs",
    "system_prompt",
    "tools",
)
"""Arguments of data sets that shape prompts."""
_OF_REWARDS = ("weight", "is_success")
"""Keys of a reward that the recipe reads, not the component."""


def check_components(settings: Settings) -> None:
    """Import every component, and check its arguments against its signature."""
    if os.getcwd() not in sys.path:
        # At the end, as in torchtune: a user's datasets.py must not hide the package of that name.
        sys.path.append(os.getcwd())
    for key in type(settings).model_fields:
        node = getattr(settings, key)
        is_node = isinstance(node, DictConfig) and "_component_" in node and key != "user"
        if is_node and node != SHIPPED_ENVIRONMENT:
            own = {name: node[name] for name in node if key != "loss" or name not in PENALTIES}
            _check_arguments(key, own, *_ADDED.get(key, (0, ())))
    for name in nested_components(settings.environment):
        part = settings.environment[name]
        _check_arguments(f"environment.{name}", part)
        if part["_component_"].startswith("grpo_components."):
            build(f"environment.{name}", part)
    if settings.environment["_component_"].endswith(".MultiTurnEnvironment"):
        _check_world(settings.environment)
    _check_same_prompts(settings)
    for name, node in settings.rewards.items():
        _check_reward(f"rewards.{name}", node, settings)


def _check_reward(key: str, node: DictConfig, settings: Settings) -> None:
    limit_s = settings.timeouts.reward_s
    arguments = {str(name): node[name] for name in node if name not in _OF_REWARDS}
    reward = _check_arguments(key, arguments)
    _check_call(key, reward, (*CALL, *columns_taken(reward)), by_name=True)
    if not (inspect.isclass(reward) and node["_component_"].startswith("grpo_components.")):
        return
    try:  # our rewards are built quickly, and check their arguments
        made = config.instantiate(OmegaConf.create(arguments))
    except ValueError as error:
        raise refused_by(key, arguments, error) from error
    if getattr(made, "wall_s", 0) >= limit_s:  # else slow programs would make failed samples
        problem = f"{made.wall_s:g} given with timeouts.reward_s: {limit_s:g}"
        fail(f"{key}.wall_s", problem, "a number below timeouts.reward_s")


def _check_same_prompts(settings: Settings) -> None:
    """Refuse held-out prompts that would look different from those of training; not in a mix."""
    if settings.eval_dataset is None or settings.eval_only or not settings.evaluates:
        return
    if settings.eval.allow_other_prompts:
        return
    forms: list[dict[str, Any]] = []
    for node in (settings.dataset, settings.eval_dataset):
        component = _get_component_from_path(node["_component_"])
        values = {p.name: node.get(p.name, p.default) for p in parameters_of(component)}
        forms.append({name: value for name, value in values.items() if name in _FORMS_PROMPTS})
    for name in forms[0].keys() & forms[1].keys():
        expected, found = (form[name] for form in forms)
        if found != expected:
            problem = f"{shown(found)}, and dataset.{name} is {shown(expected)}: held-out prompts "
            problem += "would look different"
            allowed = f"${{dataset.{name}}}, or eval.allow_other_prompts: true"
            fail(f"eval_dataset.{name}", problem, allowed)


def _check_world(environment: DictConfig) -> None:
    world = environment["world"]
    if "world" not in nested_components(environment):
        fail("environment.world", f"{shown(world)} given", "`_component_` and its arguments")
    component = _get_component_from_path(world["_component_"])
    _check_call("environment.world", component, ("prompt", "seed"), by_name=False)


def _check_call(key: str, component: Any, arguments: Sequence[str], *, by_name: bool) -> None:
    """Refuse a class whose objects cannot be called with these arguments."""
    if not inspect.isclass(component):
        return  # what a function returns is not known before it is called
    places, names = ((), dict.fromkeys(arguments)) if by_name else (arguments, {})
    try:
        inspect.signature(call_of(component)).bind(None, *places, **names)
    except TypeError as error:
        path = f"{component.__module__}.{component.__qualname__}"
        problem = f"objects of {path} cannot be called: {error}"
        fail(key, problem, f"a class called with {', '.join(arguments)}")


def imported_component(key: str, path: str) -> Any:
    """Import and return the class or function of a dotted path."""
    try:
        component = _get_component_from_path(path)
    except BaseException as error:  # a user's module may raise anything
        if isinstance(error, KeyboardInterrupt):
            raise
        cause = error.__cause__ or error
        if isinstance(cause, ModuleNotFoundError) and f"{path}.".startswith(f"{cause.name}."):
            _refuse_missing(key, path, str(cause.name))
        place = traceback.extract_tb(cause.__traceback__)[-1]
        problem = f"{path} cannot be imported, {type(cause).__name__}: {cause}"
        if not any(name in place.filename for name in ("torchtune", "importlib")):
            problem += f" ({place.filename}:{place.lineno})"
        fail(key, problem, "a dotted path, installed or in the current folder")
    if not callable(component):
        fail(key, f"{path} cannot be called", "a class or function")
    return component


def _refuse_missing(key: str, path: str, missing: str) -> NoReturn:
    """Refuse a dotted path whose module, or a name in its module, does not exist."""
    parent, _, name = missing.rpartition(".")
    module = sys.modules.get(parent)
    if module is not None and name == "py":
        rest = path.removeprefix(missing)
        fail(key, f"{path} has the suffix of a file", f"a dotted path: {parent}{rest}")
    if module is not None:
        known = [each for each, value in vars(module).items() if _is_of(module, value)]
        problem, form, cutoff = f"{parent} has no {name}", f"{parent}.{{}}", 0.6
    else:  # the first name is wrong
        known = [file.stem for file in Path().glob("*.py")]
        problem, form = f"there is no module {missing}", f"{{}}{path.removeprefix(missing)}"
        cutoff = 0.75
    problem = f"{path} cannot be imported: {problem}"
    if near := get_close_matches(name, known, n=1, cutoff=cutoff):
        fail(key, problem, f"did you mean {form.format(near[0])}?")
    names = "" if module is None else ", ".join(map(form.format, known))
    fail(key, problem, names or "a dotted path, installed or in the current folder")


def _is_of(module: ModuleType, value: Any) -> bool:
    """Whether a public class or function is defined in a module, not imported into it."""
    own = callable(value) and getattr(value, "__module__", None) == module.__name__
    return own and not getattr(value, "__name__", "_").startswith("_")


def _check_arguments(
    key: str, node: Mapping[Any, Any], leading: int = 0, by_name: Sequence[str] = ()
) -> Any:
    """Check a node's arguments against its component's signature, and return the component."""
    path, is_reward = node["_component_"], key.startswith("rewards.")
    component = imported_component(f"{key}._component_", path)
    parameters = parameters_of(component)[leading:]
    if key == "loss" and (terms := [p.name for p in parameters if p.name in PENALTIES]):
        problem = f"an argument of {path}, and the recipe adds this term to every loss"
        fail(f"loss.{terms[0]}", problem, "a loss without this argument")
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    given = [name for name in node if name != "_component_"]
    if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        for name in (name for name in given if name not in named):
            known = [*named, *(_OF_REWARDS if is_reward else PENALTIES if key == "loss" else ())]
            problem = f"unknown argument of {path}"
            fail(f"{key}.{name}", problem, nearest(str(name), known, f"{key}."))
    for name in given:
        if name in by_name:
            fail(f"{key}.{name}", "given, and the recipe sets it", "without it")
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in given and name not in by_name:
            if is_reward and name in CALL:
                allowed = "a class whose objects do, or a function that makes one"
                fail(f"{key}._component_", f"{path} itself takes a sample", allowed)
            fail(f"{key}.{name}", "missing", f"the argument of {path}")
    return component
