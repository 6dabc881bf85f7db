"""Defines fields and types of each record in receipts.jsonl, which docs/receipts.md explains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    create_model,
)
from pydantic_core import ErrorDetails

from grpo_components.exchange.books import TokenCause

LARGEST = 2**53
"""Largest number allowed in a record; the smallest is 0."""


def _object(**types: Any) -> type[BaseModel]:
    """Return the type of a JSON object that has exactly these fields."""
    return create_model("object", __config__=ConfigDict(extra="forbid", strict=True), **types)


def _number_as_key(key: str) -> str:
    if len(key) > len(str(LARGEST)) or int(key) > LARGEST:
        raise ValueError("too large")
    return key


def _before_rounding(number: Any) -> Any:
    if isinstance(number, int) and number > LARGEST:
        raise ValueError("too large")  # as a float it could be rounded down to the largest
    return number


_Whole = Annotated[int, Field(ge=0, le=LARGEST)]
_Range = Annotated[list[_Whole], Field(min_length=2, max_length=2)]
_Number = Annotated[
    float, Field(ge=0, le=LARGEST, allow_inf_nan=False), BeforeValidator(_before_rounding)
]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
# Numbers as keys have one spelling, so that two keys are never the same number.
_Version = Annotated[str, Field(pattern="^(0|[1-9][0-9]*)$"), AfterValidator(_number_as_key)]

_EVENTS = "issued", "generated", "restarted", "dropped", "trained", "reused"


def _tag_of_event(event: Any) -> str | None:
    names = _EVENTS if isinstance(event, dict) else ()
    tag = next((f"<{name}>" for name in names if name in event), None)
    if tag == "<trained>" and event.keys() & {"spread", "oldest_version"}:
        return "<kept>"
    return "<scored>" if tag == "<generated>" and event.keys() & {"successes", "scored"} else tag


_AMOUNT = _object(count=_Whole, response_tokens_mean=_Number | None)
_GROUPS = _object(
    issued=_Whole,
    generated=_AMOUNT,
    filtered=_AMOUNT,
    dropped=dict[str, _AMOUNT],
    trained=_AMOUNT,
    reused=(_AMOUNT | None, None),
)
_ISSUED = _object(issued=_Whole, prompt_index=_Whole, epoch=_Whole)
_GENERATED = _object(generated=_Whole, response_tokens=_Number)
_SCORED = _object(generated=_Whole, response_tokens=_Number, successes=_Whole, scored=_Whole)
_RESTARTED = _object(restarted=_Whole)
_DROPPED = _object(dropped=_Whole, reason=str, reissue=bool, tokens=(_Whole | None, None))
_TRAINED = _object(trained=_Whole)
_KEPT = _object(trained=_Whole, spread=_Number, oldest_version=_Whole)
_REUSED = _object(reused=_Whole, use=_Whole)
_Event = Annotated[
    Annotated[_ISSUED, Tag("<issued>")]
    | Annotated[_GENERATED, Tag("<generated>")]
    | Annotated[_SCORED, Tag("<scored>")]
    | Annotated[_RESTARTED, Tag("<restarted>")]
    | Annotated[_DROPPED, Tag("<dropped>")]
    | Annotated[_TRAINED, Tag("<trained>")]
    | Annotated[_KEPT, Tag("<kept>")]
    | Annotated[_REUSED, Tag("<reused>")],
    Discriminator(_tag_of_event),
]
_SHARED = {
    "record": str,
    "attempt": _Whole,
    "step": _Whole,
    "policy_version": _Whole,
    "generators": dict[str, _object(version=_Whole, checksum=str | None)],
    "acknowledged": list[_object(generator=str, version=_Whole, checksum=str, published=str)],
    "groups": _GROUPS,
    "events": list[_Event],
}
_START = {
    "record": str,
    "format": _Whole,
    "attempt": _Whole,
    "steps_done": _Whole,
    "policy_version": _Whole,
    "num_steps": _Whole,
    "max_staleness": _Whole,
    "groups_per_step": _Whole,
    "group_size": _Whole,
    "replay_generation": (_object(share=_Number, max_uses=_Whole) | None, None),
    "carried": (dict[_Version, _Whole], {}),  # records of older versions have no counts of tokens
}
_PROMPT = {"prompt_index": _Whole, "epoch": _Whole}
_IDS = {"run": str, "incarnation": str}  # records of older versions have none
_RULE = {"low": _Number, "high": _Number, "floor": _Number, "decay": _Number}
_DRAWS = {  # only with a curriculum
    "seed": _Whole,
    "curriculum": _object(**_RULE),
    "prompts": list[_object(weight=_Number, rows=list[_Range])],
}


def _tag_of_start(record: Any) -> str:
    names = set(record) if isinstance(record, dict) else set()
    ids, draws = names & _IDS.keys(), names & _DRAWS.keys()
    return f"<{'ids' if ids else 'old'}{' draws' if draws else ''}>"


_Start = Annotated[
    Annotated[_object(**_START, **_IDS), Tag("<ids>")]
    | Annotated[_object(**_START), Tag("<old>")]
    | Annotated[_object(**_START, **_IDS, **_DRAWS), Tag("<ids draws>")]
    | Annotated[_object(**_START, **_DRAWS), Tag("<old draws>")],
    Discriminator(_tag_of_start),
]
_SESSIONS = _object(**dict.fromkeys(("count", "calls", "trajectories"), _Whole))
_RECORDS: dict[str, TypeAdapter[Any]] = {
    "start": TypeAdapter(_Start),
    "step": TypeAdapter(
        _object(
            **_SHARED,
            trained_from=_Whole,
            token_versions=dict[_Version, _Whole],
            max_staleness=_Whole | None,
            correction_mass=_Number | None,
            trained_share=(_Share | None, None),  # records of older versions have none
            sessions=(_SESSIONS | None, None),
            tokens=(dict[_Version, dict[TokenCause, _Whole]], {}),
            batch_hash=str,
            trained=list[_object(**_PROMPT, group_id=_Whole)],
        )
    ),
    "end": TypeAdapter(
        _object(
            **_SHARED,
            finished=bool,
            living=list[
                _object(**_PROMPT, group_id=_Whole, state=str, tokens=(_Whole | None, None))
            ],
            waiting=list[_object(**_PROMPT)],
        )
    ),
}
"""Kind of record -> its type."""
_OTHER_FIELDS = "missing", "extra_forbidden"
"""Pydantic's types of errors about a field that lacks, or that is not known."""


