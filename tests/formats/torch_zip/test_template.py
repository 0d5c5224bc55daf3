"""Archives that are recognised: what the template says of one is what reading all of it says."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.formats.torch_zip.reader import Record, read_archive
from ema_ckpt.formats.torch_zip.template import ArchiveTemplate, template_of
from ema_ckpt.formats.torch_zip.writer import Member, ZipLayout
from ema_ckpt.storage.files import LocalFiles

PAYLOAD = "data/0"


def by_torch(values: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def without_checksums(values: torch.Tensor) -> bytes:
    torch.serialization.set_crc32_options(False)
    try:
        return by_torch(values)
    finally:
        torch.serialization.set_crc32_options(True)


def by_us(values: torch.Tensor) -> bytes:
    payload = values.numpy().tobytes()
    pickled = Member("data.pkl", 5, b"shape"), Member("byteorder", 6, b"little")
    layout = ZipLayout("archive", [*pickled, Member(PAYLOAD, len(payload)), Member("v", 2, b"3\n")])
    out = bytearray(layout.nbytes)
    out[layout.offsets[2] : layout.offsets[2] + len(payload)] = payload
    for offset, data in layout.header_bytes([zlib.crc32(payload)]):
        out[offset : offset + len(data)] = data
    return bytes(out)


WRITERS = [by_torch, without_checksums, by_us]
Saved = Callable[[torch.Tensor], bytes]


def payload_if_sound(path: Path) -> Record | None:
    """Read the archive `path` as a whole: its payload, or None if a small record is damaged."""
    source = LocalFiles(path.parent)
    try:
        archive = read_archive(source, path.name, 0, source.size(path.name))
        for name in archive.records:
            if name != PAYLOAD:
                archive.read(name)
        return archive.records.get(PAYLOAD)
    except EmaCkptError:
        return None
    finally:
        source.close()


def template(folder: Path, raw: bytes) -> ArchiveTemplate | None:
    (folder / "model").write_bytes(raw)
    source = LocalFiles(folder)
    made = template_of(read_archive(source, "model", 0, len(raw)), PAYLOAD)
    source.close()
    return made


@pytest.mark.parametrize("save", WRITERS)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100
)
@given(data=st.data())
def test_a_recognised_archive_is_what_reading_it_finds(
    tmp_path: Path, save: Saved, data: st.DataObject
) -> None:
    first = save(torch.arange(7.0))
    made = template(tmp_path, first)
    assert made is not None
    second = bytearray(save(torch.arange(7.0) + data.draw(st.integers(1, 9))))
    flips = data.draw(st.lists(st.integers(0, len(second) - 1), max_size=2))
    for place in flips:
        second[place] ^= 1 << data.draw(st.integers(0, 7))
    (tmp_path / "second").write_bytes(second)
    expected = payload_if_sound(tmp_path / "second")

    match = made.match(bytes(second[: made.start]), memoryview(second)[made.stop :])
    if match is not None:
        found = Record(PAYLOAD, made.start, made.stop - made.start, match.crc)
        assert found == expected
    if not flips:
        assert match is not None
        has_checksums = save is not without_checksums
        assert (match.crc == crc32(second[made.start : made.stop])) is has_checksums


def test_a_damaged_archive_is_no_template(tmp_path: Path) -> None:
    raw = bytearray(by_torch(torch.arange(7.0)))
    raw[raw.index(b"little")] ^= 1
    assert template(tmp_path, bytes(raw)) is None


def test_bytes_after_the_end_make_no_template(tmp_path: Path) -> None:
    assert template(tmp_path, by_torch(torch.arange(7.0)) + b"more") is None


def test_a_large_record_beside_the_payload_makes_no_template(tmp_path: Path) -> None:
    members = [Member(PAYLOAD, 4, b"1234"), Member("other", 20_000, bytes(20_000))]
    layout = ZipLayout("archive", members)
    (_, whole), *rest = list(layout.header_bytes([]))
    assert not rest
    assert template(tmp_path, whole) is None
