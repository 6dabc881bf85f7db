"""Says what became of moved components and removed keys, for older configs."""

from __future__ import annotations

_MOVED = {
    "rollout.code_tests": "rewards.code_tests",
    "rollout.countdown": "rewards.countdown",
    "rollout.datasets": "data.datasets",
    "rollout.prompt_mix": "data.prompt_mix",
    "rollout.rewards.BoxedFormat": "rewards.formats.BoxedFormat",
    "rollout.rewards.ResponseLength": "rewards.formats.ResponseLength",
    "rollout.rewards.ThinkAnswerFormat": "rewards.formats.ThinkAnswerFormat",
    "rollout.rewards": "rewards.maths",
    "rollout.supervised_dataset": "data.supervised_dataset",
}
"""Old to new path within the package. The first match counts: components before their module."""
_PACKAGE = "grpo_components."

REMOVED = {
    "packing": "removed: a group's prompt is always computed once, and no token is padded",
}
"""Top-level keys that no longer exist, with the reason."""


def moved_to(path: str) -> str | None:
    """Return the new dotted path of a component; None if it has not moved."""
    name = path.removeprefix(_PACKAGE)
    for old, new in _MOVED.items():
        if path.startswith(_PACKAGE) and f"{name}.".startswith(f"{old}."):
            return f"{_PACKAGE}{new}{name[len(old) :]}"
    return None
