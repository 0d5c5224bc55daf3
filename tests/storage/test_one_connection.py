"""A store with one connection that threads may not share, as those of sftp and ftp are."""

from __future__ import annotations

import ftplib
import gc
import io
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

import ema_ckpt
from ema_ckpt.storage.directories import is_folder, modified_at, stamps_of
from ema_ckpt.storage.files import open_files
from ema_ckpt.storage.object_store import ObjectStore, ObjectStream
from ema_ckpt.storage.remote import Patience

DCP = "dcp/fsdp2-w4"


class OneConnection(MemoryFileSystem):
    """Notes each time that a second thread comes in before the first one has its answer."""

    protocol = "oneconn"
    collisions: ClassVar[list[str]] = []
    users: ClassVar[set[int]] = set()
    asked_by: ClassVar[dict[int, int]] = {}  # threads that asked for bytes

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("oneconn://", "memory://", 1))


def alone(name: str) -> Callable[..., Any]:
    inner = getattr(MemoryFileSystem, name)

    def method(self: OneConnection, *args: Any, **options: Any) -> Any:
        me = threading.get_ident()
        if self.users - {me}:
            self.collisions.append(name)
        is_first = me not in self.users
        self.users.add(me)
        if name == "cat_file":
            self.asked_by[me] = self.asked_by.get(me, 0) + 1
        try:
            time.sleep(0.002)
            return inner(self, *args, **options)
        finally:
            if is_first:
                self.users.discard(me)

    return method


for _name in ("info", "ls", "cat_file", "rm_file", "open", "mv", "makedirs", "modified"):
    setattr(OneConnection, _name, alone(_name))


@pytest.fixture
def store(fixtures: Path) -> Iterator[str]:
    fsspec.register_implementation("oneconn", OneConnection, clobber=True)
    plain = MemoryFileSystem()
    for file in (fixtures / DCP).iterdir():
        if file.is_file():
            plain.pipe_file(f"/one/run/{file.name}", file.read_bytes())
    OneConnection.collisions.clear()
    OneConnection.asked_by.clear()
    yield "oneconn://one"
    plain.rm("/one", recursive=True)
    OneConnection.clear_instance_cache()


def test_threads_ask_one_at_a_time(store: str) -> None:
    """Two threads that read from one sftp connection take each other's answers, and wait for ever."""
    source = open_files(f"{store}/run")
    names = [name for name in source.listing() if name.endswith(".distcp")]
    other = ObjectStore(store)  # the same instance writes meanwhile

    def use(number: int) -> int:
        name = names[number % len(names)]
        with other.stream(f"out/{number}") as stream:
            stream.write(source.read(name, number, 100))
            stream.complete()
        assert other.read(f"out/{number}") == source.read(name, number, 100)
        other.delete([f"out/{number}"])
        return source.size(name)

    with ThreadPoolExecutor(4) as pool:
        sizes = pool.map(use, range(24))
        for name in names:  # fsspec gives the same instance to the thread that made it
            assert not stamps_of(f"{store}/run", [name])[name].failure
            assert modified_at(f"{store}/run/{name}") is not None
        assert all(sizes)
    assert len(OneConnection.asked_by) > 1
    assert not OneConnection.collisions


@pytest.mark.parametrize("verb", ["verify", "consolidate"])
def test_verbs_with_threads_ask_one_at_a_time(store: str, verb: str, tmp_path: Path) -> None:
    out = () if verb == "verify" else (f"{store}/out.safetensors",)
    getattr(ema_ckpt, verb)(f"{store}/run", *out, threads=4)
    assert not OneConnection.collisions
    if out:
        assert ema_ckpt.verify(*out).status == "sound"


class WholeFiles(MemoryFileSystem):
    """Reads a whole file whatever part is asked for, as the client of sshfs does."""

    protocol = "wholefiles"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("wholefiles://", "memory://", 1))

    def cat_file(self, path: str, **options: Any) -> bytes:
        return bytes(super().cat_file(path))


