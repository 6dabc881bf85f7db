"""Imports the components of a config, checks their arguments, and builds them."""

from __future__ import annotations

import contextlib
import inspect
import netrc
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlparse

from omegaconf import DictConfig, OmegaConf

from grpo_components.config.reading import nearest
from grpo_components.data.columns import CALL
from grpo_components.errors import ConfigError, fail
from grpo_components.rollout.generator_options import EnvironmentKind
from grpo_components.settings import PENALTIES, Settings

# Named, not imported: it needs torchrl, whose import takes seconds. A test checks that it exists.
SHIPPED_ENVIRONMENT = {"_component_": "grpo_components.rollout.environments.SingleTurnEnvironment"}

RAISES = (Exception, SystemExit)
"""What a component, which a user may have written, may raise."""
_A_PATH = "a dotted path, installed or in the current folder"
_KEY_FIRST = re.compile(r"([a-z_]\w*(?:\.[^\s:,]+)*(?:, [a-z_]\w*)*): |(dataset|ptx) ")
"""Matches the key, or the argument names, at the start of an error's text."""
# Arguments that the recipe adds to those of the config: number of leading ones, names of others.
_ADDED: dict[str, tuple[int, tuple[str, ...]]] = {
    "dataset": (1, ()),
    "eval_dataset": (1, ()),
    "environment": (0, ("num_slots", "decode", "encode", "score", "max_response_tokens")),
    "optimizer": (1, ()),
    "ptx": (1, ()),
    "lr_scheduler": (1, ("num_training_steps",)),
}
_OF_REWARDS = ("weight", "is_success")
"""Keys of a reward's section that the recipe reads; the component does not get them."""
_SCORED_ELSEWHERE = ("completions", "prompts", "completion", "solution_str")
"""Arguments of the reward functions of TRL and verl. A config that names such a function itself,
not a function or class that makes one, gets an error that says so."""
_READ = ("grpo_components", "torch", "torchao", "torchtune")
"""Packages whose files are searched for a component before any import."""
_SLOW = ("torchtune.", "grpo_components.data.")
"""Prefixes of components that import torchtune, which takes seconds: these are checked last."""

# ---- building -----------------------------------------------------------------------------------


def build(key: str, node: DictConfig, *args: Any, **kwargs: Any) -> Any:
    """Instantiate a component of the config; raise a `ConfigError` with its key if that fails."""
    from torchtune import config  # takes seconds

    try:
        return config.instantiate(node, *args, **kwargs)
    except ValueError as error:
        raise refused_by(key, node, error) from error
    except (Exception, SystemExit, GeneratorExit) as error:  # a component may raise anything
        problem = f"{node._component_} cannot be built: {type(error).__name__}: {error}"
        raise ConfigError(key, problem, "") from error


def refused_by(key: str, node: Mapping[Any, Any], error: ValueError) -> ConfigError:
    """Turn a component's error about an argument into a ConfigError about the argument's key."""
    if isinstance(error, ConfigError):
        where, problem, allowed = error.key, error.problem, error.allowed
    else:
        text, _, allowed = str(error).partition("; allowed: ")
        named = _KEY_FIRST.match(text)
        where = "" if named is None else named[1] or named[2]
        problem = text if named is None else text[named.end() :]
    if key == "eval_dataset":  # one function builds both data sets
        where, allowed = (re.sub(r"^dataset\b", key, text) for text in (where, allowed))
    if re.split("[,.]", where)[0] in node:
        where = f"{key}.{where}"
    elif where != key and not where.startswith(f"{key}."):
        where, problem = key, f"{where}: {problem}" if where else problem
    return ConfigError(where, problem, allowed)


def build_environment(node: DictConfig, **offered: Any) -> Any:
    """Build the environment, with those of the `offered` arguments that its signature accepts."""
    from torchtune import config

    parameters = parameters_of(resolved(node._component_))
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    names = offered if takes_any else {parameter.name for parameter in parameters}
    parts = {key: config.instantiate(node[key]) for key in nested_components(node)}
    return config.instantiate(node, **{k: v for k, v in offered.items() if k in names}, **parts)


