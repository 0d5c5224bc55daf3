"""What this package records beside tensors: digests, nesting, plain objects and ties, as one JSON
document.

It lies in `__metadata__["ema_ckpt"]` of a safetensors file, in `ema_ckpt.json` of a directory and
in a zip record of that name in a torch file:

    {"version": 1,
     "digests": {name: {"crc32": "crc32:8hex", "dtype": "float32", "shape": [2, 3]}},
     "files": [name, ...]          the files of a directory that the digests speak of
     "paths": {name: [part, ...]}  of a nested checkpoint, where a path is not simply (name,)
     "keys": [[path, key], ...], "tuples": [path, ...]   what paths leave open
     "objects": [{"name", "path", "value"}],  "ties": {dropped name: kept name}}

A digest is the CRC-32 of the tensor's logical row-major little-endian bytes. It has a fixed width,
so that the size of a document is known before any payload is.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from ema_ckpt.core.catalog import Nesting, Object, Tensor
from ema_ckpt.core.dtypes import DTYPE_NAMES, by_name
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.write_plan import OutputTensor
from ema_ckpt.formats.pickle.limits import check_expanded_size
from ema_ckpt.formats.pickle.safe_globals import Global

KEY = "ema_ckpt"
SIDECAR = "ema_ckpt.json"
VERSION = 1
# A list of which a part was selected keeps its places; one far beyond what is there would make
# whoever rebuilds the list allocate without bound.
_MAX_INDEX = 1 << 20

Path = tuple[str | int, ...]


class Digest(NamedTuple):
    """A recorded CRC-32 and the dtype and shape of the tensor it was taken of."""

    crc: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """One parsed document. `version` 0: there was none; above `VERSION`: nothing but the number was
    read.
    """

    version: int = 0
    digests: Mapping[str, Digest] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    paths: Mapping[str, Path] = field(default_factory=dict)
    nesting: Nesting | None = None
    objects: tuple[Object, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)


def load_json(text: str | bytes, file: str) -> Any:
    """Parse JSON as strictly as a format deserves that other tools read too: no NaN, no key given
    twice.

    Raises:
        SourceError: `bad-header`.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "it nests too deeply" if isinstance(error, RecursionError) else str(error)
        raise SourceError(
            "bad-header", f"{file}: not the JSON it should be: {reason}", file=file
        ) from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} is given twice")
    return found


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def dump(
    entries: Iterable[OutputTensor],
    digests: Mapping[str, int],
    *,
    files: Sequence[str] = (),
    nesting: Nesting | None = None,
    objects: Iterable[Object] = (),
    ties: Mapping[str, str] | None = None,
    tied_paths: Mapping[str, Path] | None = None,
) -> str:
    """The document for `entries`; digests not known yet are written as zeros, at the same width.

    With `tied_paths` of dropped names, a reader lists these again, as the same bytes under two
    names.
    """
    entries = list(entries)
    document: dict[str, object] = {
        "version": VERSION,
        "digests": {e.name: _digest(e, digests) for e in entries},
    }
    if files:
        document["files"] = list(files)
    if nesting is not None:
        paths = {e.name: e.path for e in entries if e.path != (e.name,)} | dict(tied_paths or {})
        document["paths"] = {name: list(path) for name, path in paths.items()}
        document["keys"] = [[list(path), encode(key)] for path, key in nesting.keys.items()]
        document["tuples"] = [list(path) for path in nesting.tuples]
    written = [{"name": o.name, "path": list(o.path), "value": encode(o.inline)} for o in objects]
    if written:
        document["objects"] = written
    if ties:
        document["ties"] = dict(ties)
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _digest(entry: OutputTensor, digests: Mapping[str, int]) -> dict[str, object]:
    crc = digests.get(entry.name, 0)
    return {
        "crc32": f"crc32:{crc:08x}",
        "dtype": entry.dtype.name,
        "shape": list(entry.source.shape),
    }


def parse(text: str | bytes, file: str) -> Record:
    """Read a document of ours that lies in, or is, the file `file`.

    Raises:
        SourceError: `bad-header` if it is not what this package writes.
    """
    document = load_json(text, file)
    try:
        return _record(document, file)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        message = f"{file}: the record of ema_ckpt in it is damaged ({error}); remove it to read without digests"
        raise SourceError("bad-header", message, file=file) from None


def _record(document: Any, file: str) -> Record:
    version = document["version"]
    if type(version) is not int or version < VERSION:
        raise ValueError(f"version {version!r}")
    if version > VERSION:
        return Record(version)
    digests = {name: _parse_digest(value) for name, value in document["digests"].items()}
    raw_objects = document.get("objects", [])
    ties = {name: _text(kept) for name, kept in document.get("ties", {}).items()}
    limit = _MAX_INDEX + len(digests) + len(raw_objects) + len(ties)
    objects = tuple(
        Object(
            _text(o["name"]),
            _path(o["path"], limit),
            file,
            inline=decode(o["value"]),
            is_inline=True,
        )
        for o in raw_objects
    )
    return Record(
        version=VERSION,
        digests=digests,
        files=tuple(_text(name) for name in document.get("files", ())),
        paths={name: _path(parts, limit) for name, parts in document.get("paths", {}).items()},
        nesting=_nesting(document, limit) if "paths" in document else None,
        objects=objects,
        ties=ties,
    )


