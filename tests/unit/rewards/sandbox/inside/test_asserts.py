"""Values that cross between the sandbox of the asserts and that of the program."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from lib.properties import many

from grpo_components.rewards.sandbox.inside.asserts import decode, encode

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.binary() | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner)
    | st.sets(st.integers()) | st.frozensets(st.text()),
    max_leaves=5,
)  # fmt: skip


@settings(max_examples=many(25), deadline=None)
@given(plain)
def test_plain_data_arrives_unchanged(value):
    def keep(value):
        raise AssertionError(f"this is plain data: {value}")

    arrived = decode(json.loads(json.dumps(encode(value, keep))), keep)
    assert arrived == value and type(arrived) is type(value)
