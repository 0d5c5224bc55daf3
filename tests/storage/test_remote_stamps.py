"""What file systems say of a file tells whether it is another one now, though it has the same length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import ema_ckpt
from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.storage.directories import stamps_of

LFS = {"size": 5000, "sha256": "12" * 32, "pointer_size": 132}
# As listings have them, before and after: of a model on the Hub, of a bucket there, of MLSD, of a
# server without MLSD, of WebHDFS and of GitHub.
SAID: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hub": tuple(
        {"blob_id": blob, "lfs": LFS, "xet_hash": None, "last_commit": None, "security": None}
        for blob in ("aa" * 20, "bb" * 20)
    ),
    "bucket": ({"xet_hash": "aa" * 32, "mtime": None}, {"xet_hash": "bb" * 32, "mtime": None}),
    "ftp": (
        {"modify": "20261201020000", "perm": "adfrw", "unique": "801g2"},
        {"modify": "20261201020500", "perm": "adfrw", "unique": "801g2"},
    ),
    "ftp without MLSD": ({"modify": "Dec 1 02:00"}, {"modify": "Dec 1 02:05"}),
    "webhdfs": ({"modificationTime": 1796090400000}, {"modificationTime": 1796090700000}),
    "github": ({"sha": "aa" * 20}, {"sha": "bb" * 20}),
}


class Saying(MemoryFileSystem):
    """Says of each file what another file system would, and puts another file there meanwhile."""

    protocol = "saying"
    said: ClassVar[tuple[dict[str, Any], dict[str, Any]]]
    replaced: ClassVar[bool]
    reads: ClassVar[int]
    replaced_at: ClassVar[int]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("saying://", "memory://", 1))

    def _as_said(self, info: dict[str, Any]) -> dict[str, Any]:
        plain = {key: info[key] for key in ("name", "size", "type")}
        return plain | (self.said[self.replaced] if info["type"] == "file" else {})

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return self._as_said(super().info(path, **options))

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        items = super().ls(path, detail=True, **options)
        return [self._as_said(item) if detail else item["name"] for item in items]

    def cat_file(self, path: str, *range_: Any, **options: Any) -> bytes:
        cls = type(self)
        if path.endswith(".distcp"):
            cls.reads += 1
            cls.replaced = cls.reads == cls.replaced_at or cls.replaced
        return super().cat_file(path, *range_, **options)


@pytest.fixture(params=SAID)
def run(request: pytest.FixtureRequest, fixtures: Path) -> Iterator[str]:
    fsspec.register_implementation("saying", Saying, clobber=True)
    Saying.said, Saying.replaced = SAID[request.param], False
    Saying.reads = Saying.replaced_at = 0
    plain = MemoryFileSystem()
    for file in (fixtures / "dcp/fsdp2-w2").iterdir():
        if file.is_file():
            plain.pipe_file(f"/saying/run/{file.name}", file.read_bytes())
    yield "saying://saying/run"
    plain.rm("/saying", recursive=True)
    Saying.clear_instance_cache()


def test_a_stamp_is_the_same_until_the_file_is_another(run: str) -> None:
    before = stamps_of(run, ["__0_0.distcp"])
    assert before == stamps_of(run, ["__0_0.distcp"])
    Saying.replaced = True
    assert before != stamps_of(run, ["__0_0.distcp"])


@pytest.mark.parametrize("verb", ["verify", "consolidate"])
def test_a_file_replaced_meanwhile_is_a_change(run: str, verb: str, tmp_path: Path) -> None:
    out = (tmp_path / "out.safetensors",) if verb == "consolidate" else ()
    getattr(ema_ckpt, verb)(run, *out, threads=1)
    for file in out:
        file.unlink()
    Saying.reads, Saying.replaced_at = 0, Saying.reads
    with pytest.raises(EmaCkptError) as caught:
        getattr(ema_ckpt, verb)(run, *out, threads=1)
    assert Saying.replaced
    assert caught.value.code == "source-changed"
    assert not list(tmp_path.iterdir())
