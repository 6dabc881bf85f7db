"""Values that must stay as they are: kept as lines of text, and compared to the bit."""

import itertools
import json
import math

TOLERANCE = 1e-4  # relative, and 1e-6 absolute: of numbers that another machine computed


def read_goldens(file):
    found = {}
    for line in file.read_text().splitlines():
        key, _, value = line.partition("\t")
        kind, _, rest = key.partition(" ")
        names, _, rest = rest.partition(" ")
        for name in names.split(","):
            found[" ".join(filter(None, (kind, name, rest)))] = json.loads(value)
    return found


def write_goldens(file, found):
    """Write one line per key; configs whose plans agree under a heading share one line."""
    shared = {}
    for key, value in found.items():
        kind, _, rest = key.partition(" ")
        name, _, rest = rest.partition(" ")
        shared.setdefault((kind, rest, json.dumps(value)), []).append(name)
    lines = []
    for (kind, rest, value), names in shared.items():
        key = " ".join(filter(None, (kind, ",".join(names), rest)))
        lines.append(f"{key}\t{value}\n")
    file.write_text("".join(lines))


def differences(key, golden, now, exact):
    if isinstance(golden, dict) and isinstance(now, dict):
        for name in {**golden, **now}:
            one, other = golden.get(name, "(none)"), now.get(name, "(none)")
            if exact or name not in ("batch_hash", "checksum"):
                yield from differences(f"{key}/{name}", one, other, exact)
    elif isinstance(golden, list) and isinstance(now, list):
        for i, (one, other) in enumerate(itertools.zip_longest(golden, now, fillvalue="(none)")):
            yield from differences(f"{key}/{i + 1}", one, other, exact)
    elif not (repr(golden) == repr(now) or (not exact and close(golden, now))):
        yield f"  {key}: {golden!r} -> {now!r}"


def close(one, other):
    numbers = all(isinstance(value, int | float) for value in (one, other))
    return numbers and math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-6)
