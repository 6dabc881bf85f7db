"""Refuses a config whose held-out prompts are formatted differently from its training prompts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchtune.config._utils import _get_component_from_path

from grpo_components.errors import fail, shown
from grpo_components.settings import Settings

_FORMS_PROMPTS = re.compile(r"template|system|thinking|instruction|few_?shot|tools")
"""Matches names of arguments that shape prompts: those of our data sets (`prompt_template`,
`chat_template`, `system_prompt`), and common ones of users' data sets."""


@dataclass(frozen=True)
class _Form:
    """Arguments of a data set that decide how its prompts are formatted."""

    values: Mapping[str, Any]
    """Values by argument name, defaults included."""
    open: bool
    """Whether the data set takes arguments of any name."""


def check_same_prompts(settings: Settings) -> None:
    """Refuse an `eval_dataset` that formats prompts differently from `dataset`.

    The arguments that shape prompts are compared, defaults included. If `dataset` is a mix, equal
    arguments in one of its parts are enough. Arguments that only one of the two data sets takes are
    not compared.
    """
    if settings.eval_dataset is None or settings.eval_only or not settings.evaluates:
        return
    if settings.eval.allow_other_prompts:
        return
    trained = list(_forms("dataset", settings.dataset))
    for key, form in _forms("eval_dataset", settings.eval_dataset):
        where, differing = min(
            ((other, _differing(form, known)) for other, known in trained),
            key=lambda found: len(found[1]),
        )
        if differing:
            name, found, expected = differing[0]
            problem = f"{shown(found)}, and {where}.{name} is {shown(expected)}: held-out prompts "
            problem += "would look different"
            allowed = f"${{{where}.{name}}}, or eval.allow_other_prompts: true"
            fail(f"{key}.{name}", problem, allowed)


def _forms(key: str, node: Mapping[str, Any]) -> Iterator[tuple[str, _Form]]:
    """Yield the key and form of a data set, or of each part of a mix."""
    parts = node.get("parts")
    if isinstance(parts, Mapping) and all(
        isinstance(part, Mapping) and "_component_" in part for part in parts.values()
    ):
        for name, part in parts.items():
            yield f"{key}.parts.{name}", _form(part)
        return
    yield key, _form(node)


def _form(node: Mapping[str, Any]) -> _Form:
    parameters = inspect.signature(_get_component_from_path(node["_component_"])).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    values = {
        name: value
        for name, value in {**defaults, **node}.items()
        if _FORMS_PROMPTS.search(name) and value is not inspect.Parameter.empty
    }
    return _Form(values, any(p.kind == p.VAR_KEYWORD for p in parameters.values()))


def _differing(form: _Form, known: _Form) -> list[tuple[str, Any, Any]]:
    """Return name and both values of each difference; a value that is not given counts as null."""
    pairs = [
        (name, form.values.get(name), known.values.get(name))
        for name in {**known.values, **form.values}
        if (name in form.values or form.open) and (name in known.values or known.open)
    ]
    return [(name, found, expected) for name, found, expected in pairs if found != expected]
