"""What this package records beside tensors (nesting, plain objects, ties, digests) is itself proved by a checksum."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ema_ckpt
from ema_ckpt import SourceError, verify
from ema_ckpt.formats.safetensors import writer
from tests.checkpoints import save_dcp

NUMBER = b"12345"  # stands once in each record, as a key of a dict


def state() -> dict[str, object]:
    return {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)},
        "optimizer": {"state": {int(NUMBER): {"step": torch.tensor(1.0)}}},
        "extra": {"note": "a plain value"},
    }


class Written:
    """A checkpoint of ours, and the bytes of its record in one of its files."""

    def __init__(self, path: Path, file: Path) -> None:
        self.path, self.file = path, file
        self.raw = file.read_bytes()

    def replace(self, old: bytes, new: bytes) -> None:
        assert self.raw.count(old) == 1, old
        assert len(old) == len(new), "nothing else moves"
        self.file.write_bytes(self.raw.replace(old, new))


@pytest.fixture(params=["plain", "compact", "DCP"])
def written(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Written:
    torch.save(state(), tmp_path / "source.pt")
    if request.param == "DCP":
        ema_ckpt.convert(tmp_path / "source.pt", tmp_path / "out")
        return Written(tmp_path / "out", tmp_path / "out" / "ema_ckpt.json")
    monkeypatch.setattr(writer, "_LOST", {request.param: ""})
    ema_ckpt.convert(tmp_path / "source.pt", tmp_path / "out.safetensors")
    return Written(tmp_path / "out.safetensors", tmp_path / "out.safetensors")


READERS: dict[str, Callable[[Path, Path], object]] = {
    "convert": lambda path, out: ema_ckpt.convert(path, out.with_suffix(".pt")),
    "consolidate": lambda path, out: ema_ckpt.consolidate(path, out, tree="model"),
    "reshard": lambda path, out: ema_ckpt.reshard(path, out, 2),
    "open": lambda path, out: ema_ckpt.open(path),
}


def test_a_changed_value_in_a_record_is_refused_by_every_verb(
    written: Written, tmp_path: Path
) -> None:
    assert verify(written.path).status == "sound"
    at = written.raw.rindex(NUMBER, 0, written.raw.rindex(b"crc32"))
    changed = bytearray(written.raw)
    changed[at] ^= 2  # another number, as good as the one that was written
    written.file.write_bytes(changed)
    for quick in (False, True):
        found = verify(written.path, quick=quick)
        assert found.status == "damaged"
        (problem,) = [p for p in found.problems if p.code == "checksum"]
        assert problem.file == written.file.name
    assert verify(written.path).checked_bytes > 0, "the payload was read all the same"
    for verb, read in READERS.items():
        with pytest.raises(SourceError, match="own CRC-32 differs") as caught:
            read(written.path, tmp_path / f"out of {verb}")
        assert caught.value.code == "checksum"
    assert "checksum" in [w.code for w in ema_ckpt.inspect(written.path).warnings]


def test_no_flipped_bit_of_a_record_is_sound(written: Written) -> None:
    """From its start to the entry of its checksum, one byte at a time, every third."""
    quote = b'"' if written.path.is_dir() else b'\\"'
    start = written.raw.index(b"{" + quote + b"version")
    end = written.raw.rindex(quote + b"crc32" + quote)
    sound = []
    for at in range(start, end, 3):
        changed = bytearray(written.raw)
        changed[at] ^= 1 << at % 7
        written.file.write_bytes(changed)
        try:
            if verify(written.path, threads=1).status == "sound":
                sound.append((at, bytes(changed[at - 20 : at + 20])))
        except ema_ckpt.EmaCkptError:
            continue
    assert not sound


@pytest.mark.parametrize("written", ["DCP"], indirect=True)
def test_a_record_that_another_program_laid_out_anew_is_as_good(written: Written) -> None:
    """A pretty-printer changes no value; an editor that does is found out."""
    document = json.loads(written.raw)
    written.file.write_text(json.dumps(document, indent=2))
    assert verify(written.path).status == "sound"
    document["tuples"].append(["extra"])
    written.file.write_text(json.dumps(document, indent=2))
    assert [p.code for p in verify(written.path).problems] == ["checksum"]


def test_the_checksum_is_that_of_the_text_before_it(tmp_path: Path) -> None:
    """As another program computes it."""
    source = save_dcp(tmp_path / "source", state())
    ema_ckpt.reshard(source, tmp_path / "out", 2)
    text = (tmp_path / "out" / "ema_ckpt.json").read_bytes()
    rest, comma, last = text.rpartition(b',"crc32":')
    assert (comma, json.loads(last[:-1])) == (b',"crc32":', f"crc32:{zlib.crc32(rest + b'}'):08x}")


def test_a_record_of_an_older_version_is_read_and_its_objects_are_not_proved(
    tmp_path: Path,
) -> None:
    torch.save(state(), tmp_path / "source.pt")
    path = tmp_path / "out.safetensors"
    ema_ckpt.convert(tmp_path / "source.pt", path)
    raw = path.read_bytes()
    nbytes = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + nbytes])
    record = json.loads(header["__metadata__"]["ema_ckpt"])
    del record["crc32"]
    header["__metadata__"]["ema_ckpt"] = json.dumps(record)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + nbytes :])
    with ema_ckpt.open(path) as ckpt:
        assert ckpt.objects == {"extra.note": "a plain value"}
    found = verify(path)
    assert (found.status, found.problems) == ("unproven", ())
    assert any("'extra.note'" in w.message for w in found.warnings if w.code == "unchecked")
    verify(path, manifest=tmp_path / "sums")
    assert verify(path, manifest=tmp_path / "sums").status == "sound"