def mismatch(record: Any) -> str | None:
    """Find out how a record differs from the type of its kind."""
    kind = record.get("record") if isinstance(record, dict) else None
    if not isinstance(kind, str) or kind not in _RECORDS:
        return f"record: {json.dumps(kind)[:40]} given; allowed: {', '.join(_RECORDS)}"
    try:
        _RECORDS[kind].validate_python(record)
    except ValidationError as error:
        return _first_problem(error.errors(include_url=False))
    return None


def _first_problem(errors: Sequence[ErrorDetails]) -> str:
    first = errors[0]
    *parents, last = first["loc"]
    if first["type"] in _OTHER_FIELDS:
        same_place = (each for each in errors if [*each["loc"][:-1]] == parents)
        names = sorted(str(e["loc"][-1]) for e in same_place if e["type"] in _OTHER_FIELDS)
        return f"{_path(parents)} has missing or unknown fields: {', '.join(names)}"
    if last == "[key]":
        key = json.dumps(first["input"])[:40]
        return f"{_path(parents[:-1])} has a key that is not a number: {key}"
    return f"{_path(first['loc'])} is {json.dumps(first['input'])[:40]}"


def _path(loc: Sequence[int | str]) -> str:
    """Return the path of a value, as in `record.events[3].issued`."""
    parts = (f"[{name}]" if isinstance(name, int) else f".{name}" for name in loc)
    return "record" + "".join(part for part in parts if not part.startswith(".<"))  # a tag
