"""Files and directories on a disk and behind a URL: the same answers, the same errors."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import ema_ckpt
from ema_ckpt.core.catalog import Files
from ema_ckpt.core.errors import AccessError, SourceError
from ema_ckpt.storage import files as storage
from ema_ckpt.storage import remote
from ema_ckpt.storage.directories import is_folder, join, list_folder, parent_of
from ema_ckpt.storage.files import LocalFiles, is_url, local_path, open_files, safe_name
from ema_ckpt.storage.stage_names import find_interrupted_switch, is_stage_name, stage_path

DATA = bytes(range(100))


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A directory with a file `a`, an empty one `b` and a directory `sub` with a file `c`."""
    if request.param == "local":
        (tmp_path / "sub").mkdir()
        for name, data in (("a", DATA), ("b", b""), ("sub/c", DATA)):
            (tmp_path / name).write_bytes(data)
        return str(tmp_path)
    fsspec = pytest.importorskip("fsspec")
    filesystem = fsspec.filesystem("memory")
    for name, data in (("a", DATA), ("b", b""), ("sub/c", DATA)):
        filesystem.pipe(f"/{tmp_path.name}/{name}", data)
    return f"memory://{tmp_path.name}"


def test_files_are_read_at_positions(root: str) -> None:
    source = open_files(root)
    assert (source.size("a"), source.size("b"), source.size("sub/c")) == (100, 0, 100)
    assert source.read("sub/c", 7, 20) == DATA[7:27]
    assert source.read("b", 0, 0) == b""
    buffer = bytearray(93)
    source.read_into("a", 7, memoryview(buffer))
    assert buffer == DATA[7:]
    assert {"a", "b", "sub"} <= set(source.listing())
    source.close()


@pytest.mark.parametrize(
    ("name", "offset", "nbytes", "code"),
    [
        ("a", 50, 51, "truncated-file"),
        ("a", -1, 5, "truncated-file"),
        ("b", 0, 1, "truncated-file"),
        ("none", 0, 1, "missing-file"),
        ("../a", 0, 1, "unsafe-path"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    root: str, name: str, offset: int, nbytes: int, code: str
) -> None:
    source: Files = open_files(root)
    with pytest.raises(SourceError) as caught:
        source.read(name, offset, nbytes)
    assert (caught.value.code, caught.value.file) == (code, name)
    if offset >= 0:
        with pytest.raises(SourceError) as caught:
            source.read_into(name, offset, memoryview(bytearray(nbytes)))
        assert caught.value.code == code
    source.close()


def test_more_files_are_read_than_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "max_open_files", lambda: 3)
    for number in range(10):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 10)
    source, before = LocalFiles(tmp_path), len(os.listdir("/proc/self/fd"))
    for number in [*range(10), *range(10)]:
        assert source.size(str(number)) == 10
        assert source.read(str(number), 0, 10) == bytes([number]) * 10
    assert len(os.listdir("/proc/self/fd")) == before + 3
    source.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    source = LocalFiles(tmp_path)
    for name in ("pipe", "folder"):
        with pytest.raises(SourceError) as caught:
            source.size(name)
        assert caught.value.code == "unsafe-path"


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a\0", "a\\b", "../a"]
)
def test_names_that_leave_the_directory_are_refused(name: str) -> None:
    with pytest.raises(SourceError, match="plain relative name"):
        safe_name(name)


@pytest.mark.parametrize("name", ["a", "a/b", "...", ".a", "a..b/c", "a\n"])
def test_plain_names_are_kept(name: str) -> None:
    assert safe_name(name) == name


@pytest.mark.parametrize("name", ["a\\b.safetensors", "a\\b.pt"])
def test_a_backslash_in_a_name_that_the_user_gave_is_a_letter(tmp_path: Path, name: str) -> None:
    """Names in metadata may not hold one, as it leads elsewhere on other systems."""
    safetensors.numpy.save_file({"w": np.ones(2)}, tmp_path / "plain.safetensors")
    ema_ckpt.convert(tmp_path / "plain.safetensors", tmp_path / name)
    assert ema_ckpt.verify(tmp_path / name).status == "sound"
    assert ema_ckpt.diff(tmp_path / "plain.safetensors", tmp_path / name).identical == 1


def test_urls_are_told_from_paths() -> None:
    assert all(map(is_url, ["s3://a", "memory://", "git+ssh://x", "a1://"]))
    assert not any(map(is_url, ["/a", "c://a", "a_b://", "+://", "++://", "a:b://c", "://a"]))
    assert local_path("file:///a/b") == "/a/b"
    assert local_path("/a/b") == "/a/b"
    assert local_path("s3://a/b") is None


