"""Defines fields and types of each line of receipts.jsonl; see docs/reproducibility.md."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from grpo_tools.books import OF_TOKENS


def _object(**types: Any) -> type[BaseModel]:
    """Return the type of a JSON object that has exactly these fields."""
    return create_model("object", __config__=ConfigDict(extra="forbid", strict=True), **types)


_Whole: Any = Annotated[int, Field(ge=0)]
_Number: Any = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Range = Annotated[list[_Whole], Field(min_length=2, max_length=2)]
# Numbers as keys have one spelling, so that two keys are never the same number.
_Key = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,15})$")]
_Cause = Annotated[str, Field(pattern=f"^({'|'.join(OF_TOKENS)})$")]
_Groups = Annotated[list[_Whole], Field(min_length=1)]

_PROMPT = {"prompt": _Whole, "epoch": _Whole}
_RULE = _object(low=_Number, high=_Number, floor=_Number, decay=_Number)
_START = {
    "format": _Whole,
    "steps_done": _Whole,
    "policy_version": _Whole,
    "num_steps": _Whole,
    "max_staleness": _Whole,
    "groups_per_step": _Whole,
    "group_size": _Whole,
    "run": (str | None, None),  # the next ones are missing in receipts of tests
    "incarnation": (str | None, None),
    "seed": (_Whole | None, None),  # only with a curriculum, as the next two
    "curriculum": (_RULE | None, None),
    "prompts": (list[_object(weight=_Number, rows=list[_Range])] | None, None),
    "replay_generation": (_object(share=_Number, max_uses=_Whole) | None, None),
    "cpus": (_Whole | None, None),
    "libraries": (dict[str, str] | None, None),
    "replayed": (str | None, None),
    "carried": dict[_Key, _Whole],
}
_WORTH = _object(spread=_Number, oldest_version=_Whole)
_SESSIONS = _object(**dict.fromkeys(("count", "calls", "trajectories"), _Whole))
_LIVING = _object(group=_Whole, **_PROMPT, state=str, tokens=_Whole | None)
_FIELDS: dict[str, dict[str, Any]] = {
    "start": _START,
    "issue": {
        "role": str,
        "group": _Whole,
        **_PROMPT,
        "target_step": _Whole,
        "needed_version": int,  # below 0: any version may generate the group
    },
    "interrupt": {"group": _Whole},
    "finish": {
        "group": _Whole,
        "response_tokens": Annotated[list[_Whole], Field(min_length=1)],
        "prompt": (_Whole | None, None),  # only with a curriculum, as the next two
        "successes": (_Whole | None, None),
        "scored": (_Whole | None, None),
    },
    "buffer": {"group": _Whole},
    "drop": {"groups": _Groups, "reason": str, "reissue": bool, "tokens": list[_Whole | None]},
    "sample": {
        "step": _Whole,
        "groups": list[_Whole],
        "worths": (list[_WORTH] | None, None),  # only if steps reuse groups, as the next one
        "reused": (list[_object(group=_Whole, use=_Whole)] | None, None),
    },
    "step": {
        "step": _Whole,
        "trained_from": _Whole,
        "policy_version": _Whole,
        "token_versions": dict[_Key, _Whole],
        "correction_mass": _Number | None,
        "batch_hash": str,
        "tokens": dict[_Key, dict[_Cause, _Whole]],
        "sessions": (_SESSIONS | None, None),
    },
    "push": {"version": _Whole},
    "publish": {"version": _Whole},
    "pull": {"role": str, "cause": str},
    "load": {"role": str, "version": _Whole, "checksum": str, "published": str},
    "sleep": {"step": _Whole},
    "abort": {"role": str, "responses": _Whole},
    "evaluate": {"role": str, "step": _Whole},
    "restart": {"role": str, "what": str, "given_up": (bool, False)},
    "rollback": {"role": str, "what": str},
    "end": {
        "finished": bool,
        "step": _Whole,
        "policy_version": _Whole,
        "living": list[_LIVING],
        "waiting": list[_object(**_PROMPT)],
    },
}
_EVENTS = {
    name: TypeAdapter(_object(event=str, attempt=_Whole, time=(_Number, 0.0), **fields))
    for name, fields in _FIELDS.items()
}
"""Name of an event -> its type."""


def mismatch(event: Any) -> str | None:
    """Say how a line differs from the type of its event; None if it does not differ."""
    name = event.get("event") if isinstance(event, dict) else None
    if not isinstance(name, str) or name not in _EVENTS:
        return f"event: {json.dumps(name)[:40]} given; allowed: {', '.join(_EVENTS)}"
    try:
        _EVENTS[name].validate_python(event)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(map(str, ("event", *first["loc"])))
        return f"{path}: {first['msg']}: {json.dumps(first['input'])[:40]}"
    return None
