"""Sums up the ledger's events since the last receipt, a record of a step in receipts.jsonl."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from grpo_components.exchange.ledger import LedgerEntry
from grpo_components.replay.event_order import Event


@dataclass
class _Group:
    """What receipts say of a group that is still living."""

    prompt_index: int
    epoch: int
    response_tokens: float | None = None
    """Mean number of sampled tokens per response; None until the group is generated."""


class RecentEvents:
    """Collects what happens to groups and weights in one attempt of a run, for the receipts."""

    def __init__(self, living: Iterable[LedgerEntry], generators: Iterable[str]) -> None:
        self._weights: dict[str, dict[str, Any]] = {
            name: {"version": 0, "checksum": None} for name in generators
        }
        self._groups: dict[int, _Group] = {}
        """The living groups, in the order of their last admission."""
        self._batch: dict[int, dict[str, float]] = {}
        """The new groups in the step that is being trained, by id: with reuse, their worth."""
        self._reused: list[dict[str, Any]] = []
        """The reused groups in that step."""
        self._clear()
        for entry in living:
            self._groups[entry.group_id] = _Group(
                entry.prompt_index, entry.epoch, entry.response_tokens
            )
            if entry.state == "in_flight":
                self._interrupt(entry.group_id)

    def add(self, event: Event) -> None:
        """Count one event of the run."""
        match event["event"]:
            case "load":
                self._load(event["role"], event["version"], event["checksum"], event["published"])
            case "issue":
                self._issue(event["group"], event["prompt"], event["epoch"])
            case "finish":
                result = {name: event[name] for name in ("successes", "scored") if name in event}
                self._finish(event["group"], event["response_tokens"], result)
            case "interrupt":
                self._interrupt(event["group"])
            case "drop":
                tokens = event.get("tokens", {})
                for group_id in event["groups"]:
                    self._drop(group_id, event["reason"], event["reissue"], tokens.get(group_id))
            case "sample":
                groups = event["groups"]
                worths = event.get("worths", [{}] * len(groups))
                self._batch = dict(zip(groups, worths, strict=True))
                self._reused = event.get("reused", [])
            case "step":
                self._train()

    def take(self) -> dict[str, Any]:
        """Return what happened since the last call, by the field names of docs/receipts.md."""
        fields = {
            "generators": {name: dict(weights) for name, weights in self._weights.items()},
            "acknowledged": self._acknowledged,
            "groups": _totals(self._lengths),
            "trained": self._trained,
            "events": self._events,
        }
        self._clear()
        return fields

    def _clear(self) -> None:
        self._acknowledged: list[dict[str, Any]] = []
        self._trained: list[dict[str, int]] = []
        self._events: list[dict[str, Any]] = []
        self._lengths: dict[str, list[float | None]] = {}
        """Event, or reason of a drop -> mean response length of each group concerned."""

    def _load(self, generator: str, version: int, checksum: str, published: str) -> None:
        self._weights[generator] = {"version": version, "checksum": checksum}
        weights = {"version": version, "checksum": checksum, "published": published}
        self._acknowledged.append({"generator": generator, **weights})

    def _issue(self, group_id: int, prompt_index: int, epoch: int) -> None:
        again = self._groups.pop(group_id, None)
        self._groups[group_id] = again or _Group(prompt_index, epoch)
        if again is None:
            self._count("issued", None)
            self._events.append({"issued": group_id, "prompt_index": prompt_index, "epoch": epoch})

    def _finish(self, group_id: int, response_tokens: list[int], result: dict[str, int]) -> None:
        mean = sum(response_tokens) / len(response_tokens)
        self._groups[group_id].response_tokens = mean
        self._count("generated", mean)
        self._events.append({"generated": group_id, "response_tokens": mean, **result})

    def _interrupt(self, group_id: int) -> None:
        self._groups[group_id].response_tokens = None
        self._events.append({"restarted": group_id})

    def _drop(self, group_id: int, reason: str, reissue: bool, tokens: int | None) -> None:
        self._count(reason, self._groups.pop(group_id).response_tokens)
        what = {"reason": reason, "reissue": reissue, "tokens": tokens}
        self._events.append({"dropped": group_id, **what})

    def _train(self) -> None:
        for group_id in [group_id for group_id in self._groups if group_id in self._batch]:
            group = self._groups.pop(group_id)
            self._count("trained", group.response_tokens)
            self._events.append({"trained": group_id, **self._batch[group_id]})
            self._trained.append(
                {"prompt_index": group.prompt_index, "epoch": group.epoch, "group_id": group_id}
            )
        for again in self._reused:
            self._count("reused", again["response_tokens"])
            self._events.append({"reused": again["group"], "use": again["use"]})
        self._batch, self._reused = {}, []

    def _count(self, what: str, response_tokens: float | None) -> None:
        self._lengths.setdefault(what, []).append(response_tokens)


def _totals(lengths: dict[str, list[float | None]]) -> dict[str, Any]:
    """Return the number and mean response length of groups, by what happened to them."""

    def total(what: str) -> dict[str, Any]:
        known = [tokens for tokens in lengths.get(what, []) if tokens is not None]
        return {
            "count": len(lengths.get(what, [])),
            "response_tokens_mean": sum(known) / len(known) if known else None,
        }

    others = ("issued", "generated", "filtered", "trained", "reused")
    reasons = dict.fromkeys(("stale", "failed", *lengths))  # these two first, even if 0
    return {
        "issued": len(lengths.get("issued", [])),
        "generated": total("generated"),
        "filtered": total("filtered"),
        "dropped": {reason: total(reason) for reason in reasons if reason not in others},
        "trained": total("trained"),
        **({"reused": total("reused")} if "reused" in lengths else {}),
    }
