"""Archives that torch's reader and another read differently: refused, never read as only one does."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

import ema_ckpt
from ema_ckpt.core.errors import SourceError
from ema_ckpt.formats.torch_zip.reader import END, END64, LOCATOR64
from tests.checkpoints import save_dcp

W = torch.arange(4.0)


def saved(value: torch.Tensor) -> bytes:
    out = io.BytesIO()
    torch.save({"w": value}, out)
    return out.getvalue()


def refuses(path: Path, problem: str) -> None:
    with pytest.raises(SourceError, match=problem) as caught:
        ema_ckpt.open(path)
    assert caught.value.code == "bad-header"
    assert ema_ckpt.verify(path).status == "damaged"


def two_directories() -> bytes:
    """Two whole archives; the zip64 record leads to the second, the end record to the first."""
    first, second = saved(W), saved(W + 100)
    *_, count, size, start, _ = END.unpack(first[-END.size :])
    directory = bytearray(second[start : start + size])
    at = 0
    while at < size:
        lengths = struct.unpack_from("<HHH", directory, at + 28)
        header = struct.unpack_from("<L", directory, at + 42)[0]
        struct.pack_into("<L", directory, at + 42, header + start)
        at += 46 + sum(lengths)
    both = first[:start] + second[:start]
    other = len(both) + size
    end64 = END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, other)
    locator = LOCATOR64.pack(b"PK\6\7", 0, other + size, 1)
    end = END.pack(b"PK\5\6", 0, 0, count, count, size, len(both), 0)
    return both + first[start : start + size] + directory + end64 + locator + end


def test_two_end_records_that_lead_to_other_bytes(tmp_path: Path) -> None:
    path = tmp_path / "two.pt"
    path.write_bytes(two_directories())
    assert torch.load(path)["w"].equal(W + 100)
    refuses(path, "contradict each other")


def with_twin(name: str) -> bytes:
    """The archive with a record of the same name in capitals behind the first, of other bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(W))) as source, zipfile.ZipFile(out, "w") as target:
        for info in source.infolist():
            target.writestr(info.filename, source.read(info))
            if info.filename.endswith(name):
                folder = info.filename.removesuffix(name)
                other = source.read(info).replace(b"w", b"z")[:: 1 if name == "data.pkl" else -1]
                target.writestr(folder + name.upper(), other)
    return out.getvalue()


@pytest.mark.parametrize("name", ["data.pkl", "data/0"])
def test_names_that_differ_in_case_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / "twin.pt"
    path.write_bytes(with_twin(name))
    refuses(path, "in other letter case")


def test_torch_looks_records_up_without_regard_to_case(tmp_path: Path) -> None:
    path = tmp_path / "twin.pt"
    path.write_bytes(with_twin("data.pkl"))
    assert list(torch.load(path)) == ["z"], "or the test above guards against nothing"


def nested(count: int) -> tuple[bytes, int]:
    """An archive of `count` records, each of which reaches from its header to the end of the last.

    Returns it, and the bytes of all records together.
    """
    header = struct.pack("<4sHHHHHLLLHH", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, 0, 34) + bytes(34)
    data = header * count + bytes(1000)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        target.writestr("archive/data.pkl", b"\x80\x02}.")
        target.writestr("archive/version", b"3\n")
        target.writestr("archive/all", data)
    raw = out.getvalue()
    *_, entries, size, start, _ = END.unpack(raw[-END.size :])
    directory, total = raw[start : start + size], 0
    for index in range(count):
        name = f"archive/data/{index}".encode()
        inner = data[64 * (index + 1) :]
        total += len(inner)
        sizes = zlib.crc32(inner), len(inner), len(inner), len(name)
        at = raw.index(header) + 64 * index
        directory += struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, 0, 0, 0, 0, *sizes, *[0] * 5, at)
        directory += name
    entries += count
    end = END.pack(b"PK\5\6", 0, 0, entries, entries, len(directory), start, 0)
    return raw[:start] + directory + end, total


def test_records_that_share_bytes(tmp_path: Path) -> None:
    path = tmp_path / "nested.pt"
    raw, total = nested(200)
    path.write_bytes(raw)
    assert torch.load(path) == {}
    assert total > 40 * len(raw), "what would be read"
    refuses(path, "records overlap")


END64_BACK = END.size + LOCATOR64.size + END64.size


@pytest.mark.parametrize("back", [END.size + 4, END64_BACK - 16, END64_BACK - 24])
def test_archives_of_several_parts(tmp_path: Path, back: int) -> None:
    """The number of disks in the locator; this disk, and the entries on it, in the zip64 record."""
    raw = bytearray(saved(W))
    raw[-back] ^= 1
    path = tmp_path / "parts.pt"
    path.write_bytes(raw)
    with pytest.raises(RuntimeError):
        torch.load(path)
    refuses(path, "damaged zip archive")


