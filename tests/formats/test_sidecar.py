"""What the package records beside tensors: plain values, digests, paths."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ema_ckpt.core.catalog import Nesting
from ema_ckpt.core.errors import SourceError
from ema_ckpt.formats import sidecar
from tests.formats.writing import entries, entry


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary(),
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.dictionaries(st.text() | st.integers() | st.tuples(st.text()), inner)
        ),
        max_leaves=12,
    )
)
def test_plain_values_are_restored_exactly(value):
    try:
        text = json.dumps(sidecar.encode(value), allow_nan=False)
    except TypeError as error:
        assert "Unicode" in str(error)
        return
    back = sidecar.decode(sidecar.load_json(text, "f"))
    assert repr(back) == repr(value)


def test_what_is_not_plain_is_refused_by_type():
    with pytest.raises(TypeError, match="type Tensor"):
        sidecar.encode({"a": [torch.zeros(1)]})
    endless: list = []
    endless.append(endless)
    with pytest.raises(TypeError, match="contains itself"):
        sidecar.encode(endless)


DIGEST = {"crc32": "crc32:0123abcd", "dtype": "float32", "shape": [2]}
DAMAGED = {
    "no version": {"digests": {}},
    "version of text": {"version": "1", "digests": {}},
    "version 0": {"version": 0, "digests": {}},
    "no digests": {"version": 1},
    "list": [],
    "digest without dtype": {"version": 1, "digests": {"w": {"crc32": "crc32:00000000", "shape": []}}},
    "short crc": {"version": 1, "digests": {"w": DIGEST | {"crc32": "crc32:123"}}},
    "crc with a sign": {"version": 1, "digests": {"w": DIGEST | {"crc32": "crc32:-1234567"}}},
    "other algorithm": {"version": 1, "digests": {"w": DIGEST | {"crc32": "md5:01234567"}}},
    "shape of text": {"version": 1, "digests": {"w": DIGEST | {"shape": "2"}}},
    "fractional shape": {"version": 1, "digests": {"w": DIGEST | {"shape": [2.0]}}},
    "huge index": {"version": 1, "digests": {"w": DIGEST}, "paths": {"w": ["l", 50_000_000]}},
    "empty path": {"version": 1, "digests": {"w": DIGEST}, "paths": {"w": []}},
    "path of null": {"version": 1, "digests": {"w": DIGEST}, "paths": {"w": [None]}},
    "unknown tag": {"version": 1, "digests": {}, "objects": [{"name": "a", "path": ["a"], "value": {"$call": []}}]},
    "unhashable key": {"version": 1, "digests": {}, "objects": [{"name": "a", "path": ["a"], "value": {"$dict": [[[], 1]]}}]},
    "unhashable member": {"version": 1, "digests": {}, "objects": [{"name": "a", "path": ["a"], "value": {"$set": [[]]}}]},
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_record_is_refused_with_the_remedy(case):
    with pytest.raises(SourceError, match=r"^f: .*remove it") as caught:
        sidecar.parse(json.dumps(DAMAGED[case]), "f")
    assert caught.value.code == "bad-header"


def test_the_size_of_a_record_is_known_before_any_checksum():
    tensors = entries({"a": torch.ones(2), "ü": torch.ones(3, 4)})
    sizes = {
        len(sidecar.dump(sidecar.make_document(tensors, {"a": crc, "ü": 2**32 - 1 - crc})))
        for crc in (0, 1, 0xFFFFFFFF, 0x10000000)
    }
    assert len(sizes) == 1


def test_a_record_is_read_back():
    content = sidecar.parse(
        sidecar.dump(
            sidecar.make_document(
                entries({"a": torch.ones(2)}), {"a": 7}, files=["x"], ties={"b": "a"}
            )
        ),
        "f",
    )
    assert content.digests == {"a": sidecar.Digest(7, "float32", (2,))}
    assert (content.files, content.ties, content.nesting, content.objects) == (
        ("x",),
        {"b": "a"},
        None,
        (),
    )


def test_a_place_in_a_list_may_be_beyond_the_number_of_entries():
    chosen = [entry("l.70", torch.ones(1), ("l", 70))]
    content = sidecar.parse(sidecar.dump(sidecar.make_document(chosen, {}, nesting=Nesting())), "f")
    assert content.paths == {"l.70": ("l", 70)}