def test_a_client_that_knows_no_ranges_reads_them_from_an_open_file(store: str) -> None:
    """Each range was the whole file, which was asked for four times and then refused."""
    fsspec.register_implementation("wholefiles", WholeFiles, clobber=True)
    source = open_files("wholefiles://one/run")
    name = next(name for name in source.listing() if name.endswith(".distcp"))
    whole = MemoryFileSystem().cat_file(f"/one/run/{name}")
    assert source.read(name, 5, 100) == whole[5:105]
    assert ema_ckpt.verify("wholefiles://one/run").status == "sound"
    ema_ckpt.reshard("wholefiles://one/run", "wholefiles://one/copy", 2)
    ema_ckpt.reshard("wholefiles://one/run", "wholefiles://one/copy", 3, overwrite=True)
    assert ema_ckpt.verify("wholefiles://one/copy").status == "sound"


class Pending(io.BytesIO):
    """A file that is sent when it is closed, to a directory that has to be there."""

    def __init__(self, filesystem: MemoryFileSystem, path: str) -> None:
        super().__init__()
        self._filesystem, self._path = filesystem, path

    def close(self) -> None:
        if not self.closed:
            if not self._filesystem.isdir(self._path.rpartition("/")[0]):
                raise RuntimeError("409 Conflict")
            MemoryFileSystem().pipe_file(self._path, self.getvalue())
            super().close()

    def discard(self) -> None:
        super().close()

    def __del__(self) -> None:
        self.close()  # one that could not be sent is sent again when it is collected


class SentAtClose(MemoryFileSystem):
    """Sends a file when it is closed, as the client of WebDAV does."""

    protocol = "atclose"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("atclose://", "memory://", 1))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return Pending(self, path) if mode == "wb" else super()._open(path, mode, **options)


def test_a_directory_is_made_where_files_are_sent_when_they_are_closed(store: str) -> None:
    fsspec.register_implementation("atclose", SentAtClose, clobber=True)
    ema_ckpt.consolidate("atclose://one/run", "atclose://one/new/hf", max_shard_size="1KB")
    assert ema_ckpt.verify("atclose://one/new/hf").status == "sound"
    gc.collect()
    assert not [name for name in MemoryFileSystem().find("/one/new") if "probe" in name]


class Appended(AbstractBufferedFile):
    """A file that is begun in its place, and grows with every piece that is sent."""

    def _initiate_upload(self) -> None:
        MemoryFileSystem().pipe_file(self.path, b"")

    def _upload_chunk(self, final: bool = False) -> bool:
        plain = MemoryFileSystem()
        plain.pipe_file(self.path, plain.cat_file(self.path) + self.buffer.getvalue())
        return True

    def discard(self) -> None:
        MemoryFileSystem().rm_file(self.path)


class InPlace(MemoryFileSystem):
    """Writes files in their place, as the client of FTP does, whose class is that of the stores'."""

    protocol = ("inplace", "ftp")
    renames = True

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("inplace://", "memory://", 1))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "wb":
            return super()._open(path, mode, **options)
        return Appended(self, path, mode, block_size=500)

    def rm_file(self, path: str) -> None:
        if not self.exists(path):
            raise RuntimeError("550 No such file or directory")
        super().rm_file(path)

    def mv(self, old: str, new: str, **options: Any) -> None:
        if self.renames or not self.exists(new):
            super().mv(old, new, **options)