@pytest.mark.parametrize("record", ["data/0", "byteorder"])
def test_a_record_with_the_mark_of_a_folder(tmp_path: Path, record: str) -> None:
    """torch reads nothing of such a record; of a DCP item it then returns memory as it was."""
    data = bytearray(saved(W))
    size, start = END.unpack(data[-END.size :])[5:7]
    name = data.index(f"/{record}".encode(), start, start + size)
    header = data.rindex(b"PK\1\2", start, name)
    data[header + 38] |= 0x10
    path = tmp_path / "folder.pt"
    path.write_bytes(data)
    refuses(path, "the mark of a folder")
    item = save_dcp(tmp_path / "dcp", {"w": W}) / "__0_0.distcp"
    data = bytearray(item.read_bytes())
    data[data.rindex(b"PK\1\2", 0, data.rindex(f"/{record}".encode())) + 38] |= 0x10
    item.write_bytes(data)
    assert ema_ckpt.verify(tmp_path / "dcp").status == "damaged"


def test_folders_of_another_zip_program_are_no_records(tmp_path: Path) -> None:
    """`zip -r` writes an entry for each folder; torch loads the file, and other archives stay what they are."""
    path, other = tmp_path / "again.pt", tmp_path / "code.zip"
    with zipfile.ZipFile(io.BytesIO(saved(W))) as old, zipfile.ZipFile(path, "w") as new:
        folder = old.namelist()[0].partition("/")[0]
        for name in (f"{folder}/", f"{folder}/data/"):
            new.mkdir(name)
        for record in old.infolist():
            new.writestr(record, old.read(record))
    assert torch.load(path)["w"].equal(W)
    assert ema_ckpt.verify(path).status == "sound"
    with zipfile.ZipFile(other, "w") as archive:
        archive.mkdir("src")
        archive.writestr("src/a.py", "pass")
    with pytest.raises(SourceError, match=r"that torch\.save did not write"):
        ema_ckpt.inspect(other)


def changed(place: str) -> bytes:
    """The archive with bits of its directory changed that only torch's reader looks at."""
    data = bytearray(saved(W))
    *_, size, start, _ = END.unpack(data[-END.size :])
    if place == "name":
        data[data.index(b"version", start + size - 200)] ^= 0x80
    elif place == "end record":
        data[data.index(b"PK\6\6") + 4] ^= 4
    else:
        entry = data.rindex(b"PK\1\2", 0, data.index(b"data/0", start))
        flag = {"patch": 0x20, "strongly encrypted": 0x40, "masked": 0x2000}[place]
        data[entry + 8] ^= flag & 0xFF
        data[entry + 9] ^= flag >> 8
    return bytes(data)


@pytest.mark.parametrize("place", ["name", "end record", "patch", "strongly encrypted", "masked"])
def test_bits_of_the_directory_that_only_torch_reads(tmp_path: Path, place: str) -> None:
    path = tmp_path / "changed.pt"
    path.write_bytes(changed(place))
    with pytest.raises((RuntimeError, UnicodeDecodeError)):
        torch.load(path)
    refuses(path, "damaged zip archive")


def unnoticed(place: str) -> bytes:
    """The archive with one bit changed that does not change what torch loads."""
    data = bytearray(saved(W))
    *_, start, _ = END.unpack(data[-END.size :])
    record = data.rindex(b"PK\3\4", 0, data.index(b"data/0"))  # header of the storage
    entry = data.rindex(b"PK\1\2", 0, data.index(b"data/0", start))
    position = {
        "time in the header": record + 10,
        "time in the directory": entry + 12,
        "version that is needed": entry + 6,
        "padding": data.index(b"ZZZZ", record),
        "checksum": entry + 16,
        "method in the header": record + 8,
        "small record": data.index(b"serialization_id") + 100,
        "count in the end record": len(data) - END.size + 8,
    }[place]
    data[position] ^= 1
    return bytes(data)


@pytest.mark.parametrize(
    ("place", "status"),
    [
        ("time in the header", "sound"),
        ("time in the directory", "sound"),
        ("version that is needed", "sound"),
        ("padding", "sound"),
        ("checksum", "damaged"),
        ("method in the header", "damaged"),
        ("small record", "damaged"),
        ("count in the end record", "damaged"),
    ],
)
def test_bits_that_do_not_change_what_torch_loads(tmp_path: Path, place: str, status: str) -> None:
    """Damage is what a checksum covers, and what the archive says twice and differently."""
    path = tmp_path / "changed.pt"
    path.write_bytes(unnoticed(place))
    assert torch.load(path)["w"].equal(W)
    assert ema_ckpt.verify(path).status == status