def nested_components(node: Mapping[str, Any]) -> list[str]:
    """Return the names of a component's arguments that are components themselves."""
    return [key for key in node if OmegaConf.is_dict(node[key]) and "_component_" in node[key]]


def environment_kind(node: DictConfig) -> EnvironmentKind:
    """Return the kind of a config's environment, which decides how responses are made."""
    if node == SHIPPED_ENVIRONMENT:
        return "single_turn"
    return getattr(resolved(node._component_), "environment_kind", "torchrl")


# ---- dotted paths and arguments -----------------------------------------------------------------


def _nodes(settings: Settings) -> dict[str, DictConfig]:
    """Return the config sections that name a component, by key (`rewards.format`)."""
    nodes = {key: getattr(settings, key) for key in type(settings).model_fields if key != "user"}
    nodes = {key: n for key, n in nodes.items() if OmegaConf.is_dict(n) and "_component_" in n}
    return nodes | {f"rewards.{name}": node for name, node in settings.rewards.items()}


def refuse_missing(settings: Settings) -> None:
    """Refuse components that no source file defines, without imports, which take seconds.

    Searches this package, torch, torchao, torchtune and the current folder.
    """
    for key, node in _nodes(settings).items():
        top, *rest = str(node._component_).split(".")
        own, spec = Path(f"{top}.py"), find_spec(top) if top in _READ else None
        if spec is not None and spec.submodule_search_locations:
            place = Path(spec.submodule_search_locations[0])
        elif own.is_file():
            place = own
        elif find_spec(top) is None:
            place, rest = Path(), [top, *rest]
        else:
            continue
        _refuse_missing(f"{key}._component_", place, rest)


def _refuse_missing(key: str, place: Path, parts: Sequence[str]) -> None:
    names = [place.stem] if place.name else []
    for depth, part in enumerate(parts):
        if not ((place / part).is_dir() or any(place.glob(f"{part}.*"))):
            source = place / "__init__.py" if place.is_dir() else place
            text = source.read_text(encoding="utf-8") if source.is_file() else ""
            words = re.findall(r"\w+", text)
            if part in words or "import *" in text or "__getattr__" in words:
                return
            files = (path.stem for path in place.glob("*"))
            near = get_close_matches(part, [*words, *files], n=1, cutoff=0.75)
            hint = f"did you mean {'.'.join((*names, *near, *parts[depth + 1 :]))}?"
            problem = f"{'.'.join((*names, *parts[depth:]))} cannot be imported, "
            lacking = f"ModuleNotFoundError: No module named {'.'.join((*names, part))!r}"
            problem += f"{place.name} has no {part}" if place.is_file() else lacking
            fail(key, problem, hint if near else _A_PATH)
        place = place / part if (place / part).is_dir() else place / f"{part}.py"
        names.append(part)


def check_components(settings: Settings) -> None:
    """Import every component, and check its arguments against its signature."""
    if os.getcwd() not in sys.path:
        # At the end, as in torchtune: a user's datasets.py must not hide the package of that name.
        sys.path.append(os.getcwd())
    nodes = _nodes(settings)
    # What imports torchtune comes last, as that takes seconds: mistakes elsewhere are found before.
    for key in sorted(nodes, key=lambda key: nodes[key]._component_.startswith(_SLOW)):
        if (node := nodes[key]) == SHIPPED_ENVIRONMENT:
            continue
        ours = _OF_REWARDS if key.startswith("rewards.") else PENALTIES if key == "loss" else ()
        own = {name: node[name] for name in node if name not in ours}
        _check_arguments(key, own, *_ADDED.get(key, (0, ())))
    for name in nested_components(settings.environment):
        part = settings.environment[name]
        _check_arguments(f"environment.{name}", part)
        if part["_component_"].startswith("grpo_components."):
            build(f"environment.{name}", part)
    _check_login(settings.metric_logger)
    for name, node in settings.rewards.items():
        _check_reward(f"rewards.{name}", node, settings)


def resolved(path: str) -> Any:
    """Import the module, or the attribute of a module, that a dotted path names."""
    name, *rest = path.split(".")
    found: Any = import_module(name)
    for part in rest:
        name += f".{part}"
        is_module = isinstance(found, ModuleType) and not hasattr(found, part)
        found = import_module(name) if is_module else getattr(found, part)
    return found


