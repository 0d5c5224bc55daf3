"""Torch's zip archives, against Python's zipfile and torch itself, in both directions."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ema_ckpt.core.errors import EmaCkptError, SourceError
from ema_ckpt.formats.torch_zip.reader import read_archive
from ema_ckpt.formats.torch_zip.writer import ALIGNMENT, Member, ZipLayout
from ema_ckpt.storage.files import LocalFiles


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def build(layout: ZipLayout, payloads: list[bytes]) -> bytes:
    out = bytearray(layout.nbytes)
    given_ = iter(payloads)
    for member, offset in zip(layout.members, layout.offsets, strict=True):
        if member.data is None:
            out[offset : offset + member.nbytes] = next(given_)
    for offset, data in layout.header_bytes([zlib.crc32(p) for p in payloads]):
        out[offset : offset + len(data)] = data
    return bytes(out)


@pytest.mark.parametrize("at", [0, 13, 5000])
def test_records_are_where_torch_put_them(tmp_path: Path, at: int) -> None:
    raw = saved({"a": torch.arange(1000.0), "b": torch.ones(3, 5).t(), "c": torch.zeros(0)})
    (tmp_path / "file").write_bytes(b"\x55" * at + raw + b"\x66" * 9)
    source = LocalFiles(tmp_path)
    archive = read_archive(source, "file", at, len(raw))
    with zipfile.ZipFile(io.BytesIO(raw)) as oracle:
        expected = {name.partition("/")[2]: oracle.read(name) for name in oracle.namelist()}
    assert archive.records.keys() == expected.keys()
    for name, record in archive.records.items():
        assert source.read("file", record.offset, record.nbytes) == expected[name]
        assert record.crc == zlib.crc32(expected[name])
    source.close()


def test_checksums_switched_off_are_unknown_not_bad(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        (tmp_path / "file").write_bytes(saved(torch.arange(10)))
    finally:
        torch.serialization.set_crc32_options(True)
    source = LocalFiles(tmp_path)
    archive = read_archive(source, "file", 0, source.size("file"))
    assert {record.crc for record in archive.records.values()} == {None}
    source.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_damaged_archives_raise_nothing_but_our_errors(tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(saved(torch.arange(4000.0)))
    spots = st.integers(0, 1500) | st.integers(len(raw) - 1500, len(raw) - 1)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(spots)] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.integers(0, len(raw)) | st.just(len(raw)))
    (tmp_path / "file").write_bytes(raw[:cut])
    source = LocalFiles(tmp_path)
    try:
        archive = read_archive(source, "file", 0, cut)
        for name in archive.records:
            if name != "data/0":
                archive.read(name)
    except EmaCkptError as error:
        assert error.code in ("bad-header", "truncated-file", "unsupported", "checksum")
    source.close()


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="Duplicate"),
        zipfile.ZipFile(tmp_path / "file", "w") as out,
    ):
        out.writestr("archive/data.pkl", b"one")
        out.writestr("archive/data.pkl", b"two")
    source = LocalFiles(tmp_path)
    with pytest.raises(SourceError, match="stands twice") as caught:
        read_archive(source, "file", 0, source.size("file"))
    assert caught.value.code == "bad-header"
    source.close()


def test_compressed_records_are_unsupported(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "file", "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("archive/data.pkl", b"x" * 1000)
    source = LocalFiles(tmp_path)
    with pytest.raises(SourceError, match="compressed") as caught:
        read_archive(source, "file", 0, source.size("file"))
    assert caught.value.code == "unsupported"
    source.close()


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=200)), min_size=1, max_size=6))
def test_laid_out_archives_are_whole_zips(content: list[tuple[bool, bytes]]) -> None:
    members = [
        Member(f"data/{i}", len(raw), None if late else raw)
        for i, (late, raw) in enumerate(content)
    ]
    layout = ZipLayout("archive", members)
    out = build(layout, [raw for late, raw in content if late])
    with zipfile.ZipFile(io.BytesIO(out)) as oracle:
        assert oracle.testzip() is None
        assert [oracle.read(f"archive/data/{i}") for i in range(len(content))] == [
            raw for _, raw in content
        ]
        for info in oracle.infolist():
            header = out[info.header_offset : info.header_offset + 30]
            crc, packed, nbytes = struct.unpack_from("<LLL", header, 14)
            assert (crc, packed, nbytes) == (info.CRC, info.file_size, info.file_size), (
                "local headers are true"
            )
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)


@pytest.mark.thorough
def test_many_records_need_zip64(tmp_path: Path) -> None:
    layout = ZipLayout("archive", [Member(f"data/{i}", 1, b"x") for i in range(70_000)])
    (tmp_path / "file").write_bytes(build(layout, []))
    with zipfile.ZipFile(tmp_path / "file") as oracle:
        assert len(oracle.namelist()) == 70_000
    source = LocalFiles(tmp_path)
    assert len(read_archive(source, "file", 0, layout.nbytes).records) == 70_000
    source.close()


def test_records_beyond_four_gigabytes(tmp_path: Path) -> None:
    """Sparse: the zeros between the frames take no disk."""
    nbytes = (1 << 32) + 4096
    layout = ZipLayout(
        "archive", [Member("data/0", nbytes), Member("data/1", 5), Member("version", 2, b"3\n")]
    )
    with (tmp_path / "file").open("wb") as out:
        out.truncate(layout.nbytes)
        for offset, data in layout.header_bytes([0x12345678, zlib.crc32(bytes(5))]):
            out.seek(offset)
            out.write(data)
    with zipfile.ZipFile(tmp_path / "file") as oracle:
        assert oracle.getinfo("archive/data/0").file_size == nbytes
        assert oracle.read("archive/data/1") == bytes(5)
        assert oracle.read("archive/version") == b"3\n"
    source = LocalFiles(tmp_path)
    records = read_archive(source, "file", 0, layout.nbytes).records
    assert (records["data/0"].nbytes, records["data/0"].crc) == (nbytes, 0x12345678)
    assert records["data/1"].offset == layout.offsets[1]
    source.close()
