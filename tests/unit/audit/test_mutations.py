"""Each changed value of a run's receipts is detected, and none crashes the audit."""

import json
import random

from grpo_tools.audit.__main__ import main

VALUES = [None, True, 0, 1, -1, 99, 2**53 + 1, -0.5, float("nan"), "", "x", "9" * 300, [], {}, [[]]]


def leaves(value, path=()):
    """The path of every value in a record, including lists and objects."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    for key, item in items if isinstance(value, dict) else enumerate(value or ()):
        if isinstance(item, dict | list):
            yield from leaves(item, (*path, key))
        else:
            yield (*path, key)


def changed_value(record, chance):
    """Change or remove one value, key or item of a record."""
    path = chance.choice([path for path in leaves(record) if path])
    parent = record
    for key in path[:-1]:
        parent = parent[key]
    key, kind = path[-1], chance.choice(["value", "value", "near", "key", "gone", "twice"])
    if kind == "near" and type(parent[key]) in (int, float):
        parent[key] += chance.choice([-1, 1, 10**6])
    elif kind == "key" and isinstance(parent, dict):
        parent[chance.choice([*parent, f"{key}_", ""])] = parent.pop(key)
    elif kind == "gone":
        del parent[key]
    elif kind == "twice" and isinstance(parent, list):
        parent.insert(key, parent[key])
    else:
        parent[key] = chance.choice(VALUES)
    return json.dumps(record)


def test_single_changes_are_detected(tmp_path, capsys, write_run):
    path = tmp_path / "receipts.jsonl"
    write_run(path)
    whole = path.read_bytes()
    assert main([str(tmp_path)]) == 0
    missed, total = [], 0
    for n in range(300):
        lines, chance = whole.splitlines(), random.Random(n)
        number = chance.randrange(len(lines))
        lines[number] = changed_value(json.loads(lines[number]), chance).encode()
        text = b"\n".join([*lines, b""])
        if text == whole:
            continue
        path.write_bytes(text)
        total += 1
        capsys.readouterr()
        code = main([str(tmp_path), *(["--unfinished"] if n % 2 else [])])
        out = capsys.readouterr().out
        last = out.splitlines()[-1] if out else ""
        named = "receipts.jsonl" in last or "receipts.end" in last
        if code != 1 or not last.startswith("broken: ") or not named:
            missed.append((n, code, last))
    assert not missed and total > 250
