"""The strict JSON reader: one meaning per line, an error for everything else."""

import io
import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from grpo_tools.audit import lines
from grpo_tools.audit.lines import UnreadableError, lines_of, parse

REFUSED = {
    "the same key twice": '{"a": 1, "a": 1}',
    "the same key twice, further in": '{"a": [{"b": 1, "c": 2, "b": 3}]}',
    "the same key, once as an escape": '{"a": 1, "\\u0061": 1}',
    "an integer of 5,000 digits": '{"a": ' + "9" * 5000 + "}",
    "an integer beyond 64 bits": '{"a": ' + "9" * 20 + "}",
    "a negative one": '{"a": -' + "9" * 5000 + "}",
    "infinity": '{"a": Infinity}',
    "negative infinity": '{"a": -Infinity}',
    "infinity as a number": '{"a": 1e999}',
    "NaN": '{"a": NaN}',
    "brackets without end": "[" * 100_000,
    "objects without end": '{"a":' * 100_000,
    "more levels than allowed": "[" * 40 + "]" * 40,
    "two values": "{} {}",
    "a comment": "{} // no",
    "a byte order mark": "\ufeff{}",
    "other digits": '{"a": \u0663}',
    "single quotes": "{'a': 1}",
    "a comma too much": '{"a": 1,}',
    "a control character in a text": '{"a": "\x1b"}',
    "nothing": "",
}


@pytest.mark.parametrize("why", REFUSED)
def test_ambiguous_or_invalid_json_is_refused_with_a_short_error(why):
    with pytest.raises(UnreadableError) as refused:
        parse(REFUSED[why].encode())
    assert len(str(refused.value)) < 200


def test_invalid_utf8_is_refused():
    with pytest.raises(UnreadableError, match="byte 3"):
        parse(b'{"\xff": 1}')


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**52), 2**52)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@given(VALUES)
def test_valid_json_is_read_as_written(value):
    assume("[[[[" not in json.dumps(value))  # deeper than any record
    assert parse(json.dumps(value).encode()) == value


@given(st.binary(max_size=60))
def test_random_bytes_are_read_or_refused(line):
    try:
        parse(line)
    except UnreadableError as error:
        assert str(error)


def test_an_endless_line_is_cut(monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    found = list(lines_of(io.BytesIO(b"{}\n" + b"1" * 1000)))
    assert found == [b"{}\n", b"1" * 11]
    with pytest.raises(UnreadableError, match="longer"):
        parse(found[1])