def test_directories_are_listed_by_kind(root: str) -> None:
    folder = list_folder(root)
    assert (folder.folders, folder.files) == (("sub",), ("a", "b"))
    assert list_folder(join(root, "sub")).files == ("c",)
    assert is_folder(root)
    assert is_folder(join(root, "a")) is False
    assert is_folder(join(root, "none")) is None
    assert parent_of(join(root, "a")) == root


def test_a_directory_that_is_not_there_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        list_folder(str(tmp_path / "none"))
    assert caught.value.code == "unreadable"


def test_an_unknown_kind_of_url_names_the_missing_package() -> None:
    for call in (open_files, list_folder, is_folder):
        with pytest.raises(SourceError) as caught:
            call("nosuchscheme://a/b")
        assert caught.value.code == "missing-extra"


def test_an_interrupted_switch_is_read_past(tmp_path: Path) -> None:
    target = tmp_path / "out"
    stage = stage_path(target, "0a1b2c3d")
    assert is_stage_name(stage.name)
    stage.mkdir()
    (stage / "new").mkdir()
    assert find_interrupted_switch(target) is None
    for name, expected in (("new", stage / "new"), ("..", None), ("gone", None), ("a/b", None)):
        (stage / ".ema-ckpt.note").write_text(f'{{"old": "x", "new": "{name}"}}')
        assert find_interrupted_switch(target) == expected
    (stage / ".ema-ckpt.note").write_text('{"old": "x", "new": "new"}')
    target.mkdir()
    assert find_interrupted_switch(target) is None


def test_the_latest_step_behind_a_url_is_a_path_for_every_verb(
    tmp_path: Path, fixtures: Path
) -> None:
    filesystem, _ = remote.open_filesystem("memory://")
    root = f"memory://{tmp_path.name}/runs"
    source = fixtures / "dcp/fsdp2-w2"
    for step in (1, 2):
        for file in source.iterdir():
            filesystem.pipe(f"/{tmp_path.name}/runs/step_{step}/{file.name}", file.read_bytes())
        found = ema_ckpt.latest(root)
        assert str(found).endswith(f"step_{step}")
        assert ema_ckpt.verify(str(found)).status == "sound"
    filesystem.rm(f"/{tmp_path.name}/runs/step_2", recursive=True)
    assert str(ema_ckpt.latest(root)).endswith("step_1")


def test_files_are_closed_where_an_error_leaves_nobody_to_close_them(fixtures: Path) -> None:
    """`open` reads the file before it finds two names that join to one."""
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(SourceError, match="share the name"):
        ema_ckpt.open(fixtures / "nasty" / "name-collision.pt")
    assert set(os.listdir("/proc/self/fd")) <= before


def test_what_is_deleted_meanwhile_is_not_called_missing(root: str) -> None:
    """A file beside others that are still there is missing; one that goes with them was removed."""
    source = open_files(root)
    assert source.size("a") == 100
    with pytest.raises(SourceError) as lost:
        source.size("none")
    assert lost.value.code == "missing-file"
    if is_url(root):
        fsspec = pytest.importorskip("fsspec")
        fsspec.filesystem("memory").rm(root.removeprefix("memory:/"), recursive=True)
    else:
        shutil.rmtree(root)
    with pytest.raises(AccessError, match="retention jobs") as caught:
        source.size("sub/c")
    assert caught.value.code == "source-changed"
    source.close()


def _is_cached(path: Path, offset: int) -> bool:
    """Whether a page is in memory, by `mincore`: a read, even one that may not wait, fetches it."""
    resident = ctypes.create_string_buffer(1)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        array = np.frombuffer(mapped, np.uint8)
        page = ctypes.c_void_p(array.ctypes.data + offset)
        failed = ctypes.CDLL(None).mincore(page, ctypes.c_size_t(mmap.PAGESIZE), resident)
        del array
    assert not failed
    return bool(resident.raw[0] & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="mincore as Linux has it")
@pytest.mark.parametrize("is_asked", [False, True])
def test_the_next_window_is_fetched_ahead(is_asked: bool, tmp_path: Path) -> None:
    mib = 1 << 20
    path = tmp_path / "big"
    data = os.urandom(mib)
    with path.open("wb") as file:
        for _ in range(48):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        deadline = time.monotonic() + 10
        while _is_cached(path, 23 * mib) and time.monotonic() < deadline:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            time.sleep(0.05)  # pages that something still holds are kept at first
    if _is_cached(path, 23 * mib):
        pytest.skip("a file system that keeps everything in memory")
    source = LocalFiles(tmp_path)
    if is_asked:
        source.read_ahead(8 * mib)
    found = bytearray(mib)
    source.read_into("big", 7 * mib + 512 * 1024, memoryview(found))  # across the end of a window
    assert found == data[mib // 2 :] + data[: mib // 2]
    deadline = time.monotonic() + 20 * is_asked
    while not _is_cached(path, 23 * mib) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _is_cached(path, 23 * mib) == is_asked
    source.close()
