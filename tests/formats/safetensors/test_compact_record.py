"""The record of a header with many names: what fits as a plain file fits with it, and comes back as it was."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import load_file

import ema_ckpt
from ema_ckpt.core.errors import SourceError, TargetError
from ema_ckpt.formats import sidecar
from ema_ckpt.formats.safetensors import header
from ema_ckpt.formats.safetensors.compact_record import Entry, compact, crc_of, expand
from tests.checkpoints import save_dcp
from tests.searches import examples

PARTS = st.text(st.characters(codec="utf-8"), max_size=6) | st.integers(0, 2000)
PATHS = st.lists(PARTS, min_size=1, max_size=4).map(tuple)


@st.composite
def documents(draw: st.DrawFn) -> tuple[dict, list[Entry]]:
    """A plain document, and the tensors of its header in another order."""
    paths = draw(st.lists(PATHS, unique_by=lambda path: ".".join(map(str, path)), max_size=8))
    names = [".".join(map(str, path)) for path in paths]
    dtypes = {name: draw(st.sampled_from(["float32", "int8"])) for name in names}
    shapes = {name: draw(st.lists(st.integers(0, 5), max_size=3)) for name in names}
    crcs = {name: f"crc32:{draw(st.integers(0, 2**32 - 1)):08x}" for name in names}
    document: dict = {
        "version": 1,
        "digests": {n: {"crc32": crcs[n], "dtype": dtypes[n], "shape": shapes[n]} for n in names},
    }
    if draw(st.booleans()):
        document["paths"] = {n: list(p) for n, p in zip(names, paths, strict=True) if p != (n,)}
        document |= {"keys": [], "tuples": []}
    objects = draw(st.lists(st.text(st.characters(codec="utf-8")), unique=True, max_size=3))
    objects = [name for name in objects if name not in names]
    if objects:
        document["objects"] = [{"name": name, "path": [name], "value": 1} for name in objects]
    everything = [*names, *objects]
    order = draw(st.permutations(everything))
    if order != everything:
        document["order"] = order
    entries = [Entry(name, dtypes[name], tuple(shapes[name])) for name in sorted(names)]
    return document, entries


@settings(max_examples=examples(300), deadline=None)
@given(documents())
def test_the_plain_form_comes_back(drawn: tuple[dict, list[Entry]]) -> None:
    document, entries = drawn
    text = compact(document, entries, has_digests=True)
    short = json.loads(text)
    back = json.loads(json.dumps(expand(short, entries)))
    assert back.pop("sequence") == list(document["digests"])
    assert back.pop("crc32") == short["crc32"]
    assert back == document
    assert sidecar.crc_text(crc_of(entries)) == short["header"]
    without = json.loads(compact(document, entries, has_digests=False))
    assert expand(without, entries)["digests"] == {}
    assert expand(without, entries)["sequence"] == list(document["digests"])


def state() -> dict[str, object]:
    """Trees, lists, integer keys and tuples, and tensors that lie in another order than they are listed."""
    layers = [{"w": torch.randn(4, 4), "b": torch.randn(4).bfloat16()} for _ in range(12)]
    return {
        "model": {
            "layers.10.w": torch.randn(3),
            "layers.9.w": torch.randn(2, 2),
            "n": torch.tensor(3),
        },
        "list": layers,
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}, 1: {"step": torch.tensor(2.0)}}},
        "epoch": 7,
        "pair": (torch.ones(2), torch.zeros(2)),
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save(state(), tmp_path / "source.pt")
    return tmp_path / "source.pt"


def header_of(path: Path) -> tuple[int, dict]:
    raw = path.read_bytes()
    (nbytes,) = struct.unpack("<Q", raw[:8])
    return nbytes, json.loads(raw[8 : 8 + nbytes])


def sizes_by_form(source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes of the header of the file as each form makes it."""
    from ema_ckpt.formats.safetensors import writer

    sizes = {}
    for form in writer._LOST:
        with monkeypatch.context() as patch:
            patch.setattr(writer, "_LOST", {form: ""})
            ema_ckpt.convert(source, folder / f"{form}.safetensors")
        sizes[form] = header_of(folder / f"{form}.safetensors")[0]
    return sizes


