"""State survives its files with the same types and bits, and nothing is pickled."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from lib.properties import many

from grpo_components.state_files import read_state, write_state

PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
ARRAY = arrays.arrays(
    st.sampled_from([np.int64, np.float32, np.bool_, np.int32]),
    arrays.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3),
)
LEAF = st.one_of(PLAIN, ARRAY, ARRAY.map(torch.tensor), ARRAY.map(lambda a: np.float32(a.size)))
NESTED = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(st.integers(), inner, max_size=3),
    ),
    max_leaves=12,
)


def assert_same(left, right):
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert_same(left.numpy(), right.numpy())
    elif isinstance(left, np.ndarray | np.generic):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert left.tobytes() == right.tobytes()
    else:
        assert repr(left) == repr(right)


@settings(max_examples=many(100), deadline=None)
@given(NESTED)
def test_a_state_comes_back_the_same(tmp_path_factory, state):
    folder = tmp_path_factory.mktemp("state") / "new"
    write_state(folder, "a", state)
    assert_same(read_state(folder, "a"), state)
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "a.npz"]


@pytest.mark.parametrize(
    ("value", "place"),
    [({"b": [1, object()]}, r"^a\.b\[1\]: .* object"), (np.array([None]), "^a: .* ndarray")],
)
def test_a_value_that_only_pickle_could_store_is_refused_by_its_place(tmp_path, value, place):
    with pytest.raises(TypeError, match=place):
        write_state(tmp_path, "a", value)
    assert list(tmp_path.iterdir()) == []


def test_user_data_may_contain_our_own_marker_key(tmp_path):
    state = {"__is__": "tuple", "items": [1]}
    write_state(tmp_path, "a", state)
    assert read_state(tmp_path, "a") == state
    json.loads((tmp_path / "a.json").read_text())