def stop_after(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, left = ObjectStream.write, [nbytes]

    def write(self: ObjectStream, data: bytes) -> int:
        left[0] -= len(data)
        if left[0] < 0:
            raise KeyboardInterrupt
        return usual(self, data)

    monkeypatch.setattr(ObjectStream, "write", write)


@pytest.mark.parametrize("nbytes", [0, 600, 2000])
def test_nobody_sees_half_a_file_that_is_written_in_its_place(
    store: str, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over ftp:// the first bytes went over the old target; a new file was called another run's."""
    fsspec.register_implementation("inplace", InPlace, clobber=True)
    out, plain = "inplace://one/new/one.safetensors", MemoryFileSystem()
    ema_ckpt.consolidate("inplace://one/run", out)
    ema_ckpt.reshard("inplace://one/run", "inplace://one/new/dcp", 2)
    assert ema_ckpt.verify(out).status == "sound"
    ema_ckpt.consolidate("inplace://one/run", out, dtype="bf16", overwrite=True)
    old = plain.cat_file("/one/new/one.safetensors")
    names = plain.find("/one/new")
    for write in (
        lambda: ema_ckpt.consolidate("inplace://one/run", out, overwrite=True),
        lambda: ema_ckpt.reshard("inplace://one/run", "inplace://one/new/dcp", 3, overwrite=True),
    ):
        with monkeypatch.context() as patch:
            stop_after(nbytes, patch)
            with pytest.raises(KeyboardInterrupt):
                write()
        gc.collect()  # what was given up is not sent either when it is collected
    assert plain.cat_file("/one/new/one.safetensors") == old
    assert plain.find("/one/new") == names
    assert ema_ckpt.verify("inplace://one/new/dcp").status == "sound"


def test_a_store_that_renames_nothing_over_another_file_says_so(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HDFS answers a rename that it has not done, and says so in a word that nobody reads."""
    fsspec.register_implementation("inplace", InPlace, clobber=True)
    monkeypatch.setattr(InPlace, "renames", False)
    out, plain = "inplace://one/new/one.safetensors", MemoryFileSystem()
    ema_ckpt.consolidate("inplace://one/run", out, dtype="bf16")
    old = plain.cat_file("/one/new/one.safetensors")
    with pytest.raises(ema_ckpt.AccessError, match="did not give"):
        ema_ckpt.consolidate("inplace://one/run", out, overwrite=True)
    assert plain.cat_file("/one/new/one.safetensors") == old
    assert plain.find("/one/new") == ["/one/new/one.safetensors"]


class Answering(ftplib.FTP):
    """A client whose server lists one directory, or says something else instead."""

    instead: ClassVar[list[str]] = []

    def connect(self, *_: object, **__: object) -> str:
        return ""

    login = connect

    def close(self) -> None:
        pass

    def mlsd(self, path: str = "", facts: object = ()) -> Iterator[tuple[str, dict[str, str]]]:
        said = self.instead.pop(0) if self.instead else ""
        self.file = io.StringIO(f"{said or '226 done'}\r\n")
        self.getresp()
        if path.strip("/") == "runs":
            yield "ema.safetensors", {"type": "file", "size": "123", "modify": "20250101"}
        else:
            yield "runs", {"type": "dir"}

    def dir(self, *_: object) -> None:
        self.file = io.StringIO("550 No such file or directory.\r\n")
        self.getresp()


@pytest.mark.parametrize(
    ("said", "name", "reason"),
    [
        ("450 busy", "runs/ema.safetensors", "450 busy"),
        ("421 Too many connections", "runs", "421 Too many"),
        ("550 Permission denied.", "runs/ema.safetensors", "550 Permission"),
    ],
)
def test_ftp_that_does_not_list_is_no_missing_file(
    said: str, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec takes each of them for an empty directory: a checkpoint was damaged, or not there."""
    monkeypatch.setattr("fsspec.implementations.ftp.FTP", Answering)
    monkeypatch.setattr("ema_ckpt.storage.remote._READ_PATIENCE", Patience((0.0,), 5.0))
    url = f"ftp://nobody@localhost/{name}"
    assert is_folder(url) is (name == "runs")
    assert is_folder("ftp://nobody@localhost/runs/other") is None
    monkeypatch.setattr(Answering, "instead", [said] * 2)
    with pytest.raises(ema_ckpt.AccessError, match=reason):
        is_folder(url)
    monkeypatch.setattr(Answering, "instead", ["550 No such file or directory."])
    assert is_folder(url) is None
    monkeypatch.setattr(Answering, "instead", ["450 busy"])
    assert is_folder(url) is (name == "runs")  # asked again
