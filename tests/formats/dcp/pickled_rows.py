"""Pickles of DCP metadata, opcode by opcode: as torch writes them but for what is drawn otherwise."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
CLASSES = {
    "Metadata": METADATA,
    "TensorStorageMetadata": METADATA,
    "BytesStorageMetadata": METADATA,
    "ChunkStorageMetadata": METADATA,
    "MetadataIndex": METADATA,
    "TensorProperties": METADATA,
    "_MEM_FORMAT_ENCODING": METADATA,
    "_StorageInfo": FILESYSTEM,
    "Size": "torch",
    "float32": "torch",
    "bfloat16": "torch",
    "strided": "torch",
}
NUMBERS = [0, 1, 2, 255, 256, 65_535, 65_536, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 47) - 1]
ODD_NUMBERS = [-1, -70_000, 1 << 47, 1 << 55, (1 << 62) - 1, 1 << 62, 1 << 63]
# What leaves an object as it is; or takes it, or more than it, or gives it to another.
NEUTRAL = [b"20", b"N0", b"NN\x860", b"(1", b"]0", b"(NNt0", b"\x95" + bytes(8)]
ODD = [b"0", b"2", b"\x850", b"\x860", b"\x870", b"(", b"b", b"a", b"s", b"R", b"\x81", b"e", b"u"]
ODD += [b"t0", b"l0", b"d0", b"\x8f(", b"\x900", b"N", b"\x85", b"00", b"u(", b"e(", b"\x910"]


class PickledRows:
    """Writes one pickle; how many parts are not as usual depends on `oddness`."""

    def __init__(self, seed: int, oddness: float, oddness_between: float) -> None:
        self.random = Random(seed)
        self.oddness = oddness
        self.oddness_between = oddness_between  # of opcodes between objects
        self.data = bytearray(b"\x80\x04")
        self.count = 0  # memoized objects
        self.known: dict[object, int] = {}  # texts, classes, sizes
        self.classes: dict[str, int] = {}

    def is_odd(self, more: float = 1) -> bool:
        return self.random.random() < self.oddness * more

    def memoize(self) -> int:
        self.data += b"\x94"
        self.count += 1
        return self.count - 1

    def get(self, number: int) -> None:
        if self.is_odd():  # forward, or to anything before
            number = self.random.randrange(self.count + 3)
        is_short = number < 256 and not self.is_odd()
        self.data += b"h" + bytes([number]) if is_short else b"j" + struct.pack("<I", number)

    def push_class(self, name: str) -> None:
        if name not in self.classes:
            for text in (CLASSES[name], name):
                self.text(text)
            self.data += b"\x93"
            self.classes[name] = self.memoize()
        else:
            self.get(self.classes[name])

    def text(self, text: str, *, again: bool = False) -> None:
        if text in self.known and not again:
            return self.get(self.known[text])
        raw = text.encode("utf-8", "surrogatepass")
        is_short = len(raw) < 256 and not self.is_odd()
        self.data += b"\x8c" + bytes([len(raw)]) if is_short else b"X" + struct.pack("<I", len(raw))
        self.data += raw
        self.known[text] = self.memoize()
        return None

    def number(self, number: int) -> None:
        nbytes = number.bit_length() // 8 + 1
        if self.is_odd():  # longer than need be
            nbytes += self.random.randrange(3)
        elif 0 <= number < 1 << 16:
            self.data += (
                b"K" + bytes([number]) if number < 256 else b"M" + struct.pack("<H", number)
            )
            return
        if nbytes <= 4:
            self.data += b"J" + struct.pack("<i", number)
        else:
            self.data += b"\x8a" + bytes([nbytes]) + number.to_bytes(nbytes, "little", signed=True)

    def drawn_number(self) -> int:
        return self.random.choice(ODD_NUMBERS if self.is_odd(0.3) else NUMBERS)

    def size(self, numbers: tuple[int, ...]) -> None:
        """A `torch.Size`; or a reference to the same one before."""
        if ("size", numbers) in self.known and self.random.random() < self.by_reference:
            return self.get(self.known["size", numbers])
        self.push_class("Size")
        is_marked = len(numbers) > 3 and not self.is_odd(0.3)
        self.data += b"(" * is_marked
        for number in numbers:
            self.number(number)
        if is_marked:
            closed = b"t"
        else:
            closed = [b")", b"\x85", b"\x86", b"\x87"][len(numbers) if len(numbers) < 4 else 0]
        self.data += self.random.choice([b")", b"\x85", b"t"]) if self.is_odd(0.1) else closed
        if numbers or self.is_odd(0.3):
            self.memoize()
        self.data += b"\x85"
        self.memoize()
        self.data += b"R"
        self.known["size", numbers] = self.memoize()
        return None

    def instance(self, name: str, fields: dict[str, Callable[[], None]]) -> None:
        self.push_class(name)
        self.data += b")\x81"
        self.memoize()
        self.data += b"}"
        self.memoize()
        self.data += b"("
        for key, write in fields.items():
            self.text(key)
            write()
        self.data += b"ub"

    def between(self) -> None:
        """What may stand between objects."""
        if self.random.random() < self.oddness_between:
            for _ in range(self.random.choice([1, 1, 2, 3])):
                self.data += self.random.choice(ODD if self.random.random() < 0.7 else NEUTRAL)
        if self.is_odd(0.3):  # a row inside of bytes, which are thrown away
            first = self.random.randrange(len(self.data))
            inner = self.data[first : first + 200]
            self.data += b"C" + bytes([len(inner)]) + inner + b"0"

    def several(self, writes: list[Callable[[], None]], alone: bytes, together: bytes) -> None:
        """Add items to a list or dict, in batches as pickle does."""
        first = 0
        while first < len(writes):
            count = self.random.choice([1, 2, 5, 1000])
            batch = writes[first : first + (count if self.is_odd() else 1000)]
            is_alone = (len(batch) == 1) != self.is_odd(0.3)
            self.data += b"(" * (not is_alone)
            for write in batch:
                write()
                self.between()
            self.data += alone if is_alone else together
            first += len(batch)

    def chunk(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        fields = {"offsets": lambda: self.size(offsets), "sizes": lambda: self.size(sizes)}
        self.instance("ChunkStorageMetadata", fields)

    def properties(self, dtype: str, shared: bool) -> None:
        if shared and ("properties", dtype) in self.known:
            return self.get(self.known["properties", dtype])
        self.push_class("TensorProperties")
        self.data += b")\x81"
        self.known["properties", dtype] = self.memoize()
        self.data += b"("
        self.push_class(dtype)
        self.push_class("strided")
        self.data += b"\x89"
        self.memory_format()
        self.data += self.random.choice([b"\x88", b"\x89"]) + b"t"
        self.memoize()
        self.data += b"b"
        return None

    def memory_format(self) -> None:
        if "memory format" in self.known:
            return self.get(self.known["memory format"])
        self.push_class("_MEM_FORMAT_ENCODING")
        self.data += b"K\x00\x85"
        self.memoize()
        self.data += b"R"
        self.known["memory format"] = self.memoize()
        return None

    def tensor(self, dtype: str, shape: tuple[int, ...], chunks: list[tuple[int, ...]]) -> None:
        """A tensor: chunks by their offsets."""

        def write_list() -> None:
            self.data += b"]"
            self.memoize()
            sizes = tuple(min(n, 300) for n in shape)
            writes = [lambda offsets=offsets: self.chunk(offsets, sizes) for offsets in chunks]
            self.several(writes, b"a", b"e")

        fields = {
            "properties": lambda: self.properties(dtype, self.is_odd()),
            "size": lambda: self.size(shape),
            "chunks": write_list,
        }
        self.instance("TensorStorageMetadata", fields)

    def item(self, name: str, offsets: tuple[int, ...] | None, hint: int | None, file: str) -> None:
        """A key and a value of the dict of items."""

        def write_hint() -> None:
            self.data += b"N" if hint is None else b""
            if hint is not None:
                self.number(hint)

        def write_offsets() -> None:
            self.data += b"N" if offsets is None else b""
            if offsets is not None:
                self.size(offsets)

        index = {
            "fqn": lambda: self.text(name, again=self.names_again and not self.is_odd()),
            "index": write_hint,
            "offset": write_offsets,
        }
        place = {
            "relative_path": lambda: self.text(file, again=self.is_odd()),
            "offset": lambda: self.number(self.drawn_number()),
            "length": lambda: self.number(self.drawn_number()),
        }
        self.instance("MetadataIndex", index)
        self.instance("_StorageInfo", place)

    def name(self, i: int) -> str:
        odd = ["“ñ”", "ends in \x94", "\udc80", "n" * 255, "n" * 256, "", "layer.0.w", "offsets"]
        return self.random.choice(odd) if self.is_odd() else f"layers.{i}.weight"

    def whole(self) -> bytes:
        """Draw tensors and items, and return the pickle."""
        random = self.random
        self.by_reference = random.choice([0, 0, 0, 0.1, 0.5])
        self.names_again = random.random() < 0.5
        has_paths = random.random() < 0.5
        usual = random.choice([0, 1, 2, 2, 2, 3, 4, 5, 16, 17])
        counts = random.choice([[1], [2], [3], [8], [1, 2, 3], [0, 1], [5, 6, 40]])
        drawn = []
        for i in range(random.choice([1, 2, 5, 12, 40])):
            dims = random.choice([0, 1, 2, 3, 4]) if self.is_odd(2) else usual
            shape = tuple(
                random.choice(NUMBERS[-6 if self.is_odd(2) else 1 :][:4]) for _ in range(dims)
            )
            count = random.choice([0, 1, 2, 7] if self.is_odd() else counts)
            if dims == 0 and not self.is_odd():  # all of its chunks have the same offsets
                count = min(count, 1)
            chunks = [tuple([k * (d + 1) for d in range(dims)]) for k in range(count)]
            dtype = random.choice(["float32", "bfloat16"])
            drawn.append((self.name(i), dtype, shape, chunks))
        self.instance("Metadata", self.tables(drawn, has_paths))
        return bytes(self.data) + b"."

    def tables(self, drawn: list, has_paths: bool) -> dict[str, Callable[[], None]]:
        def entries() -> None:
            def write(name, dtype, shape, chunks) -> None:
                self.text(name, again=self.is_odd())
                self.tensor(dtype, shape, chunks)

            self.table([lambda one=one: write(*one) for one in drawn])

        def paths() -> None:
            def write(name) -> None:
                self.text(name)
                self.text("model")
                self.text(name)
                self.data += b"\x86"
                self.memoize()

            self.table([lambda name=one[0]: write(name) for one in drawn] if has_paths else [])

        def items() -> None:
            listed = [
                (name, chunk, k) for name, _, _, chunks in drawn for k, chunk in enumerate(chunks)
            ]
            if self.random.random() < 0.5:
                listed.sort(key=lambda item: item[2])
            writes = []
            for name, chunk, k in listed:
                hint = None if self.is_odd() else k
                file = f"__{self.random.randrange(3)}_0.distcp"
                offsets = None if self.is_odd() else chunk
                given = self.name(0) if self.is_odd() else name
                writes.append(lambda a=given, b=offsets, c=hint, d=file: self.item(a, b, c, d))
            self.table(writes)

        return {"state_dict_metadata": entries, "planner_data": paths, "storage_data": items}

    def table(self, writes: list[Callable[[], None]]) -> None:
        self.data += b"}"
        self.memoize()
        self.several(writes, b"s", b"u")
