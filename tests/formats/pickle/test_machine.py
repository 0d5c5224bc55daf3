"""The pickle interpreter: what Python's pickler writes comes back; nothing else runs, hangs or takes memory."""

from __future__ import annotations

import argparse
import collections
import os
import pickle
import pickletools
import resource
import signal
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ema_ckpt.core.errors import EmaCkptError, SourceError, UnsafeError
from ema_ckpt.formats.pickle import safe_globals
from ema_ckpt.formats.pickle.machine import loads
from ema_ckpt.formats.pickle.safe_globals import Opaque, is_executor
from ema_ckpt.formats.pickle.tensors import PLAIN_GLOBALS
from ema_ckpt.ops.verify import verify

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.sets(st.integers() | st.text(), max_size=4)
        | st.frozensets(st.integers(), max_size=4)
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(VALUES, st.integers(0, 5))
def test_plain_values_come_back(value: object, protocol: int) -> None:
    assert loads(pickle.dumps(value, protocol), PLAIN_GLOBALS, where="t") == value


@settings(deadline=None)
@given(VALUES, st.integers(0, 5), st.data())
def test_damage_never_raises_anything_but_our_errors(
    value: object, protocol: int, data: st.DataObject
) -> None:
    raw = bytearray(pickle.dumps(value, protocol))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    for damaged in (bytes(raw), cut):
        try:
            loads(damaged, PLAIN_GLOBALS, where="t", strict=data.draw(st.booleans()))
        except EmaCkptError as error:
            assert error.code in ("unreadable", "unsupported", "unsafe-pickle")


class _Runs:
    def __init__(self, function: object, *args: object) -> None:
        self._call = (function, args)

    def __reduce__(self) -> tuple[object, ...]:
        return self._call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("strict", [True, False])
def test_a_call_is_refused_by_name_and_not_made(
    tmp_path: Path, protocol: int, strict: bool
) -> None:
    marker = tmp_path / "ran"
    for hostile in (
        _Runs(os.system, f"touch {marker}"),
        _Runs(eval, f"__import__('pathlib').Path({str(marker)!r}).touch()"),
    ):
        raw = pickle.dumps({"a": [hostile]}, protocol)
        with pytest.raises(UnsafeError, match=r"system|eval") as caught:
            loads(raw, PLAIN_GLOBALS, where="file", strict=strict)
        assert caught.value.code == "unsafe-pickle"
        pickle.loads(raw)
        assert marker.exists(), "the pickle is hostile indeed"
        marker.unlink()


@pytest.mark.parametrize(
    "raw",
    [
        b"cos\nsystem\n(S'touch x'\ntR.",
        b"(S'touch x'\nios\nsystem\n.",
        b"(cos\nsystem\nS'touch x'\no.",
        b"\x80\x02cos\nsystem\nU\x07touch x\x85R.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x07touch x\x85\x81.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02U\x03pidQ.",
    ],
    ids=["global", "inst", "obj", "reduce", "newobj", "extension", "persistent id"],
)
def test_every_way_to_call_is_refused(raw: bytes) -> None:
    with pytest.raises(EmaCkptError) as caught:
        loads(raw, PLAIN_GLOBALS, where="t")
    assert caught.value.code in ("unsafe-pickle", "unreadable", "unsupported")
    assert not Path("x").exists()


def test_unknown_classes_become_named_placeholders() -> None:
    raw = pickle.dumps({"args": argparse.Namespace(lr=0.1, name="run")}, 2)
    value = loads(raw, PLAIN_GLOBALS, where="t", strict=False)
    placeholder = value["args"]  # type: ignore[index]
    assert isinstance(placeholder, Opaque)
    assert (placeholder.module, placeholder.name) == ("argparse", "Namespace")
    assert placeholder.state == {"lr": 0.1, "name": "run"}