def _nesting(document: Any, limit: int) -> Nesting:
    keys = {_path(path, limit): _hashable(decode(key)) for path, key in document.get("keys", [])}
    return Nesting(
        keys, frozenset(_path(path, limit) if path else () for path in document.get("tuples", []))
    )


def _parse_digest(value: Any) -> Digest:
    label, _, digits = _text(value["crc32"]).partition(":")
    if label != "crc32" or len(digits) != 8 or digits.strip("0123456789abcdef"):
        raise ValueError(f"{value['crc32']!r} is not a CRC-32")
    shape = tuple(value["shape"])
    if not all(type(size) is int for size in shape):
        raise ValueError(f"{value['shape']!r} is not a shape")
    return Digest(int(digits, 16), _text(value["dtype"]), shape)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _path(parts: Any, limit: int) -> Path:
    if not isinstance(parts, list) or not parts or not all(_is_part(part, limit) for part in parts):
        raise ValueError(f"{parts!r} is not a path")
    return tuple(parts)


def _is_part(part: object, limit: int) -> bool:
    return isinstance(part, str) or (type(part) is int and 0 <= part < limit)


def digests_of(record: Record, tensors: Iterable[Tensor], file: str) -> dict[str, int]:
    """The recorded CRC-32 of each tensor that has one.

    Raises:
        SourceError: `checksum` if a digest was taken of another dtype or shape than the tensor now
            has.
    """
    found: dict[str, int] = {}
    for tensor in tensors:
        digest = record.digests.get(tensor.name) or record.digests.get(
            record.ties.get(tensor.name, "")
        )
        if digest is None:
            continue
        if (digest.dtype, digest.shape) != (tensor.dtype.name, tensor.shape):
            message = (
                f"{file}: tensor {tensor.name!r} is {tensor.dtype.name} {list(tensor.shape)}, but its digest was taken "
                f"of {digest.dtype} {list(digest.shape)}; if the file was rewritten on purpose, remove the record"
            )
            raise SourceError("checksum", message, tensor=tensor.name, file=file)
        found[tensor.name] = digest.crc
    return found


def encode(value: object) -> object:
    """A plain value as JSON from which `decode` restores it exactly, types included.

    What JSON lacks becomes an object with one key that begins with `$`: tuples, sets, bytes,
    dtypes, complex and non-finite numbers, dicts with keys that are not text.

    Raises:
        TypeError: naming the type that is not plain.
    """
    check_expanded_size(value)
    try:
        return _encode(value)
    except RecursionError:
        raise TypeError("a value that contains itself, or nests too deeply, is not plain") from None


def _encode(value: object) -> object:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return _encodable(cast("str", value))
    if kind is int:
        # Python's JSON reader refuses numbers of more than 4300 digits.
        number = cast("int", value)
        return number if number.bit_length() <= 4096 else {"$int": hex(number)}
    if kind is float:
        real = cast("float", value)
        return real if math.isfinite(real) else {"$float": repr(real)}
    if kind is list:
        return [_encode(item) for item in cast("list[object]", value)]
    if kind in (tuple, set, frozenset):
        return {f"${kind.__name__}": [_encode(item) for item in cast("tuple[object, ...]", value)]}
    if kind in (bytes, bytearray):
        return {f"${kind.__name__}": base64.b64encode(cast("bytes", value)).decode("ascii")}
    if kind is complex:
        pair = cast("complex", value)
        return {"$complex": [_encode(pair.real), _encode(pair.imag)]}
    if isinstance(value, dict):
        return _encode_dict(value)
    if isinstance(value, Global) and value.module == "torch" and value.name in DTYPE_NAMES:
        return {"$dtype": value.name}
    raise TypeError(f"a value of type {kind.__name__} is not plain")


def _encodable(text: str) -> str:
    if not is_unicode(text):
        raise TypeError(f"the text {text!r} is not valid Unicode")
    return text


def is_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8: pickles and JSON escapes can carry lone
    surrogates.
    """
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def _encode_dict(value: dict[Any, Any]) -> object:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {_encodable(key): _encode(item) for key, item in value.items()}
    return {"$dict": [[_encode(key), _encode(item)] for key, item in value.items()]}


def decode(value: Any) -> object:
    """The value that `encode` was given.

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
    if tag == "$dict":
        return {_hashable(decode(key)): decode(item) for key, item in content}
    if tag == "$float":
        return float(content)
    if tag == "$int":
        return int(content, 16)
    if tag == "$complex":
        real, imaginary = (decode(part) for part in content)
        return complex(cast("float", real), cast("float", imaginary))
    if tag in ("$bytes", "$bytearray"):
        data = base64.b64decode(content, validate=True)
        return data if tag == "$bytes" else bytearray(data)
    if tag == "$dtype":
        return Global("torch", by_name(content).name, None)
    kinds: dict[str, type] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
    if tag not in kinds:
        raise ValueError(f"{tag!r} is not a kind of plain value")
    return kinds[tag](decode(item) for item in content)


def _hashable(key: object) -> object:
    hash(key)
    return key
