"""Every committed torch and safetensors file, read and written again by the engine, against the recorded truth."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ema_ckpt.core.catalog import Catalog
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.write_plan import OutputTensor, keep_first
from ema_ckpt.formats.pickle.writer import is_plain
from ema_ckpt.formats.safetensors.reader import open_safetensors
from ema_ckpt.formats.safetensors.writer import lay_out_directory, lay_out_file, refusal
from ema_ckpt.formats.torch_file.reader import open_torchfile
from ema_ckpt.formats.torch_file.writer import lay_out
from ema_ckpt.storage.files import LocalFiles
from ema_ckpt.writing.engine import run
from ema_ckpt.writing.schedule import Settings
from tests.formats.writing import raw_bytes, read

FIXTURES = Path(__file__).parents[2] / "fixtures"
TRUTH = json.loads((FIXTURES / "expected.json").read_text())
REFUSED = {"odd/legacy.pt": r"before torch 1\.6"} | {
    name: r"'model\.conjugate'"
    for name, known in TRUTH.items()
    if known["format"] == "torch" and "model.conjugate" in known["tensors"]
}
FILES = [
    name
    for name, known in TRUTH.items()
    if known["format"] in ("torch", "safetensors") and name not in REFUSED
]

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def opened(path: Path) -> Catalog:
    names = (
        [item.name for item in path.glob("*.index.json")] or ["model.safetensors"]
        if path.is_dir()
        else [path.name]
    )
    root = path if path.is_dir() else path.parent
    opener = open_torchfile if names[0].endswith((".pt", ".pth", ".ckpt")) else open_safetensors
    return opener(LocalFiles(root), tuple(names), str(path), str(path))


def truth(name: str) -> dict[str, tuple[list[int], str, str]]:
    return {key: (t["shape"], t["dtype"], t["sha256"]) for key, t in TRUTH[name]["tensors"].items()}


def told(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[list[int], str, str]]:
    return {
        name: (
            list(tensor.shape),
            str(tensor.dtype)[6:],
            hashlib.sha256(raw_bytes(tensor)).hexdigest(),
        )
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("name", FILES)
def test_what_is_read_is_the_truth(name):
    catalog = opened(FIXTURES / name)
    assert told({tensor.name: read(catalog, tensor.name) for tensor in catalog.tensors}) == truth(
        name
    )
    if catalog.format == "torch":
        paths = {tensor.name: list(tensor.path) for tensor in catalog.tensors}
        assert paths == {key: t["path"] for key, t in TRUTH[name]["tensors"].items()}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(name):
    with pytest.raises(SourceError, match=REFUSED[name]) as caught:
        opened(FIXTURES / name)
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize("name", FILES)
def test_what_is_written_again_is_the_truth(name, tmp_path):
    catalog = opened(FIXTURES / name)
    entries = [OutputTensor(t.name, t.path, t, t.dtype) for t in catalog.tensors]
    run(catalog, lay_out(entries), tmp_path / "flat.pt", Settings())
    assert told(torch.load(tmp_path / "flat.pt", weights_only=True, mmap=True)) == truth(name)

    kept, ties = keep_first(entry for entry in entries if refusal(entry.dtype) is None)
    expected = {key: fact for key, fact in truth(name).items() if by_name(fact[1]).safetensors}
    run(catalog, lay_out_file(kept, ties=ties), tmp_path / "one.safetensors", Settings())
    loaded = safetensors.torch.load_file(tmp_path / "one.safetensors")
    assert told(loaded | {dropped: loaded[held] for dropped, held in ties.items()}) == expected

    run(
        catalog,
        lay_out_directory(kept, max(1, sum(e.nbytes for e in kept) // 3)),
        tmp_path / "hf",
        Settings(),
    )
    again = opened(tmp_path / "hf")
    assert told({t.name: read(again, t.name) for t in again.tensors}) == told(loaded)


@pytest.mark.parametrize("name", FILES)
def test_a_cast_on_the_way_is_torch_own(name, tmp_path):
    catalog = opened(FIXTURES / name)
    half = by_name("bfloat16")
    entries = [
        OutputTensor(t.name, t.path, t, half if t.dtype.is_castable else t.dtype)
        for t in catalog.tensors
    ]
    run(catalog, lay_out(entries), tmp_path / "half.pt", Settings())
    found = told(torch.load(tmp_path / "half.pt", weights_only=True))
    originals = {t.name: (t, read(catalog, t.name)) for t in catalog.tensors}
    assert found == told(
        {n: v.to(torch.bfloat16) if t.dtype.is_castable else v for n, (t, v) in originals.items()}
    )


@pytest.mark.parametrize("name", [name for name in FILES if TRUTH[name]["format"] == "torch"])
def test_nesting_and_plain_objects_survive_both_formats(name, tmp_path):
    catalog = opened(FIXTURES / name)
    entries = [
        OutputTensor(t.name, t.path, t, t.dtype) for t in catalog.tensors if t.dtype.safetensors
    ]
    objects = [item for item in catalog.objects if is_plain(item.inline)]
    nesting = catalog.nesting if catalog.nested else None
    first = lay_out_file(entries, nesting=nesting, objects=objects)
    run(catalog, first, tmp_path / "via.safetensors", Settings())
    middle = opened(tmp_path / "via.safetensors")
    back = [OutputTensor(t.name, t.path, t, t.dtype) for t in middle.tensors]
    restored = middle.nesting if middle.nested else None
    run(
        middle,
        lay_out(back, nesting=restored, objects=middle.objects),
        tmp_path / "back.pt",
        Settings(),
    )
    run(
        catalog,
        lay_out(entries, nesting=nesting, objects=objects),
        tmp_path / "straight.pt",
        Settings(),
    )
    one, two = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in ("back", "straight"))
    assert shape_of(one) == shape_of(two)


def shape_of(value: object) -> object:
    """A state dict in a form that `==` compares: tensors as digests, dicts without order, types kept."""
    if isinstance(value, torch.Tensor):
        return told({"": value})
    if isinstance(value, dict):
        return {"dict": {repr(key): shape_of(item) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return (type(value).__name__, [shape_of(item) for item in value])
    return repr(value)
