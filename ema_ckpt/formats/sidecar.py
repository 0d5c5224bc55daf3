"""Read and write the sidecar: digests, nesting, plain objects and ties, as one JSON document.

It lies in `__metadata__["ema_ckpt"]` of a safetensors file, in `ema_ckpt.json` of a directory and
in a zip record of that name in a torch file:

    {"version": 1,
     "digests": {name: {"crc32": "crc32:8hex", "dtype": "float32", "shape": [2, 3]}},
     "files": [name, ...]          the files of a directory that the digests are about
     "paths": {name: [part, ...]}  of a nested checkpoint, where a path is not simply (name,)
     "keys": [[path, key], ...], "tuples": [path, ...]   facts that paths lack (`Nesting`)
    "order": [name, ...]          of tensors and objects together, where lists apart cannot tell it
     "objects": [{"name", "path", "value"}],  "ties": {dropped name: kept name},
    "describes": {file: "crc32:8hex"}  the index that this document goes with; of one safetensors
                        file the tensors' entries in its header, under "" if it holds the document
    "chunks": {file: [[offset, "crc32:8hex"], ...]}  of each item of a DCP file
    "crc32": "crc32:8hex"}        of this document without this entry, which is the last

The CRC-32 of an item is that of its payload: of the storage of a tensor, of an object's pickle. A
digest is the CRC-32 of the tensor's logical row-major little-endian bytes. It has a fixed width,
so that the size of a document is known before any payload is.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, NamedTuple

from ema_ckpt.core.catalog import Diagnostic, Files, Nesting, Object, Path, Problem, Tensor
from ema_ckpt.core.collisions import Collisions
from ema_ckpt.core.dtypes import DTYPE_NAMES, by_name
from ema_ckpt.core.errors import RefusedError, SourceError, about
from ema_ckpt.core.write_plan import OutputTensor
from ema_ckpt.formats import record_checksum
from ema_ckpt.formats.pickle.limits import check_expanded_size
from ema_ckpt.formats.pickle.safe_globals import Global
from ema_ckpt.formats.pickle.typed_values import Device, Layout, PathText, Size
from ema_ckpt.formats.record_chunks import FileChunks, with_chunks

KEY = "ema_ckpt"
ITSELF = ""
SIDECAR = "ema_ckpt.json"
CHANGED_BYTES = "changed or damaged since it was written"
OTHER_BYTES = f"not the bytes that {SIDECAR} records: the file is damaged or another save's"
VERSION = 1
# A list of which a part was selected keeps its indices; one far beyond the number of entries would
# make whoever rebuilds the list allocate without bound.
_MAX_INDEX = 1 << 20
_TORCH_DTYPES = frozenset(("torch", name) for name in DTYPE_NAMES)
_MALFORMED = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    RecursionError,
)
_SEQUENCES: dict[str, type] = {"$tuple": tuple, "$size": Size, "$set": set, "$frozenset": frozenset}
_TEXTS: dict[str, type[str]] = {"$device": Device, "$layout": Layout}


class Digest(NamedTuple):
    """A recorded CRC-32 and the dtype and shape of the tensor it was taken of."""

    crc: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A parsed document. `version` is 0 if there is none; above `VERSION` all else is unread.

    `sequence` are the tensors in the order of the state dict, with a digest or without.
    """

    version: int = 0
    digests: Mapping[str, Digest] = field(default_factory=dict)
    sequence: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    paths: Mapping[str, Path] = field(default_factory=dict)
    nesting: Nesting | None = None
    objects: tuple[Object, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    describes: Mapping[str, int] = field(default_factory=dict)
    chunks: Mapping[tuple[str, int], int] = field(default_factory=dict)

    def is_stale(self, file: str, crc: int) -> bool:
        """Whether `file`, of this CRC-32 now, has been written again since."""
        return self.describes.get(file, crc) != crc


def load_json(text: str | bytes, file: str) -> Any:
    """Parse JSON strictly, since other tools read it too: no NaN, no key given twice.

    Raises:
        SourceError: `bad-header`.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        reason = "it nests too deeply"
    except ValueError as error:
        reason = str(error)
    message = f"{file}: not the JSON it should be: {reason}"
    raise SourceError("bad-header", message, file=file)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} is given twice")
            seen.add(key)
    return document


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def make_document(
    tensors: Iterable[OutputTensor],
    digests: Mapping[str, int],
    *,
    files: Sequence[str] = (),
    nesting: Nesting | None = None,
    objects: Iterable[Object] = (),
    ties: Mapping[str, str] | None = None,
    tied_paths: Mapping[str, Path] | None = None,
    order: Sequence[str] = (),
    has_paths: bool = False,
    describes: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Make the document for `tensors`; digests not known yet are zeros of the same width.

    With `tied_paths` of dropped names, a reader lists these again, as the same bytes under two
    names. `order` is that of all names in the state dict, if it matters. With `has_paths`, the
    format itself keeps the paths.
    """
    tensors, ties = list(tensors), dict(ties or {})
    document: dict[str, Any] = {
        "version": VERSION,
        "digests": {tensor.name: _digest(tensor, digests) for tensor in tensors},
    }
    if files:
        document["files"] = list(files)
    if nesting is not None:
        document |= _dump_nesting(nesting, tensors, tied_paths or {}, has_paths)
    encoded = _dump_objects(objects)
    names = [*document["digests"], *ties, *(item["name"] for item in encoded)]
    further = {
        "objects": encoded,
        "ties": ties,
        "order": [] if list(order) == names else list(order),
        "describes": _crc_texts(describes or {}),
    }
    return document | {key: value for key, value in further.items() if value}


def _dump_objects(objects: Iterable[Object]) -> list[dict[str, Any]]:
    return [
        {"name": item.name, "path": item.path, "value": encode(item.inline)} for item in objects
    ]


def _crc_texts(crcs: Mapping[str, int]) -> dict[str, str]:
    return {name: crc_text(crc) for name, crc in crcs.items()}


def dump(document: Mapping[str, Any]) -> str:
    """Write a document and its checksum, in UTF-8 where that can be."""
    return record_checksum.with_checksum(_dump(document))


def dump_file(document: Mapping[str, Any], chunks: Iterable[FileChunks]) -> list[bytes]:
    """Write a document as `dump` does, in parts, with what is recorded of items of DCP files."""
    return record_checksum.with_checksum_in_parts(with_chunks(_dump(document), chunks))


def _dump(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A name in a DCP may be no Unicode, which UTF-8 cannot write and an escape can.
    return text if is_unicode(text) else json.dumps(document, separators=(",", ":"))


def _dump_nesting(
    nesting: Nesting,
    tensors: Iterable[OutputTensor],
    tied_paths: Mapping[str, Path],
    has_paths: bool,
) -> dict[str, object]:
    """Return paths, where the format does not keep them, and what paths lack."""
    found: dict[str, object] = {}
    if not has_paths:
        # Tuples become lists in JSON.
        paths = {item.name: item.path for item in tensors if item.path != (item.name,)}
        found["paths"] = paths | dict(tied_paths)
    elif not nesting.keys and not nesting.tuples:
        return found
    keys = [[path, encode(key)] for path, key in nesting.keys.items()]
    return found | {"keys": keys, "tuples": sorted(nesting.tuples, key=repr)}


def _digest(tensor: OutputTensor, digests: Mapping[str, int]) -> dict[str, object]:
    crc, shape = digests.get(tensor.name, 0), list(tensor.source.shape)
    return {"crc32": crc_text(crc), "dtype": tensor.dtype.name, "shape": shape}


def crc_text(crc: int) -> str:
    """Write a CRC-32 as a document has it."""
    return f"crc32:{crc:08x}"


def read(source: Files, problems: list[Problem] | None = None) -> Sidecar:
    """Parse the sidecar of a directory. Raises as `parse`; SourceError `missing-file`."""
    return parse(source.read(SIDECAR, 0, source.size(SIDECAR)), SIDECAR, problems)


def parse(text: str | bytes, file: str, problems: list[Problem] | None = None) -> Sidecar:
    """Parse the document that lies in, or is, the file `file`.

    Args:
        problems: gets it, instead of an error, if the document is not what its checksum says.

    Raises:
        SourceError: `bad-header` if this package did not write it so, `checksum`.
    """
    document = load_json(text, file)
    check_own(text, document, file, problems)
    return parse_document(lambda: document, file)


def check_own(
    text: str | bytes, document: object, file: str, problems: list[Problem] | None = None
) -> None:
    """Compare a document with its own checksum, which older ones lack; as `parse` does."""
    if not isinstance(document, dict) or record_checksum.KEY not in document:
        return
    if not record_checksum.is_changed(text, document, _dump):
        return
    reason = "the record of ema_ckpt in it is damaged, or was changed, since it was written"
    remedy = "use another copy, or remove the record to read without digests"
    message = f"{file}: {reason} (its own CRC-32 differs); {remedy}"
    error = SourceError("checksum", message, file=file)
    if problems is None:
        raise error
    problems.append(Problem.of(error))


def parse_document(load: Callable[[], Any], file: str) -> Sidecar:
    """Parse what `load` returns; it may fail as a damaged document does.

    Raises:
        SourceError: `bad-header` if this package did not write it so.
    """
    try:
        document = load()
        return _parse_document(document, file)
    except SourceError as error:
        raise about(error, file=file) from None
    except _MALFORMED as error:
        message = f"{file}: the sidecar of ema_ckpt in it is damaged ({error!r})"
        remedy = "remove it to read without digests"
        raise SourceError("bad-header", f"{message}; {remedy}", file=file) from None


def _parse_document(document: Any, file: str) -> Sidecar:
    version = document["version"]
    if type(version) is not int or version < VERSION:
        raise ValueError(f"version {version!r}")
    if version > VERSION:
        return Sidecar(version)
    digests = {name: _parse_digest(value) for name, value in document["digests"].items()}
    ties = {name: _text(kept) for name, kept in document.get("ties", {}).items()}
    raw_objects = document.get("objects", [])
    limit = _MAX_INDEX + len(digests) + len(raw_objects) + len(ties)
    is_bare = record_checksum.KEY not in document
    objects: list[Object] = []
    for item in raw_objects:
        name, path, value = _text(item["name"]), _path(item["path"], limit), decode(item["value"])
        objects.append(Object(name, path, file, inline=value, is_inline=True, is_bare=is_bare))
    return Sidecar(
        version=VERSION,
        digests=digests,
        sequence=tuple(map(_text, document.get("sequence", digests))),
        files=tuple(map(_text, document.get("files", ()))),
        paths={name: _path(parts, limit) for name, parts in document.get("paths", {}).items()},
        nesting=_nesting(document, limit) if "keys" in document else None,
        objects=tuple(objects),
        ties=ties,
        order=tuple(map(_text, document.get("order", ()))),
        describes={name: _parse_crc(crc) for name, crc in document.get("describes", {}).items()},
        chunks={
            (file, offset): _parse_crc(crc)
            for file, items in document.get("chunks", {}).items()
            for offset, crc in items
        },
    )


def _nesting(document: Any, limit: int) -> Nesting:
    rows = [(_path(path, limit), decode(key)) for path, key in document.get("keys", [])]
    hash(tuple(key for _, key in rows))  # each is a key of a dict
    keys = dict(rows)
    tuples = [_path(path, limit) if path else () for path in document.get("tuples", [])]
    return Nesting(keys, frozenset(tuples))


def _parse_digest(value: Any) -> Digest:
    shape = tuple(value["shape"])
    if not all(type(size) is int for size in shape):
        raise ValueError(f"{value['shape']!r} is not a shape")
    return Digest(_parse_crc(value["crc32"]), _text(value["dtype"]), shape)


def _parse_crc(text: object) -> int:
    algorithm, _, digits = _text(text).partition(":")
    if algorithm != "crc32" or len(digits) != 8 or digits.strip("0123456789abcdef"):
        raise ValueError(f"{text!r} is not a CRC-32")
    return int(digits, 16)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _path(parts: Any, limit: int) -> Path:
    if not isinstance(parts, list) or not parts:
        raise ValueError(f"{parts!r} is not a path")
    for part in parts:
        is_index = type(part) is int and 0 <= part < limit
        if not (is_index or isinstance(part, str)):
            raise ValueError(f"{parts!r} is not a path")
    return tuple(parts)


def stale(file: str) -> Diagnostic:
    """Warn that another program has written `file` since the sidecar beside it was made."""
    message = f"{SIDECAR}: ignored, as {file} was written again since by another program"
    return Diagnostic("stale-file", f"{message}; delete {SIDECAR}, or save again with ema_ckpt")


def stale_header(file: str) -> Diagnostic:
    """Warn that another program has changed the tensors of `file` and kept the record on them."""
    problem = f"{file}: the record of ema_ckpt is ignored, as the tensors were changed since by"
    message = f"{problem} another program: nesting, objects and checksums in it are of others"
    return Diagnostic("stale-file", message)


def unread(error: RefusedError) -> Diagnostic:
    """Warn that the sidecar may not be read; many a server says so of what is not there."""
    return Diagnostic("unchecked", f"{error}; checksums that it may record are not compared")


def digests_of(sidecar: Sidecar, tensors: Iterable[Tensor], file: str) -> dict[str, int]:
    """Collect the recorded CRC-32 of each tensor that has one.

    Raises:
        SourceError: `checksum` if a digest was taken of another dtype or shape than the tensor now
            has.
    """
    crcs: dict[str, int] = {}
    for tensor in tensors:
        kept_name = sidecar.ties.get(tensor.name, "")
        digest = sidecar.digests.get(tensor.name) or sidecar.digests.get(kept_name)
        if digest is None:
            continue
        if (digest.dtype, digest.shape) != (tensor.dtype.name, tensor.shape):
            is_now = f"{file}: tensor {tensor.name!r} is {tensor.dtype.name} {list(tensor.shape)}"
            was = f"its digest was taken of {digest.dtype} {list(digest.shape)}"
            remedy = "if the file was rewritten on purpose, remove the sidecar"
            message = f"{is_now}, but {was}; {remedy}"
            raise SourceError("checksum", message, tensor=tensor.name, file=file)
        crcs[tensor.name] = digest.crc
    return crcs


def encode(value: object) -> object:
    """Convert a plain value to JSON from which `decode` restores it exactly, types included.

    A value that JSON lacks becomes an object with one key that begins with `$`: tuples, sets,
    bytes, dtypes, complex and non-finite numbers, dicts with keys that are not text.

    Raises:
        TypeError: naming the type that is not plain.
    """
    check_expanded_size(value)
    try:
        return _encode(value)
    except RecursionError:
        raise TypeError("a value that contains itself, or nests too deeply, is not plain") from None


def _encode(value: Any) -> object:
    kind = type(value)
    if kind in (bool, NoneType):
        return value
    if kind in (str, PathText):
        return _check_unicode(str(value))
    if kind in (Device, Layout):
        return {f"${kind.__name__.lower()}": _check_unicode(str(value))}
    if kind in (int, float, complex):
        return _encode_number(value)
    if kind in (list, *_SEQUENCES.values()):
        items = [_encode(item) for item in value]
        return items if kind is list else {f"${kind.__name__.lower()}": items}
    if isinstance(value, bytes | bytearray):
        return {f"${kind.__mro__[-2].__name__}": base64.b64encode(value).decode("ascii")}
    if isinstance(value, dict):
        return _encode_dict(value)
    if isinstance(value, Global) and (value.module, value.name) in _TORCH_DTYPES:
        return {"$dtype": value.name}
    raise TypeError(f"a value of type {kind.__name__} is not plain")


def _encode_number(value: Any) -> object:
    if isinstance(value, complex):
        return {"$complex": [_encode(value.real), _encode(value.imag)]}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    # Python's JSON reader refuses numbers of more than 4300 digits.
    return value if value.bit_length() <= 4096 else {"$int": hex(value)}


def _encode_dict(value: dict[Any, Any]) -> object:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {_check_unicode(key): _encode(item) for key, item in value.items()}
    return {"$dict": [[_encode(key), _encode(item)] for key, item in value.items()]}


def _check_unicode(text: str) -> str:
    if not is_unicode(text):
        raise TypeError(f"the text {text!r} is not valid Unicode")
    return text


def is_unicode(text: str) -> bool:
    """Whether `text` can be UTF-8: pickles and JSON escapes can carry lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def decode(value: Any) -> object:
    """Restore the value that `encode` was given.

    Raises:
        ValueError, TypeError: if nothing encodes to this.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$") or len(value) > 1:
        return {key: decode(item) for key, item in value.items()}
    return _decode_tagged(tag, value[tag])


def _decode_tagged(tag: str, content: Any) -> object:
    if tag in _SEQUENCES:
        is_hashed = not issubclass(_SEQUENCES[tag], tuple)
        return _SEQUENCES[tag](_as_keys(list(map(decode, content)), is_hashed))
    if tag in _TEXTS:
        return _TEXTS[tag](_text(content))
    if tag == "$dict":
        keys = _as_keys([decode(row[0]) for row in content])
        return {key: decode(item) for key, (_, item) in zip(keys, content, strict=True)}
    if tag == "$float":
        return float(content)
    if tag == "$int":
        return int(content, 16)
    if tag == "$complex":
        real, imaginary = map(decode, content)
        return complex(real, imaginary)  # type: ignore[call-overload]
    if tag in ("$bytes", "$bytearray"):
        data = base64.b64decode(content, validate=True)
        return data if tag == "$bytes" else bytearray(data)
    if tag == "$dtype":
        return Global("torch", by_name(content).name, None)
    raise ValueError(f"{tag!r} is not a kind of plain value")


def _as_keys(keys: list[Any], hashed: bool = True) -> list[Any]:
    """Return keys of a dict or set (`hashed`), checked before one is built of them."""
    if hashed:
        Collisions().check(keys)
    return keys
