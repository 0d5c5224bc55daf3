"""What a file is by its first bytes, whatever its name says.

A kind is one row of `_KINDS`: a test of the first bytes, who reads it, what it is in words. To add
a kind: a row here, a case in `tests/formats/test_content.py`, and a fixture if a reader is new.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ema_ckpt.core.catalog import Files
from ema_ckpt.core.errors import SourceError
from ema_ckpt.formats.text_kinds import text_in
from ema_ckpt.formats.torch_checkpointing.metadata import is_metadata
from ema_ckpt.formats.torch_zip.reader import Window, archive_in, read_directory

SAFETENSORS, TORCH, INDEX, NOT_READ = "safetensors", "torch", "index", ""
TORCH_CHECKPOINTING = "torch-checkpointing"
_PEEK_NBYTES = 512
_MAX_INDEX_NBYTES = 100_000_000
_TAR_MEMBERS = (b"sys_info\0", b"pickle\0", b"storages\0", b"tensors\0")  # torch's, before 0.2


class Kind(NamedTuple):
    """A kind of file: the format whose reader opens it (or `NOT_READ`), what it is, what to do."""

    reader: str
    what: str
    remedy: str = ""


def _begins(*magics: bytes) -> Callable[[bytes, int], bool]:
    return lambda first, _nbytes: first.startswith(magics)


def _is_safetensors(first: bytes, nbytes: int) -> bool:
    if len(first) < 9:
        return False
    header_nbytes = int.from_bytes(first[:8], "little")
    return first[8:9] in b"{ " and 0 < header_nbytes <= nbytes - 8


_STATE_DICT = "save the state dict that it was made from"
_KINDS: tuple[tuple[Callable[[bytes, int], bool], Kind], ...] = (
    (_is_safetensors, Kind(SAFETENSORS, "a safetensors file")),
    (
        lambda first, _nbytes: is_metadata(first),
        Kind(TORCH_CHECKPOINTING, "the metadata of torch_checkpointing"),
    ),
    # Protocols 2 to 5, and 0 and 1 of a dictionary; the torch forms before 1.6 among them.
    (
        _begins(b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"(dp", b"}q\0"),
        Kind(TORCH, "a pickle"),
    ),
    (lambda first, _nbytes: first.startswith(_TAR_MEMBERS), Kind(TORCH, "torch's tar form")),
    (
        lambda first, _nbytes: first[257:262] == b"ustar",
        Kind(NOT_READ, "a tar archive", "unpack it"),
    ),
    (
        _begins(b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf"),
        Kind(NOT_READ, "a compressed file", "unpack it"),
    ),
    (_begins(b"\x93NUMPY"), Kind(NOT_READ, "a NumPy array (.npy)", _STATE_DICT)),
    (_begins(b"\x89HDF\r\n"), Kind(NOT_READ, "an HDF5 file", _STATE_DICT)),
    (_begins(b"GGUF"), Kind(NOT_READ, "a GGUF file", _STATE_DICT)),
    (_begins(b"\x7fELF"), Kind(NOT_READ, "a program")),
)


def kind_of(source: Files, name: str) -> Kind | None:
    """Recognise the file `name` of `source`; None for what no row knows, such as a damaged file.

    Raises:
        SourceError: `missing-file`, `unreadable`, `truncated-file`.
    """
    nbytes = source.size(name)
    first = source.read(name, 0, min(nbytes, _PEEK_NBYTES))
    if first.startswith(b"PK\3\4"):
        return _kind_of_zip(source, name, nbytes)
    for fits, kind in _KINDS:
        if fits(first, nbytes):
            return kind
    is_json = first.lstrip().startswith(b"{") and nbytes <= _MAX_INDEX_NBYTES
    if is_json and b'"weight_map"' in source.read(name, 0, nbytes):
        return Kind(INDEX, "an index of shards")
    return None


def in_words(source: Files, name: str) -> str:
    """Say what a file of no known kind is, for an error."""
    first = source.read(name, 0, min(source.size(name), _PEEK_NBYTES))
    if not first:
        return "an empty file"
    if name.endswith(".msgpack"):
        return "a msgpack file, as flax writes them; load it there, and save a torch state dict"
    return text_in(first) or "of no kind that is known here"


def _kind_of_zip(source: Files, name: str, nbytes: int) -> Kind:
    """Tell a torch file from other zip archives; what is damaged is left to the torch reader."""
    torch_file = Kind(TORCH, "a zip archive of torch.save")
    try:
        _, entries = read_directory(archive_in(Window(source, name, 0, nbytes)))
    except SourceError:
        return torch_file
    inner, endings = set(), set()
    for entry in entries:
        inner.add(entry.name.partition("/")[2] or entry.name)
        endings.add(entry.name.rpartition(".")[2])
    if "constants.pkl" in inner:
        return Kind(NOT_READ, "a TorchScript program, not a checkpoint", "save its state_dict()")
    if "data.pkl" in inner:
        return torch_file
    if endings == {"npy"}:
        return Kind(NOT_READ, "an .npz archive of NumPy arrays", _STATE_DICT)
    if "dist-info/WHEEL" in endings:
        return Kind(NOT_READ, "a Python wheel")
    return Kind(NOT_READ, "a zip archive that torch.save did not write")
