"""Every random single change of a run's receipts is detected, and none crashes the audit."""

import json
import random

from grpo_tools.audit import __main__ as audits
from grpo_tools.audit.lines import UnreadableError, parse

VALUES = [
    *(None, True, False, 0, 1, -1, 2, 99, 10**15, 2**53 + 1, 10**400, 1e300, -0.5, float("inf")),
    *(float("nan"), "", "x", "\x1b[31m", "\u202e", "\ud800", "9" * 300, [], {}, [[]], {"a": 1}),
]


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
        other = {"0": "\u0660", "1": "01"}.get(key, chance.choice([*parent, f"{key}_", ""]))
        parent[other] = parent.pop(key)
    elif kind == "gone":
        del parent[key]
    elif kind == "twice" and isinstance(parent, list):
        parent.insert(key, parent[key])
    else:
        parent[key] = chance.choice(VALUES)
    return json.dumps(record)


def doubled_key(line, chance):
    """Duplicate a key of an object: some parsers take the first, some the last."""
    places = [i for i, character in enumerate(line) if character == "{"]
    place = chance.choice(places) + 1
    key = chance.choice(["record", "step", "attempt", "version", "count", "0", "chain"])
    return f'{line[:place]}"{key}": {chance.choice([0, "1", None])!r}, {line[place:]}'.replace(
        "None", "null"
    ).replace("'", '"')


def changed(lines, chance):
    """Make one change: a value, a key, a line or a byte."""
    lines, n = list(lines), chance.randrange(len(lines))
    kind = chance.choice(["value"] * 5 + ["double", "line", "swap", "again", "byte", "bytes"])
    if kind == "value":
        lines[n] = changed_value(json.loads(lines[n]), chance).encode() + b"\n"
    elif kind == "double":
        lines[n] = doubled_key(lines[n].decode(), chance).encode()
    elif kind == "line":
        del lines[n]
    elif kind == "swap":
        m = chance.randrange(len(lines))
        lines[n], lines[m] = lines[m], lines[n]
    elif kind == "again":
        lines.insert(chance.randrange(len(lines) + 1), lines[n])
    else:
        text = bytearray(lines[n])
        place = chance.randrange(len(text))
        if kind == "byte":
            text[place] ^= 1 << chance.randrange(8)
        else:
            length = chance.randrange(1, 40)
            text[place : place + length] = chance.choice([b"", chance.randbytes(length)])
        lines[n] = bytes(text)
    return kind, lines


def test_single_changes_are_detected(tmp_path, capsys, write_run):
    missed, total = fuzz(tmp_path, write_run, 300, capsys)
    assert not missed and total > 250


def fuzz(folder, write_run, number, capsys, seed=0):
    """The undetected ones of `number` random changes, and how many changed the file."""
    path = folder / "receipts.jsonl"
    if write_run is not None:
        write_run(path, books=True)
    whole = path.read_bytes()
    assert audits.main([str(folder)]) == 0
    missed, total = [], 0
    for n in range(number):
        kind, lines = changed(whole.splitlines(keepends=True), random.Random(f"{seed} {n}"))
        text = b"".join(lines)
        if text == whole:
            continue
        path.write_bytes(text)
        total += 1
        capsys.readouterr()
        code = audits.main([str(folder), *(["--unfinished"] if n % 2 else [])])
        out = capsys.readouterr().out
        last = out.splitlines()[-1] if out else ""
        named = "receipts.jsonl" in last or "receipts.end" in last
        if code != 1 or not last.startswith("broken: ") or not named:
            missed.append((n, kind, code, last))
        assert not set(out) & {"\x1b", "\u202e", "\x00"} and len(last) < 500, (n, kind)
    path.write_bytes(whole)
    return missed, total


def test_impossible_values_are_detected_without_the_chain(
    tmp_path, capsys, write_run, write_receipts
):
    """Even with a recomputed chain the records must be valid."""
    records = write_run(tmp_path / "receipts.jsonl", books=True)
    missed = []
    impossible = [None, True, -1, 10**400, 2**53 + 1, 1e300, "", [], {}, [[]]]
    for n in range(len(records)):
        for path in leaves(records[n]):
            old = records[n]
            for key in path:
                old = old[key]
            if type(old) not in (int, str) or path[-1] in ("batch_hash", "record", "finished"):
                continue
            edited = json.loads(json.dumps(records))
            parent = edited[n]
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = impossible[(len(path) + n) % len(impossible)]
            if parent[path[-1]] == "" and type(old) is str:
                parent[path[-1]] = 1
            write_receipts(tmp_path, edited)
            code = audits.main([str(tmp_path)])
            missed += [(n, path)] if code != 1 else []
            capsys.readouterr()
    assert not missed


def test_the_strict_reader_agrees_with_pythons_reader(write_run, tmp_path):
    write_run(tmp_path / "receipts.jsonl")
    for line in (tmp_path / "receipts.jsonl").read_bytes().splitlines():
        for n in range(0, len(line), 7):
            mutated = line[:n] + bytes([line[n] ^ 1]) + line[n + 1 :]
            try:
                assert parse(mutated) == json.loads(mutated)
            except UnreadableError:
                continue