@pytest.mark.parametrize(
    "name",
    (
        "io.open io.FileIO io.open_code _io.open _io.FileIO _io.open_code _pyio.open _pyio.FileIO codecs.open gzip.open "
        "_operator.methodcaller _operator.attrgetter _functools.partial _functools.reduce _posixsubprocess.fork_exec "
        "_ctypes.dlopen _imp.create_dynamic _frozen_importlib.__import__ _frozen_importlib_external.SourceFileLoader "
        "_socket.socket pkgutil.resolve_name numpy.testing._private.utils.runstring torch.utils.cpp_extension.load "
        "distutils.spawn.spawn _winapi.CreateProcess _xxsubinterpreters.run_string torch.storage._load_from_bytes "
        "builtins.eval __builtin__.execfile posix.system argparse.run_path os.path.join"
    ).split(),
)
def test_aliases_of_what_runs_code_are_known(name: str) -> None:
    module, _, last = name.rpartition(".")
    assert is_executor(module, last)


@pytest.mark.parametrize(
    "name",
    ["_os.system", "_sys.modules.get", "Namespace.__init__.__globals__", "Random.__reduce__"],
)
def test_ways_through_other_modules_are_known(name: str) -> None:
    assert is_executor("argparse", name)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "serialization.load"),
        ("torch", "hub.load"),
        ("torch", "jit.load"),
        ("torch.utils", "model_zoo.load_url"),
        ("typing", "types.FunctionType"),
        ("torch.nn", "functools.partial"),
        ("logging", "config.fileConfig"),
        ("timm", "data.torch.load"),
    ],
)
def test_ways_through_a_package_are_known(module: str, name: str) -> None:
    assert is_executor(module, name)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "optim.Adam"),
        ("trainer", "Settings.Kind"),
        ("torch.load", "Kind"),
        ("a", "b.load"),
    ],
)
def test_classes_within_classes_are_no_executors(module: str, name: str) -> None:
    assert not is_executor(module, name)


@pytest.mark.parametrize(
    "name",
    (
        "io.BytesIO io.StringIO _io.BytesIO _operator.itemgetter re._compile collections.Counter numpy.dtype "
        "numpy.core.multiarray._reconstruct torch.optim.adam.Adam __builtin__.xrange __builtin__.unicode "
        "__builtin__.long builtins.reversed builtins.enumerate builtins.iter builtins.memoryview builtins.OSError "
        "builtins.UserWarning signal.Signals http.HTTPStatus os.terminal_size"
    ).split(),
)
def test_harmless_neighbours_are_no_executors(name: str) -> None:
    module, _, last = name.rpartition(".")
    assert not is_executor(module, last)


def test_names_of_many_parts_are_looked_through_in_linear_time() -> None:
    many = ".".join(["a"] * 1_000_000)
    assert not is_executor(many, "b")
    assert not is_executor("b", many)
    assert is_executor("b", f"{many}.torch.serialization.load")


def test_the_depth_of_what_is_looked_for_covers_all_names() -> None:
    names = [*safe_globals._EXECUTOR_MODULES, *map(".".join, safe_globals._EXECUTOR_NAMES)]
    assert max(name.count(".") + 1 for name in names) <= safe_globals._DEPTH


def test_what_makes_missing_values_of_a_dict_must_not_run_code() -> None:
    data = pickle.dumps(collections.defaultdict(os.getcwd, a=1), 2)
    with pytest.raises(UnsafeError, match=r"posix\.getcwd"):
        loads(data, PLAIN_GLOBALS, where="t")
    data = pickle.dumps(collections.defaultdict(list, a=[1]), 2)
    assert loads(data, PLAIN_GLOBALS, where="t") == {"a": [1]}


def test_bytes_written_as_a_text_have_the_encoding_of_picklers() -> None:
    data = pickle.dumps(b"\xe9", 2)
    assert loads(data, PLAIN_GLOBALS, where="t") == b"\xe9"
    changed = data.replace(b"latin1", b"utf-16")
    assert pickle.loads(changed) != b"\xe9"
    with pytest.raises(SourceError, match="utf-16"):
        loads(changed, PLAIN_GLOBALS, where="t")


