"""Finds and changes events of a run's receipts."""

import json


def of(events, name, **fields):
    """Return the events of one name, or those of them that have these fields."""
    found = (event for event in events if event["event"] == name)
    return [event for event in found if fields.items() <= event.items()]


def step(events, number):
    """Return the event of a training step, as the first attempt wrote it."""
    return of(events, "step", step=number)[0]


def place(events, event):
    return next(n for n, each in enumerate(events) if each is event)


def remove(events, event):
    del events[place(events, event)]


def insert(events, before, *more):
    events[place(events, before) : place(events, before)] = more


def attempts(events, kill_after, resume_after, *kept):
    """Return the events of an attempt that is killed after a step, and of one that resumes earlier.

    The second one issues again what the first one had issued, except for the groups in `kept`.
    """
    first, again = list(events), json.loads(json.dumps(events))
    last = place(first, of(first, "step", step=kill_after)[0])
    begins = place(again, of(again, "step", step=resume_after)[0])
    start, version = again[0], again[begins]["policy_version"]
    start |= {"attempt": 1, "steps_done": resume_after, "policy_version": version}
    start["carried"] = {str(group): 7 for group in kept}
    loads = [
        {"event": "load", "role": f"generator_{n}", "version": version, "time": 0.0}
        | dict.fromkeys(("checksum", "published"), f"weights {version}")
        for n in (0, 1)
    ]
    rest = [e for e in again[begins + 1 :] if e.get("version") != version]
    rest = [e for e in rest if e.get("group") not in kept]
    second = [start, *(loads if version else ()), *rest]
    return [*first[: last + 1], *(event | {"attempt": 1} for event in second)]