def imported_component(key: str, path: str) -> Any:
    """Import the class or function that a dotted path names; refuse a path that names none."""
    try:
        component = resolved(path)
    except RAISES as cause:
        problem = f"{path} cannot be imported, {type(cause).__name__}: {cause}"
        if not (isinstance(cause, ModuleNotFoundError) and path.startswith(f"{cause.name}")):
            place = traceback.extract_tb(cause.__traceback__)[-1]
            problem += f" ({place.filename}:{place.lineno})"
        fail(key, problem, _A_PATH)
    if not callable(component):
        fail(key, f"{path} cannot be called", "a class or function")
    return component


def parameters_of(component: Any) -> list[inspect.Parameter]:
    """Return the parameters of a class or function, even if a metaclass hides them (`EnvBase`)."""
    own_call = isinstance(component, type) and type(component).__call__ is not type.__call__
    if own_call and component.__init__ is not object.__init__:
        return list(inspect.signature(component.__init__).parameters.values())[1:]
    try:
        return list(inspect.signature(component).parameters.values())
    except ValueError:  # some builtins have no signature; building checks their arguments
        return [inspect.Parameter("anything", inspect.Parameter.VAR_KEYWORD)]


def _check_arguments(
    key: str, node: Mapping[Any, Any], leading: int = 0, by_name: Sequence[str] = ()
) -> None:
    """Refuse arguments that do not fit the component's signature."""
    path, is_reward = node["_component_"], key.startswith("rewards.")
    component = imported_component(f"{key}._component_", path)
    parameters = parameters_of(component)[leading:]
    if key == "loss" and (terms := [p.name for p in parameters if p.name in PENALTIES]):
        problem = f"an argument of {path}, and the recipe adds this term to every loss"
        fail(f"loss.{terms[0]}", problem, "a loss without this argument")
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
    for name in (name for name in node if name != "_component_"):
        if name in by_name:
            fail(f"{key}.{name}", "given, and the recipe sets it", "without it")
        if name not in named and not takes_any:
            known = [*named, *(_OF_REWARDS if is_reward else PENALTIES if key == "loss" else ())]
            problem = f"unknown argument of {path}"
            fail(f"{key}.{name}", problem, nearest(str(name), known, f"{key}."))
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in node and name not in by_name:
            if is_reward and name in (*CALL, *_SCORED_ELSEWHERE):
                allowed = f"a class whose objects take {', '.join(CALL)} by name, or a function "
                allowed += "that makes one"
                fail(f"{key}._component_", f"{path} itself takes {name}", allowed)
            fail(f"{key}.{name}", "missing", f"the argument of {path}")


def _check_reward(key: str, node: DictConfig, settings: Settings) -> None:
    """Check a reward of this package by building it, which is quick."""
    path = node["_component_"]
    if not (path.startswith("grpo_components.") and inspect.isclass(resolved(path))):
        return
    arguments = {str(name): node[name] for name in node if name not in _OF_REWARDS}
    made, limit_s = build(key, OmegaConf.create(arguments)), settings.timeouts.reward_s
    if getattr(made, "wall_s", 0) >= limit_s:  # else slow programs would make failed samples
        problem = f"{made.wall_s:g} given with timeouts.reward_s: {limit_s:g}"
        fail(f"{key}.wall_s", problem, "a number below timeouts.reward_s")


def _check_login(node: DictConfig) -> None:
    """Refuse Weights & Biases without a login early: its logger is built later."""
    mode = node.get("mode") or os.environ.get("WANDB_MODE", "online")
    if not node["_component_"].endswith(".WandBLogger") or mode in ("offline", "disabled"):
        return
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    known = os.environ.get("WANDB_API_KEY")
    with contextlib.suppress(FileNotFoundError):
        known = known or netrc.netrc().authenticators(host)
    if not (known or sys.stdin.isatty()):
        allowed = "`wandb login` first, or WANDB_API_KEY, or WANDB_MODE=offline in the environment"
        fail("metric_logger", "Weights & Biases has no login here", allowed)
