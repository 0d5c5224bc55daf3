"""Nested containers to paths and back, against `torch.distributed.checkpoint`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ema_ckpt.core.catalog import Nesting
from ema_ckpt.core.errors import SourceError
from ema_ckpt.formats.nesting import flatten, renest
from tests.searches import examples

SCALARS = st.none() | st.integers() | st.text(max_size=3)
TREES = st.dictionaries(
    st.text("abc.", max_size=3),
    st.recursive(
        SCALARS,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text("abc.", max_size=3), inner, max_size=3)
        ),
        max_leaves=12,
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=examples(200), deadline=None)
@given(TREES)
def test_paths_are_those_of_torch(tree):
    leaves, _ = flatten(tree, lambda _leaf: False, 10_000)
    try:
        _, paths = flatten_state_dict(tree)
    except ValueError:  # two paths that join to one name
        return
    ours = {".".join(map(str, path)): path for path, value in leaves if value != {}}
    assert ours == {name: tuple(path) for name, path in paths.items()}


@settings(max_examples=examples(200), deadline=None)
@given(
    TREES
    | st.dictionaries(
        st.integers() | st.text(max_size=2) | st.none(),
        TREES | st.tuples(SCALARS),
        min_size=1,
        max_size=3,
    )
)
def test_nesting_is_restored_from_paths(tree):
    try:
        leaves, nesting = flatten(tree, lambda _leaf: False, 10_000)
    except SourceError as error:
        assert error.code == "name-collision"
        return
    assert renest(leaves, nesting) == tree


def test_tuples_and_odd_keys_are_restored():
    value = {
        "a": {1: [1, {"x": (2, 3)}], "b": {}},
        "t": (["tensor"], 4),
        (1, 2): "k",
        "none": {None: 1.5},
    }
    leaves, nesting = flatten(value, lambda leaf: leaf == "tensor", 1000)
    assert renest(leaves, nesting) == value


def test_a_list_with_gaps_becomes_a_dict_of_places():
    assert renest([(("l", 0), "a"), (("l", 2), "c")], Nesting()) == {"l": {0: "a", 2: "c"}}


@pytest.mark.parametrize("deep", ["containers", "leaf"])
def test_depth_has_a_limit(deep):
    value: object = "end"
    for _ in range(200):
        value = {"k": value} if deep == "containers" else [value]
    with pytest.raises(SourceError, match="more than 100 deep"):
        flatten({"top": value}, lambda _leaf: False, 10_000)
