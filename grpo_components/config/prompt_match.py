"""Refuses a config whose held-out prompts have another form than those that are trained on."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchtune.config._utils import _get_component_from_path

from grpo_components.errors import fail, shown

_FORMS_PROMPTS = re.compile(r"template|system|thinking|instruction|few_?shot|tools")
"""In names of a data set's arguments: those of ours (`prompt_template`, `chat_template`,
`system_prompt`), and those that data sets of users have for the same ends."""


@dataclass(frozen=True)
class _Form:
    """What forms the prompts of one data set."""

    values: Mapping[str, Any]
    """By argument, defaults included."""
    open: bool
    """Whether the data set takes arguments of any name."""


def check_same_prompts(v: Mapping[str, Any]) -> None:
    """Compare what forms the prompts of `dataset` and `eval_dataset`, defaults included.

    Of a mix to train on, each part's form is known to the policy. What only one of the two data
    sets can be given is not compared.

    Args:
        v: all values of a config; its components can be imported.

    Raises:
        ValueError: naming the first key of `eval_dataset` that differs, and that of `dataset`.
    """
    apart = v["eval_only"] or v["rollout_only"] or v["train_from"]  # one of the two goes unused
    if apart or v["eval"]["allow_other_prompts"]:
        return
    trained = list(_forms("dataset", v["dataset"]))
    for key, form in _forms("eval_dataset", v["eval_dataset"]):
        where, differing = min(
            ((other, _differing(form, known)) for other, known in trained),
            key=lambda found: len(found[1]),
        )
        if differing:
            name, found, expected = differing[0]
            problem = f"{shown(found)}, and {where}.{name} is {shown(expected)}: held-out prompts "
            problem += "would have another form"
            allowed = f"${{{where}.{name}}}, or eval.allow_other_prompts: true"
            fail(f"{key}.{name}", problem, allowed)


def _forms(key: str, node: Mapping[str, Any]) -> Iterator[tuple[str, _Form]]:
    """What forms the prompts of a data set, or of each part of a mix, by its key."""
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
    """Name and both values of what differs; an open data set has null where it is given nothing."""
    pairs = [
        (name, form.values.get(name), known.values.get(name))
        for name in {**known.values, **form.values}
        if (name in form.values or form.open) and (name in known.values or known.open)
    ]
    return [(name, found, expected) for name, found, expected in pairs if found != expected]