@pytest.mark.parametrize("protocol", range(6))
def test_python_pickles_open_under_another_name(protocol: int) -> None:
    with pytest.raises(UnsafeError, match=r"open"):
        loads(pickle.dumps(_Runs(open, "x", "w"), protocol), PLAIN_GLOBALS, where="t", strict=False)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "value", [range(3), reversed([1]), enumerate([1]), iter([1]), signal.SIGTERM, ValueError("x")]
)
def test_harmless_builtins_are_opaque(value: object, protocol: int) -> None:
    assert isinstance(
        loads(pickle.dumps(value, protocol), PLAIN_GLOBALS, where="t", strict=False), Opaque
    )


def test_ordered_dicts_are_dicts_and_their_attributes_are_dropped() -> None:
    ordered = collections.OrderedDict(a=1, b=2)
    ordered._metadata = {"version": 1}  # type: ignore[attr-defined]
    assert loads(pickle.dumps(ordered, 2), PLAIN_GLOBALS, where="t") == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x02Nr\xff\xff\xff\x7f.",  # LONG_BINPUT with a huge index
        b"\x80\x02Np2147483646\n.",
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",  # BINBYTES8 of a terabyte
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b".",
        b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b".",  # LONG4
        b"\x80\x02\x8b" + struct.pack("<i", -5) + b".",
        b"\x80\x02cbuiltins\nbytes\nJ\xff\xff\xff\x7f\x85R.",
        b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",  # FRAME
    ],
)
def test_numbers_in_the_stream_take_no_memory(raw: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        loads(raw, PLAIN_GLOBALS, where="t")
    except SourceError as error:
        assert error.code == "unreadable"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_keys_that_take_forever_to_hash_are_refused() -> None:
    body = bytearray(b"\x80\x02}")
    body += b"X\x01\x00\x00\x00x\x85q\x00"
    for _ in range(60):
        body += b"2\x86"  # DUP, TUPLE2: each level is the one below, twice
    body += b"K\x01s."
    with pytest.raises(SourceError, match="nested tuple"):
        loads(bytes(body), PLAIN_GLOBALS, where="t")


def test_tensors_of_equal_place_as_keys_are_refused_not_damaged(tmp_path: Path) -> None:
    weight = torch.ones(3)
    path = tmp_path / "a.pt"
    torch.save({"model": {"w": weight}, "by_tensor": {weight: 1, weight.detach(): 2}}, path)
    with pytest.raises(SourceError, match="cannot be told apart") as caught:
        verify(path)
    assert caught.value.code == "unsupported"


def test_every_opcode_is_read_or_refused() -> None:
    for opcode in pickletools.opcodes:
        raw = opcode.code.encode("latin-1") + b"\x00" * 16
        with pytest.raises(EmaCkptError):
            loads(raw, PLAIN_GLOBALS, where="t")


def test_messages_name_the_place() -> None:
    with pytest.raises(SourceError, match=r"^model\.pt: "):
        loads(b"garbage", PLAIN_GLOBALS, where="model.pt")


@pytest.mark.parametrize("number", [1, 5])
def test_what_is_memoized_beside_numbers_ahead_is_never_another_object(number: int) -> None:
    """MEMOIZE counts the objects: after one PUT ahead, it gives the number 1."""
    data = b"(K\x07q%cK\x08\x94h%ct." % (number, number)
    assert pickle.loads(data)[2] == (8 if number == 1 else 7)
    with pytest.raises(SourceError):
        loads(data, {}, where="t")


def test_objects_may_be_numbered_in_any_order() -> None:
    data = b"(K\x07q\x02K\x08q\x00K\x09q\x01h\x00h\x01h\x02t."
    assert loads(data, {}, where="t") == pickle.loads(data) == (7, 8, 9, 8, 9, 7)
