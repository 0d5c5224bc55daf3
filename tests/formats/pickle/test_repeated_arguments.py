"""A few hundred bytes refer to one tuple over and over: no listed global may follow each reference."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Mapping

import pytest

from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.formats.dcp import metadata
from ema_ckpt.formats.pickle.arrays import ARRAY_GLOBALS
from ema_ckpt.formats.pickle.machine import load_at, loads
from ema_ckpt.formats.pickle.safe_globals import Global, Maker
from ema_ckpt.formats.pickle.tensors import PLAIN_GLOBALS, TENSOR_GLOBALS, Storages, load_value
from ema_ckpt.formats.torch_file.lenient import LenientGlobals, Unreadable, refused_tensor
from ema_ckpt.formats.torch_file.sharded_tensors import SubclassReader

_LEVELS = 25
_SECONDS = 3  # of a processor; what is read at once takes milliseconds
_NBYTES = 1 << 30
_STORAGE = b"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nK\x01tQ"
_INT = b"K\x01"
_REBUILT = "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3".split()


def _repeated(opcode: bytes, memo: int) -> bytes:
    """Build a tuple (`t`) or a list (`l`) of four times the one below it, many levels deep."""
    parts = [b"(K\x01", opcode, b"q", bytes([memo])]
    for level in range(memo + 1, memo + _LEVELS):
        parts += [b"0(", (b"h" + bytes([level - 1])) * 4, opcode, b"q", bytes([level])]
    return b"".join([*parts, b"0"])


_TUPLE, _LIST = (b"h" + bytes([first + _LEVELS - 1]) for first in (0, _LEVELS))
_TUPLE_AGAIN = b"h" + bytes([3 * _LEVELS - 1])
_BEFORE = _repeated(b"t", 0) + _repeated(b"l", _LEVELS) + _repeated(b"t", 2 * _LEVELS)
_VALUES = [
    _TUPLE,
    _LIST,
    b"(" + _TUPLE + b"l",  # items of a set
    b"((" + _TUPLE + _INT + b"tl",  # of a dict
    b"((" + _TUPLE + _INT + b"tt",
    b"((" + _TUPLE + _INT + b"t(" + _TUPLE_AGAIN + _INT + b"tl",
    b"(" + _TUPLE + _TUPLE_AGAIN + b"t",
    b"(Vkey\n" + _LIST + b"d",
    b"(Vdtype\n" + _TUPLE + b"Voffset\n" + _TUPLE + b"d",
]


def _calls(name: str) -> list[bytes]:
    """Arguments: one value in each place, others of the types that are expected there."""
    calls = []
    for value in _VALUES:
        for count in (1, 2, 3, 5):
            calls.append(b"(" + value * count + b"t")
        usual = [_STORAGE, b"K\x00", b"(t", b"(t", b"\x89", b"N"]
        if name == "_rebuild_tensor":
            usual = usual[:4]
        elif name == "_rebuild_tensor_v3":
            usual.append(b"ctorch\nfloat32\n")
        if name in _REBUILT:
            usual.append(b"N")
            for place in range(len(usual)):
                calls.append(b"(" + b"".join([*usual[:place], value, *usual[place + 1 :]]) + b"t")
        calls.append(b"(Vf4\n" + value + b"t")
        calls.append(b"(cnumpy\ndtype\n(" + value + b"tR" + value + b"t")
        calls.append(b"(C\x01a" + b"cnumpy\ndtype\n(" + value + b"tR" + b"(K\x01tVC\nt")
    return calls


def _programs(module: str, name: str) -> list[bytes]:
    named = f"c{module}\n{name}\n".encode()
    made = [named + call + op for call in _calls(name) for op in (b"R", b"\x81")]
    built = [
        named + b"(t" + op + state + b"b"
        for op in (b"R", b"\x81")
        for value in _VALUES
        for state in (value, b"(" + value * 5 + b"t", b"(" + value * 2 + b"t")
    ]
    return [_BEFORE + program + b"." for program in made + built]


def _ends(read: Callable[[bytes], object], programs: list[bytes]) -> list[int]:
    """Read each in a child process with limits; return the places of those that do not end well."""
    bad = []
    first = 0
    while first < len(programs):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            resource.setrlimit(resource.RLIMIT_AS, (4 * _NBYTES, 4 * _NBYTES))
            for number in range(first, len(programs)):
                used = sum(os.times()[:2])
                resource.setrlimit(resource.RLIMIT_CPU, (int(used) + _SECONDS, -1))
                os.write(writer, number.to_bytes(4, "little"))
                try:
                    read(programs[number])
                except EmaCkptError:
                    pass
                except BaseException:
                    os._exit(1)
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as numbers:
            begun = numbers.read()
        _, status = os.waitpid(child, 0)
        if status == 0 or len(bad) == 2:
            break
        last = int.from_bytes(begun[-4:], "little")
        bad.append(last)
        first = last + 1
    return bad


def _load_tensors(data: bytes) -> object:
    return load_value(data, "t")


def _load_lenient(data: bytes) -> object:
    lenient = LenientGlobals(SubclassReader())
    return load_value(data, "t", prepare=lenient.prepare)


def _load_legacy(data: bytes) -> object:
    allowed = {**TENSOR_GLOBALS, **ARRAY_GLOBALS}
    return load_at(data, 0, allowed, where="t", persistent=Storages().add)


def _load_metadata(data: bytes) -> object:
    return loads(data, metadata._ALLOWED, where="t")


def _own(table: Mapping[tuple[str, str], Maker]) -> list[tuple[str, str]]:
    """Globals of a table beside the plain ones."""
    return [named for named in table if named not in PLAIN_GLOBALS]


_PLAIN = [
    named for named in PLAIN_GLOBALS if named[0] != "__builtin__" and "_local" not in named[0]
]
_TABLES = [
    (_load_tensors, [*_PLAIN, *_own(TENSOR_GLOBALS)]),
    (_load_lenient, _own(TENSOR_GLOBALS)),
    (_load_legacy, [*ARRAY_GLOBALS]),
    (_load_metadata, _own(metadata._ALLOWED)),
]
_CASES = [
    pytest.param(read, *named, id=f"{read.__name__[6:]}-{'.'.join(named)}")
    for read, table in _TABLES
    for named in table
]


@pytest.mark.parametrize(("read", "module", "name"), _CASES)
def test_arguments_are_never_followed_at_each_reference(
    read: Callable[[bytes], object], module: str, name: str
) -> None:
    programs = _programs(module, name)
    assert [programs[place] for place in _ends(read, programs)] == []


_MODULE = "torch.distributed."
_MESH = f"c{_MODULE}device_mesh\nDeviceMesh\n)\x81".encode("latin-1")
_LAYOUT = f"c{_MODULE}_mesh_layout\n_MeshLayout\n)\x81".encode("latin-1")
_SPEC = f"c{_MODULE}tensor._dtensor_spec\nDTensorSpec\n)\x81".encode("latin-1")
_DTENSOR = f"c{_MODULE}tensor\nDTensor\n".encode()


def _dtensor(mesh: bytes) -> bytes:
    """A DTensor of which only the mesh is of interest."""
    spec = _SPEC + b"}Vmesh\n" + _MESH + b"}(" + mesh + b"ubsb"
    state = b"}V_spec\n" + spec + b"s"
    return b"ctorch._tensor\n_rebuild_from_type_v2\n(N" + _DTENSOR + b"N" + state + b"tR"


def _layout(shape: bytes) -> bytes:
    return b"V_layout\n" + _LAYOUT + b"}Vshape\n" + shape + b"sb"


@pytest.mark.parametrize(
    "program",
    [
        _dtensor(_layout(_TUPLE)),
        _dtensor(
            _layout(b"K\x01") + b"V_flatten_mesh_list\n(" + _TUPLE + b"tV_rank\n" + _TUPLE_AGAIN
        ),
        _dtensor(_layout(b"K\x01") + b"V_coordinate_on_dim\n" + _TUPLE),
    ],
    ids=["shape", "rank", "coordinate"],
)
def test_meshes_are_never_followed_at_each_reference(program: bytes) -> None:
    assert _ends(_load_lenient, [_BEFORE + program + b"."]) == []


def test_the_form_of_a_refused_tensor_is_looked_for_in_few_arguments() -> None:
    level: object = 1
    for _ in range(6):
        level = (level,) * 64
    begin = time.process_time()
    named = Global("torch._utils", "_rebuild_sparse_tensor", None)
    for _ in range(100):
        refused_tensor(("w",), Unreadable(named, "unsupported", "t", (level,)), "f")
    assert time.process_time() - begin < 5