def test_the_first_form_that_fits_is_taken(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = sizes_by_form(source, tmp_path, monkeypatch)
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    assert sizes["compact"] < 0.7 * sizes["plain"]
    for form, nbytes in sizes.items():
        monkeypatch.setattr(header, "MAX_HEADER_NBYTES", nbytes)
        out = tmp_path / f"limited-{form}.safetensors"
        result = ema_ckpt.convert(source, out)
        assert header_of(out)[0] == nbytes
        warned = [w.code for w in result.warnings]
        assert warned == ([] if form in ("plain", "compact") else ["unchecked"])
        assert ema_ckpt.verify(out).status == (
            "sound" if form in ("plain", "compact") else "unproven"
        )
        assert len(load_file(out)) == result.tensors  # safetensors' own reader
    monkeypatch.setattr(header, "MAX_HEADER_NBYTES", min(sizes.values()) - 8)
    with pytest.raises(TargetError, match="split into shards"):
        ema_ckpt.convert(source, tmp_path / "none.safetensors")


@pytest.mark.parametrize("form", ["compact", "no-digests"])
def test_nesting_keys_order_and_objects_come_back(
    form: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = sizes_by_form(source, tmp_path, monkeypatch)
    monkeypatch.setattr(header, "MAX_HEADER_NBYTES", sizes[form])
    ema_ckpt.convert(source, tmp_path / "a.safetensors")
    assert ("crc32s" in header_of(tmp_path / "a.safetensors")[1]["__metadata__"]["ema_ckpt"]) == (
        form == "compact"
    )
    ema_ckpt.convert(tmp_path / "a.safetensors", tmp_path / "back.pt")
    back, wanted = torch.load(tmp_path / "back.pt", weights_only=True), torch.load(source)
    assert list(back) == list(wanted)
    assert list(back["model"]) == list(wanted["model"])
    assert list(back["optimizer"]["state"]) == [0, 1]
    assert isinstance(back["pair"], tuple)
    assert back["epoch"] == 7
    for mine, theirs in zip(back["list"], wanted["list"], strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in ("w", "b"))


def test_a_consolidated_file_in_the_compact_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"layers.{i}.weight": torch.randn(2, 2) for i in range(20)}
    source = save_dcp(tmp_path / "c", {"model": tensors})
    plain, short = tmp_path / "plain.safetensors", tmp_path / "short.safetensors"
    ema_ckpt.consolidate(source, plain)
    monkeypatch.setattr(header, "MAX_HEADER_NBYTES", header_of(plain)[0] - 8)
    assert not ema_ckpt.consolidate(source, short).warnings
    assert header_of(short)[0] < header_of(plain)[0]
    assert ema_ckpt.verify(short, against=source).status == "sound"
    raw = bytearray(short.read_bytes())
    raw[-1] ^= 1
    short.write_bytes(raw)
    assert [p.code for p in ema_ckpt.verify(short).problems] == ["checksum"]
    with ema_ckpt.open(short) as checkpoint:
        assert checkpoint.keys() == [f"layers.{i}.weight" for i in range(20)]


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "one less"])
def test_a_header_that_somebody_wrote_again(
    change: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = sizes_by_form(source, tmp_path, monkeypatch)
    assert sizes
    file = tmp_path / "compact.safetensors"
    with safe_open(file, "np") as opened:
        metadata = opened.metadata()
    tensors = {f"t{i}": np.zeros(4, "f4") for i in range(3)}
    save_file(tensors, file, metadata=metadata)
    found = ema_ckpt.verify(file)
    assert (found.status, [w.code for w in found.warnings]) == (
        "unproven",
        ["stale-file", "unchecked"],
    )


DAMAGED = {
    "no order": lambda record: record.pop("order"),
    "order of text": lambda record: record.update(order="abc"),
    "order beyond": lambda record: record.update(order=[0, 10**12]),
    "order twice": lambda record: record.update(order=[0, 1, 0, 1]),
    "order of half": lambda record: record.update(order=record["order"][:-1]),
    "short checksums": lambda record: record.update(crc32s=record["crc32s"][:-8]),
    "no base64": lambda record: record.update(crc32s="%" * 8),
    "cut beyond": lambda record: record.update(cuts=[["900,", 2]]),
    "cuts of many": lambda record: record.update(cuts=[["", 10**12]]),
    "cut of text": lambda record: record.update(cuts=[["x,", 2]]),
    "names beyond": lambda record: record.update(names=[0, 10**12]),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_record_is_refused(how: str) -> None:
    entries = [Entry("a.b", "float32", (2,)), Entry("c", "int8", ())]
    digests = {
        e.name: {"crc32": "crc32:00000001", "dtype": e.dtype, "shape": e.shape} for e in entries
    }
    document = {
        "version": 1,
        "digests": digests,
        "paths": {"a.b": ["a", "b"]},
        "keys": [],
        "tuples": [],
    }
    record = json.loads(compact(document, entries, has_digests=True))
    DAMAGED[how](record)
    with pytest.raises(SourceError, match="damaged") as refused:
        sidecar.parse_document(lambda: expand(record, entries), "f")
    assert refused.value.code == "bad-header"


def plain_file(path: Path, count: int, length: int) -> None:
    """A file without a record, of `count` names of `length` letters, whose header just fits the limit."""
    entries = []
    for i in range(count):
        name = f"{i:07d}.{'w' * (length - 8)}"
        entries.append(f'"{name}":{{"dtype":"U8","shape":[],"data_offsets":[{i},{i + 1}]}}')
    last = f'":{{"dtype":"U8","shape":[],"data_offsets":[{count},{count + 1}]}}}}'
    text = "{" + ",".join(entries) + ',"'
    text += "z" * (header.MAX_HEADER_NBYTES - len(text) - len(last)) + last
    assert len(text) == header.MAX_HEADER_NBYTES
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + bytes(count + 1))


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["consolidate", "convert"])
def test_a_header_at_the_limit_of_the_format(verb: str, tmp_path: Path) -> None:
    plain_file(tmp_path / "plain.safetensors", 100_000, 900)
    result = getattr(ema_ckpt, verb)(tmp_path / "plain.safetensors", tmp_path / "out.safetensors")
    assert result.tensors == 100_001
    assert [w.code for w in result.warnings] == ["unchecked"]
    nbytes, written = header_of(tmp_path / "out.safetensors")
    assert nbytes <= 100_000_000
    assert len(written) == 100_001
