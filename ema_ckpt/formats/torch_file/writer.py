"""Lay out a file that `torch.load(weights_only=True, mmap=True)` reads: a stored zip.

Members, in order: `data.pkl`, `byteorder`, `data/0`, `data/1` …, `version`, and `ema_ckpt.json`
with digests. Payloads begin at multiples of 64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ema_ckpt.core.box import row_major_strides, whole
from ema_ckpt.core.catalog import Diagnostic, Nesting, Object
from ema_ckpt.core.crc import crc32
from ema_ckpt.core.errors import TargetError
from ema_ckpt.core.write_plan import HeaderBytes, OutputTensor, WriteItem, keep_first
from ema_ckpt.formats import sidecar
from ema_ckpt.formats.nesting import renest
from ema_ckpt.formats.pickle.tensors import StorageRef, TensorRef
from ema_ckpt.formats.pickle.writer import dumps
from ema_ckpt.formats.torch_zip.writer import Member, ZipLayout


@dataclass(frozen=True)
class TorchWritePlan:
    """One torch file.

    `stored` are the tensors with a payload of their own; `owner` names, for each tensor, the one
    whose payload it shares; `read_as` has the name that a reader gives it, after its place in the
    file: a planner of a user's own may have stored it under another.
    """

    tensors: tuple[OutputTensor, ...]
    stored: tuple[OutputTensor, ...]
    owner: Mapping[str, str]
    read_as: Mapping[str, str]
    pickle: bytes
    warnings: Sequence[Diagnostic] = ()
    marker = ""

    @cached_property
    def _zip(self) -> ZipLayout:
        members = [
            Member("data.pkl", len(self.pickle), self.pickle),
            Member("byteorder", 6, b"little"),
        ]
        members += [Member(f"data/{key}", item.nbytes) for key, item in enumerate(self.stored)]
        members.append(Member("version", 2, b"3\n"))
        members.append(Member(sidecar.SIDECAR, len(self._sidecar({}))))
        return ZipLayout("archive", members)

    @property
    def files(self) -> Mapping[str, int]:
        """The one file."""
        return {"": self._zip.nbytes}

    @cached_property
    def items(self) -> Sequence[WriteItem]:
        """One item for each storage."""
        offsets = self._zip.offsets[2:]
        return tuple(
            WriteItem(tensor, whole(tensor.source.shape), "", offset)
            for tensor, offset in zip(self.stored, offsets, strict=False)
        )

    def fixed_bytes(self) -> Iterator[HeaderBytes]:
        """Yield nothing: small records lie in one piece with the headers of payloads."""
        return iter(())

    def item_bytes(self, index: int, crc: int) -> Iterator[HeaderBytes]:
        """Yield the header of one payload, and the small records before it."""
        yield HeaderBytes("", *self._zip.payload_header(index, crc))

    def header_bytes(
        self, crcs: Sequence[int], digests: Mapping[str, int]
    ) -> Iterator[HeaderBytes]:
        """Yield the record of digests and the central directory."""
        content = self._sidecar(digests)
        crc = crc32(content)
        yield HeaderBytes("", *self._zip.payload_header(len(self.stored), crc))
        yield HeaderBytes("", self._zip.offsets[-1], content)
        yield HeaderBytes("", *self._zip.end_bytes([*crcs, crc]))

    def _sidecar(self, digests: Mapping[str, int]) -> bytes:
        named = [tensor._replace(name=self.read_as[tensor.name]) for tensor in self.tensors]
        complete = {
            self.read_as[tensor.name]: digests.get(self.owner[tensor.name], 0)
            for tensor in self.tensors
        }
        document = sidecar.make_document(named, complete)
        return sidecar.dump(document).encode("utf-8")


def lay_out(
    tensors: Sequence[OutputTensor],
    *,
    nesting: Nesting | None = None,
    objects: Sequence[Object] = (),
    expand_ties: bool = False,
    order: Sequence[str] = (),
) -> TorchWritePlan:
    """Lay out one torch file.

    Args:
        nesting: None for a flat `{name: tensor}`; else containers are made from the paths of
            tensors and objects.
        objects: inline plain objects; without nesting they lie at the top under their names.
        expand_ties: give a tensor that shares its storage a copy of its own.
        order: names of tensors and objects together, in the order of the state dict.

    Raises:
        TargetError: `unsupported` for an object that is not plain or a name that is no Unicode,
            `name-collision` if two entries meet.
    """
    _check_supported(tensors, objects)
    stored, ties = (list(tensors), {}) if expand_ties else keep_first(tensors)
    owner = {tensor.name: ties.get(tensor.name, tensor.name) for tensor in tensors}
    keys = {tensor.name: str(number) for number, tensor in enumerate(stored)}
    values: list[tuple[OutputTensor | Object, object]] = [
        (tensor, _tensor_ref(tensor, keys[owner[tensor.name]])) for tensor in tensors
    ]
    values += [(item, item.inline) for item in objects]
    place = {name: index for index, name in enumerate(order)}
    values.sort(key=lambda pair: place.get(pair[0].name, len(place)))
    leaves = [((item.name,) if nesting is None else item.path, value) for item, value in values]
    pickle = dumps(renest(leaves, nesting or Nesting()))
    read_as = {}
    for tensor in tensors:
        path = (tensor.name,) if nesting is None else tensor.path
        read_as[tensor.name] = ".".join(map(str, path))
    return TorchWritePlan(tuple(tensors), tuple(stored), owner, read_as, pickle)


def _tensor_ref(tensor: OutputTensor, key: str) -> TensorRef:
    shape = tensor.source.shape
    if tensor.dtype.storage_class:
        storage = StorageRef(key, tensor.dtype, tensor.source.numel)
    else:
        storage = StorageRef(key, None, tensor.nbytes)
    return TensorRef(storage, tensor.dtype, 0, shape, row_major_strides(shape))


def _check_supported(tensors: Sequence[OutputTensor], objects: Sequence[Object]) -> None:
    for item in objects:
        try:
            dumps(item.inline)
        except TypeError as error:
            problem = f"object {item.name!r} does not fit into a torch file: {error}"
            message = f"{problem}; leave it out with --exclude"
            raise TargetError("unsupported", message, tensor=item.name) from None
    for tensor in tensors:
        if not all(map(sidecar.is_unicode, (tensor.name, *map(str, tensor.path)))):
            problem = f"a torch file cannot store a tensor of the name {tensor.name!r}"
            message = f"{problem}; rename it with --rename"
            raise TargetError("unsupported", message, tensor=tensor.name)
