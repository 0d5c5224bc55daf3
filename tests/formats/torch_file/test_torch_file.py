"""torch files, against torch itself."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import random
import struct
import subprocess
import sys
import warnings
import zipfile
import zlib
from collections import OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ema_ckpt
from ema_ckpt.core.catalog import Nesting, Object
from ema_ckpt.core.errors import EmaCkptError, SourceError, TargetError, UnsafeError
from ema_ckpt.core.write_plan import all_header_bytes
from ema_ckpt.formats.pickle.safe_globals import Opaque
from ema_ckpt.formats.pickle.writer import is_plain
from ema_ckpt.formats.torch_file.reader import open_torchfile
from ema_ckpt.formats.torch_file.writer import lay_out
from ema_ckpt.storage.files import LocalFiles
from tests.formats.safetensors.test_safetensors import DTYPES, of_dtype, same
from tests.formats.writing import entries, entry, raw_bytes, read, write

ALL_DTYPES = [*DTYPES, torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


def opened(path: Path):
    return open_torchfile(LocalFiles(path.parent), (path.name,), str(path), str(path))


def saved(tmp_path: Path, value: object, **options):
    torch.save(value, tmp_path / "c.pt", **options)
    return opened(tmp_path / "c.pt")


def loaded(path: Path):
    return torch.load(path, weights_only=True, mmap=True)


# --- reading ----------------------------------------------------------------------------------------------


def test_every_dtype_is_read_bit_for_bit(tmp_path):
    tensors = {str(dtype): of_dtype(dtype).reshape(3, 2) for dtype in ALL_DTYPES}
    catalog = saved(tmp_path, tensors)
    assert [(t.name, t.shape, f"torch.{t.dtype.name}") for t in catalog.tensors] == [
        (n, (3, 2), n) for n in tensors
    ]
    assert all(same(read(catalog, name), tensor) for name, tensor in tensors.items())
    assert not catalog.nested
    assert not catalog.warnings


def test_views_of_one_storage_are_found_where_they_lie(tmp_path):
    base = torch.arange(120.0).reshape(2, 3, 4, 5)
    views = {
        "whole": base,
        "transposed": base[0, 0].t(),
        "tail": base[1],
        "channels_last": base.contiguous(memory_format=torch.channels_last),
        "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 7),
        "stepped": base.reshape(-1)[5:100:7],
        "scalar": base[1, 2, 3, 4],
        "rows": torch.arange(9.0).reshape(9, 1)[2:4],
        "empty": base[:, :0],
    }
    catalog = saved(tmp_path, views)
    assert all(same(read(catalog, name), tensor.contiguous()) for name, tensor in views.items())
    found = {tensor.name: catalog.reader.payloads(tensor)[0] for tensor in catalog.tensors}
    assert {name for name, payload in found.items() if payload.strides is None} == {
        "whole", "tail", "scalar", "rows", "empty"
    }  # fmt: skip
    assert found["tail"].start == 60
    assert found["whole"].offset == found["tail"].offset
    assert found["whole"].crc == zlib.crc32(raw_bytes(base))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_is_read(tmp_path, protocol):
    state = {
        "m": {"w": torch.arange(4.0), "f8": of_dtype(torch.float8_e5m2)},
        "o": [1, {"b": b"x"}],
        "s": {1},
        "t": (2, "ü"),
    }
    catalog = saved(tmp_path, state, pickle_protocol=protocol)
    assert all(same(read(catalog, f"m.{name}"), tensor) for name, tensor in state["m"].items())
    assert {item.name: catalog.reader.load(item) for item in catalog.objects} == {
        "o.0": 1, "o.1.b": b"x", "s": {1}, "t": (2, "ü")
    }  # fmt: skip


def test_ties_have_equal_storage_and_other_views_have_not(tmp_path):
    weight = torch.nn.Linear(4, 4).weight
    catalog = saved(
        tmp_path,
        {
            "a": weight,
            "b": weight.data,
            "part": weight[1:],
            "t": weight.t(),
            "copy": weight.clone(),
        },
    )
    storages = {tensor.name: tensor.storage for tensor in catalog.tensors}
    assert storages["a"] == storages["b"]
    assert len(set(storages.values())) == 4


def test_nesting_has_the_paths_of_distributed_checkpoint(tmp_path):
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9))
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "step": 3,
        "list": [1, [2.5]],
        "d": [{"x": 1}],
    }
    catalog = saved(tmp_path, state)
    flat, paths = flatten_state_dict(state)
    found = {item.name: item.path for item in (*catalog.tensors, *catalog.objects)}
    assert found == {name: tuple(path) for name, path in paths.items()}
    assert catalog.nested
    for item in catalog.objects:
        assert catalog.reader.load(item) == flat[item.name]
    for tensor in catalog.tensors:
        assert same(read(catalog, tensor.name), flat[tensor.name])


def test_tensors_in_tuples_are_not_lost(tmp_path):
    catalog = saved(tmp_path, ({"w": torch.ones(2)}, (torch.zeros(1), "note"), (1, 2)))
    assert [tensor.path for tensor in catalog.tensors] == [(0, "w"), (1, 0)]
    assert [item.path for item in catalog.objects] == [(1, 1), (2,)]
    assert catalog.nesting.tuples == {(), (1,)}


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ({1: torch.ones(1), "1": torch.ones(1)}, "name-collision"),
        ({"s": {torch.ones(1)}}, "unsupported"),
        ({b"k": torch.ones(1)}, "unsupported"),
        (torch.ones(1), "unsupported"),
        (3, "unsupported"),
        (torch.nn.Linear(1, 1), "unsupported"),
    ],
    ids=["two keys alike", "tensor in a set", "key of bytes", "bare tensor", "number", "module"],
)
def test_what_no_name_leads_to_is_refused(tmp_path, value, code):
    with pytest.raises(SourceError, match=r"c\.pt") as caught:
        saved(tmp_path, value)
    assert caught.value.code == code


def test_a_module_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(SourceError, match=r"torch\.nn\.modules\.linear\.Linear.*state_dict\(\)"):
        saved(tmp_path, torch.nn.Linear(1, 1))


def test_an_empty_dict_is_an_empty_checkpoint(tmp_path):
    catalog = saved(tmp_path, {})
    assert (catalog.tensors, catalog.objects) == ((), ())


class Attributed(torch.Tensor):
    """A subclass that only adds attributes: its data is a plain strided tensor."""


def test_parameters_and_plain_subclasses_are_read(tmp_path):
    tagged = torch.nn.Parameter(torch.arange(3.0))
    tagged.note = "extra state"
    state = {
        "parameter": torch.nn.Parameter(torch.arange(2.0)),
        "tagged": tagged,
        "buffer": torch.nn.Buffer(torch.arange(4.0)),
        "sub": torch.arange(5.0).as_subclass(Attributed),
    }
    catalog = saved(tmp_path, state)
    assert all(
        same(read(catalog, name), tensor.detach().as_subclass(torch.Tensor))
        for name, tensor in state.items()
    )


def test_an_argument_namespace_does_not_stop_the_weights(tmp_path):
    """chemprop/chemprop#1227."""
    catalog = saved(
        tmp_path, {"state_dict": {"w": torch.ones(2)}, "args": argparse.Namespace(lr=0.1)}
    )
    assert same(read(catalog, "state_dict.w"), torch.ones(2))
    (item,) = catalog.objects
    assert isinstance(catalog.reader.load(item), Opaque)
    assert [warning.code for warning in catalog.warnings] == ["opaque"]
    assert "argparse.Namespace" in catalog.warnings[0].message


def test_usual_trainer_values_are_plain(tmp_path):
    state = {
        "rng": torch.get_rng_state(),
        "python_rng": random.getstate(),
        "defaults": defaultdict(list, {"a": [1]}),
        "ordered": OrderedDict(a=1),
        "size": torch.Size([2, 3]),
        "device": torch.device("cuda", 1),
        "bytes": b"\x00\xff",
        "set": {1, 2},
        "complex": 1 + 2j,
        "big": 2**80,
        "path": Path("/a/b"),
    }
    catalog = saved(tmp_path, {"w": torch.ones(1), **state})
    assert not catalog.warnings
    found = {item.name: catalog.reader.load(item) for item in catalog.objects}
    assert found["python_rng"] == random.getstate()
    assert (found["size"], found["device"], found["path"]) == ((2, 3), "cuda:1", "/a/b")
    assert (found["bytes"], found["set"], found["complex"], found["big"]) == (
        b"\x00\xff",
        {1, 2},
        1 + 2j,
        2**80,
    )


def test_numbers_of_numpy_are_plain_and_its_arrays_opaque(tmp_path):
    numbers = [
        np.float64(2),
        np.float32(0.1),
        np.float16(3),
        np.int64(-5),
        np.uint8(7),
        np.bool_(1),
    ]
    odd = [np.array([1 + 2j])[0], np.str_("text"), np.datetime64(1, "s")]
    catalog = saved(tmp_path, {"w": torch.ones(1), "n": numbers, "odd": odd, "array": np.arange(3)})
    values = {item.name: item.inline for item in catalog.objects}
    assert values["n"] == [number.item() for number in numbers]
    assert [type(value) for value in values["n"]] == [float, float, float, int, int, bool]
    told = [warning.message for warning in catalog.warnings if warning.code == "opaque"]
    assert len(told) == 2 and "'odd'" in told[0] and "'array'" in told[1]
    assert len(catalog.tensors) == 1


# --- safety -----------------------------------------------------------------------------------------------


class Hostile:
    """Unpickled by Python, it makes a file."""

    def __init__(self, *call: object) -> None:
        self.call = call

    def __reduce__(self):
        return self.call[0], tuple(self.call[1:])


def nameless(*_args: object) -> None:
    """A function that nobody lists."""


@pytest.mark.parametrize(
    "call",
    [(os.system, "touch {}"), (eval, "open('{}', 'w')"), (subprocess.check_call, ["touch", "{}"])],
    ids=["os.system", "eval", "subprocess"],
)
def test_a_hostile_object_is_listed_and_never_run(tmp_path, call):
    marker = tmp_path / "marker"
    call = tuple(part.format(marker) if isinstance(part, str) else part for part in call)
    catalog = saved(tmp_path, {"w": torch.ones(2), "extra": {"deep": [1, (Hostile(*call),)]}})
    assert same(read(catalog, "w"), torch.ones(2))
    assert [warning.code for warning in catalog.warnings] == ["unsafe-pickle"]
    (item,) = catalog.objects
    with pytest.raises(UnsafeError, match=r"'extra\.deep'.*would call") as caught:
        catalog.reader.load(item)
    assert caught.value.code == "unsafe-pickle"
    assert not marker.exists()


def test_a_call_of_what_a_call_returned_is_named_by_the_first(tmp_path):
    craft(
        tmp_path / "c.pt",
        b"\x80\x02}X\x01\0\0\0ac__builtin__\neval\nX\x01\0\0\0f\x85RX\x02\0\0\0id\x85Rs.",
    )
    with pytest.raises(UnsafeError, match=r"__builtin__\.eval") as caught:
        opened(tmp_path / "c.pt")
    assert caught.value.code == "unsafe-pickle"


def test_an_attribute_of_something_that_runs_code_is_unsafe_when_called(tmp_path):
    name = b"c__builtin__\ngetattr\ncposix\nX\nX\x06\0\0\0system\x86R"
    craft(tmp_path / "c.pt", b"\x80\x02}X\x01\0\0\0a" + name + b"X\x02\0\0\0id\x85Rs.")
    catalog = opened(tmp_path / "c.pt")
    assert [warning.code for warning in catalog.warnings] == ["unsafe-pickle"]
    with pytest.raises(UnsafeError, match=r"posix\.X\.system"):
        catalog.reader.load(catalog.objects[0])


HIDDEN = {
    "reduce": b"cos\nsystem\nX\x02\0\0\0id\x85R0",
    "inst": b"(S'id'\nios\nsystem\n0",
    "obj": b"(cos\nsystem\nX\x02\0\0\0ido0",
    "state of a dict": b"ccollections\nOrderedDict\n)R}X\x01\0\0\0acos\nsystem\nX\x02\0\0\0id\x85Rsb0",
}


@pytest.mark.parametrize("form", HIDDEN)
def test_a_call_whose_result_is_thrown_away_is_refused(tmp_path, form):
    craft(tmp_path / "c.pt", b"\x80\x02" + HIDDEN[form] + b"}.")
    with pytest.raises(UnsafeError, match=r"throws away.*os\.system") as caught:
        opened(tmp_path / "c.pt")
    assert caught.value.code == "unsafe-pickle"


BELOW_A_CALL = {
    "tensor": lambda call: {"w": Hostile(call, torch.ones(2))},
    "dict": lambda call: {"a": {"b": [Hostile(call, {"w": torch.ones(2)})]}},
}


@pytest.mark.parametrize("form", BELOW_A_CALL)
def test_nothing_is_called_on_the_way_to_a_tensor(tmp_path, form):
    with pytest.raises(UnsafeError) as caught:
        saved(tmp_path, BELOW_A_CALL[form](os.system))
    assert caught.value.code == "unsafe-pickle"
    # A function that is not known to run code: the tensors under it are none, and all else is read.
    catalog = saved(tmp_path, {**BELOW_A_CALL[form](nameless), "plain": torch.ones(3)})
    assert [tensor.name for tensor in catalog.tensors] == ["plain"]
    assert [warning.code for warning in catalog.warnings] == ["unsafe-pickle"]
    with pytest.raises(UnsafeError, match="would call") as caught:
        catalog.reader.load(catalog.objects[0])
    assert caught.value.code == "unsafe-pickle"


def test_a_hostile_root_is_refused(tmp_path):
    with pytest.raises(UnsafeError, match="system"):
        saved(tmp_path, Hostile(os.system, "true"))


def craft(path: Path, data: bytes, **records: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("c/data.pkl", data)
        for name, content in {"version": b"3\n", **records}.items():
            archive.writestr(f"c/{name}", content)


def test_a_few_bytes_that_mean_an_endless_tree_are_refused(tmp_path):
    data = b"\x80\x02}q\x00" + b"".join(
        b"}q%c(X\x01\x00\x00\x00ah%cX\x01\x00\x00\x00bh%cu" % (i, i - 1, i - 1)
        for i in range(1, 60)
    )
    craft(tmp_path / "c.pt", data + b".")
    with pytest.raises(SourceError, match="over and over") as caught:
        opened(tmp_path / "c.pt")
    assert caught.value.code == "unsupported"
    tuples = (
        b"\x80\x02}X\x01\x00\x00\x00aNq\x00"
        + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(60))
        + b"s."
    )
    craft(tmp_path / "c.pt", tuples)
    with pytest.raises(SourceError):
        opened(tmp_path / "c.pt")


@pytest.mark.parametrize("opcode", [b"]", b"}X\x01\x00\x00\x00a"], ids=["lists", "dicts"])
def test_deep_nesting_is_an_error_and_no_crash(tmp_path, opcode):
    depth = 20_000
    close = b"a" if opcode == b"]" else b"s"
    craft(
        tmp_path / "c.pt",
        b"\x80\x02}X\x01\x00\x00\x00k" + opcode * depth + b"N" + close * depth + b"s.",
    )
    try:
        catalog = opened(tmp_path / "c.pt")
    except SourceError:
        return
    assert not any(is_plain(item.inline) for item in catalog.objects)


def test_a_list_in_itself_ends(tmp_path):
    craft(tmp_path / "c.pt", b"\x80\x02}X\x01\x00\x00\x00k]q\x00h\x00as.")
    with pytest.raises(SourceError):
        opened(tmp_path / "c.pt")


# --- refused forms and damage ------------------------------------------------------------------------------


def test_distributed_tensors_are_read_where_one_file_has_all(tmp_path):
    script = (
        "import torch, torch.distributed as dist, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "from torch.distributed.tensor import distribute_tensor, Shard, init_device_mesh\n"
        "from torch.distributed._shard.sharded_tensor import init_from_local_shards, Shard as Piece\n"
        "t = distribute_tensor(torch.arange(6.), init_device_mesh('cpu', (1,)), [Shard(0)])\n"
        "torch.save({'m': {'w': t}}, sys.argv[1])\n"
        "s = init_from_local_shards([Piece.from_tensor_and_offsets(torch.arange(6.), [0], 0)], (6,))\n"
        "torch.save({'m': {'w': s}}, sys.argv[2])\n"
    )
    files = [tmp_path / "dtensor.pt", tmp_path / "sharded.pt"]
    subprocess.run([sys.executable, "-c", script, *map(str, files)], check=True, timeout=120)
    for file in files:
        assert same(read(opened(file), "m.w"), torch.arange(6.0))


def unread_tensors():
    """Tensors that no format but a pickle of torch holds, and the shape and dtype of each."""
    return {
        "sparse": (torch.eye(3).to_sparse(), (3, 3), "float32"),
        "csr": (torch.eye(3, dtype=torch.float64).to_sparse_csr(), (3, 3), "float64"),
        "meta": (torch.empty(3, 2, device="meta"), (3, 2), "float32"),
        "conj": (torch.ones(3, dtype=torch.complex64).conj(), (3,), "complex64"),
        "quantized": (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), (3,), "qint8"),
        "nested": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), None, None),
    }


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:torch.quantize_per_tensor", "ignore:The Py")
@pytest.mark.parametrize("place", ["model", "optimizer"])
@pytest.mark.parametrize("kind", ["sparse", "csr", "meta", "conj", "quantized", "nested"])
def test_a_tensor_that_is_not_read_stops_only_who_needs_it(tmp_path, kind, place):
    tensor, shape, dtype = unread_tensors()[kind]
    tree = {"model": {"v": torch.arange(6.0)}, "optimizer": {"state": {0: {"v": torch.ones(1)}}}}
    tree[place]["w"] = tensor
    source, out = tmp_path / "c.pt", tmp_path / "out.safetensors"
    torch.save(tree, source)
    listed = ema_ckpt.inspect(source)
    assert [(w.code, f"'{place}.w'" in w.message) for w in listed.warnings] == [
        ("unsupported", True)
    ]
    (entry,) = [item for item in listed.tensors if item.name == f"{place}.w"]
    if shape is not None:
        assert (entry.shape, entry.dtype) == (shape, dtype)
    found = ema_ckpt.verify(source)
    codes = [w.code for w in found.warnings]
    assert (found.status, codes, found.problems) == ("unproven", ["unchecked", "unchecked"], ())
    needs_it = [lambda: ema_ckpt.convert(source, tmp_path / "dcp")]
    if place == "model":
        needs_it.append(lambda: ema_ckpt.consolidate(source, out))
    for call in needs_it:
        with pytest.raises(SourceError) as caught:
            call()
        assert (caught.value.code, caught.value.tensor) == ("unsupported", f"{place}.w")
        assert "--exclude" in str(caught.value)
    ema_ckpt.convert(source, tmp_path / "dcp", exclude=[f"{place}.w"])
    ema_ckpt.consolidate(source, out, exclude=["w"] if place == "model" else [])
    assert list(load_file(out)) == ["v"]
    with ema_ckpt.open(source) as ckpt:
        assert torch.equal(ckpt["model.v"], torch.arange(6.0))
        with pytest.raises(SourceError):
            ckpt[f"{place}.w"]


def fails(tmp_path: Path, data: bytes) -> str:
    (tmp_path / "c.pt").write_bytes(data)
    with pytest.raises(SourceError, match=r"c\.pt") as caught:
        opened(tmp_path / "c.pt")
    return caught.value.code


def test_other_files_are_refused_by_name(tmp_path):
    assert fails(tmp_path, pickle.dumps({"w": 1}, protocol=4)) == "unsupported"
    assert fails(tmp_path, b"\0" * 257 + b"ustar" + b"\0" * 300) == "unsupported"
    assert fails(tmp_path, b"version https://git-lfs.github.com/spec/v1\noid") == "bad-header"
    assert fails(tmp_path, b"garbage" * 100) == "bad-header"
    assert fails(tmp_path, b"") == "truncated-file"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("notes/readme.txt", "no checkpoint")
    assert fails(tmp_path, buffer.getvalue()) == "bad-header"
    craft(tmp_path / "c.pt", b"\x80\x02}.", **{"constants.pkl": b"\x80\x02)."})
    assert fails(tmp_path, (tmp_path / "c.pt").read_bytes()) == "unsupported"


def test_big_endian_numbers_are_refused_where_they_are_needed(tmp_path):
    torch.save({"w": torch.ones(2), "flags": torch.tensor([True, False])}, tmp_path / "c.pt")
    data = (tmp_path / "c.pt").read_bytes()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(tmp_path / "c.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, b"big" if name.endswith("byteorder") else old.read(name))
    assert [w.code for w in ema_ckpt.inspect(tmp_path / "c.pt").warnings] == ["unsupported"]
    with pytest.raises(SourceError, match=r"'w'.*big-endian") as caught:
        ema_ckpt.consolidate(tmp_path / "c.pt", tmp_path / "out.safetensors")
    assert caught.value.code == "unsupported"
    ema_ckpt.consolidate(tmp_path / "c.pt", tmp_path / "out.safetensors", exclude=["w"])
    expected = torch.load(tmp_path / "c.pt", weights_only=True)["flags"]
    assert torch.equal(load_file(tmp_path / "out.safetensors")["flags"], expected)


@pytest.mark.parametrize("extra", [b"8 bytes.", b"PK\5\6", b"x" * 65000])
def test_bytes_after_the_end_are_passed_over_as_torch_does(tmp_path, extra):
    torch.save({"w": torch.arange(3000.0)}, tmp_path / "c.pt")
    with open(tmp_path / "c.pt", "ab") as file:
        file.write(extra)
    expected = torch.load(tmp_path / "c.pt", weights_only=True)["w"]
    catalog = opened(tmp_path / "c.pt")
    assert same(read(catalog, "w"), expected)
    assert [w.code for w in catalog.warnings] == ["unchecked"]
    assert f"{len(extra):,} bytes after the end" in catalog.warnings[0].message
    found = ema_ckpt.verify(tmp_path / "c.pt")
    assert (found.status, [w.code for w in found.warnings]) == ("sound", ["unchecked"])


def test_too_many_bytes_after_the_end_are_refused_as_torch_does(tmp_path):
    torch.save({"w": torch.arange(3000.0)}, tmp_path / "c.pt")
    with open(tmp_path / "c.pt", "ab") as file:
        file.write(b"x" * 70000)
    with pytest.raises(RuntimeError):
        torch.load(tmp_path / "c.pt", weights_only=True)
    with pytest.raises(SourceError) as caught:
        opened(tmp_path / "c.pt")
    assert caught.value.code == "bad-header"


def test_every_truncation_is_an_error(tmp_path):
    torch.save({"w": torch.arange(300.0), "n": {"x": 1}}, tmp_path / "whole.pt")
    data = (tmp_path / "whole.pt").read_bytes()
    for nbytes in [*range(0, len(data), 97), len(data) - 1]:
        assert fails(tmp_path, data[:nbytes]) in ("bad-header", "truncated-file")


def test_random_damage_gives_an_error_or_a_catalog(tmp_path):
    torch.save(
        {"m": {"w": torch.arange(30.0), "b": torch.ones(2)}, "n": {"x": (1, 2.5)}},
        tmp_path / "whole.pt",
    )
    data = (tmp_path / "whole.pt").read_bytes()
    chance = random.Random(0)
    for _ in range(400):
        image = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            image[chance.randrange(len(image))] = chance.randrange(256)
        (tmp_path / "c.pt").write_bytes(image)
        try:
            catalog = opened(tmp_path / "c.pt")
            for tensor in catalog.tensors:
                catalog.reader.payloads(tensor)
        except EmaCkptError:
            continue


def test_a_flipped_bit_in_the_pickle_is_seen(tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "c.pt")
    data = bytearray((tmp_path / "c.pt").read_bytes())
    data[data.index(b"weight")] ^= 1
    assert fails(tmp_path, bytes(data)) == "checksum"


def test_a_storage_of_another_size_than_the_pickle_says(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    with zipfile.ZipFile(tmp_path / "w.pt") as archive:
        data = archive.read("w/data.pkl")
    craft(tmp_path / "c.pt", data, **{"data/0": b"12345"})
    assert fails(tmp_path, (tmp_path / "c.pt").read_bytes()) == "bad-header"
    craft(tmp_path / "c.pt", data)
    assert fails(tmp_path, (tmp_path / "c.pt").read_bytes()) == "bad-header"


# --- writing ----------------------------------------------------------------------------------------------


def state() -> dict[str, torch.Tensor]:
    tensors = {f"layer.{str(dtype)[6:]}": of_dtype(dtype).reshape(2, 3) for dtype in ALL_DTYPES}
    odd = {
        "zero": torch.empty(0, 5),
        "none": torch.tensor([]),
        "scalar": torch.tensor(2.5),
        "模型 😀\n/": torch.ones(3),
    }
    return tensors | odd


def test_what_is_written_loads_safely_and_mapped(tmp_path):
    tensors = state()
    write(lay_out(entries(tensors)), tmp_path / "m.pt", tensors)
    found = loaded(tmp_path / "m.pt")
    assert list(found) == list(tensors)
    assert all(same(found[name], tensors[name]) for name in tensors)
    again = opened(tmp_path / "m.pt")
    assert again.digests == {
        name: zlib.crc32(raw_bytes(tensor)) for name, tensor in tensors.items()
    }
    assert all(same(read(again, name), tensors[name]) for name in tensors)


def test_payloads_are_aligned_and_checksums_true_everywhere(tmp_path):
    tensors = state()
    target = lay_out(entries(tensors))
    assert all(piece.offset % 64 == 0 for piece in target.items)
    write(target, tmp_path / "m.pt", tensors)
    data = (tmp_path / "m.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        assert archive.testzip() is None
        assert archive.namelist()[-1] == "archive/ema_ckpt.json"
        for info in archive.infolist():
            crc, packed, size = struct.unpack_from("<LLL", data, info.header_offset + 14)
            assert (crc, packed, size) == (info.CRC, info.file_size, info.file_size)
            assert info.compress_type == zipfile.ZIP_STORED


def test_an_empty_checkpoint_is_written(tmp_path):
    write(lay_out([]), tmp_path / "m.pt", {})
    assert loaded(tmp_path / "m.pt") == {}
    assert opened(tmp_path / "m.pt").tensors == ()


def test_ties_share_their_storage_unless_expanded(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    source = saved(tmp_path, {"a": weight, "b": weight, "t": weight.t(), "part": weight[:1]})
    tensors = {"a": weight, "b": weight, "t": weight.t(), "part": weight[:1]}
    copies = [entry(t.name, tensors[t.name], storage=t.storage) for t in source.tensors]
    write(lay_out(copies), tmp_path / "m.pt", tensors)
    found = loaded(tmp_path / "m.pt")
    assert all(same(found[name], tensors[name].contiguous()) for name in tensors)
    places = {name: tensor.untyped_storage().data_ptr() for name, tensor in found.items()}
    assert places["a"] == places["b"]
    assert len(set(places.values())) == 3
    assert opened(tmp_path / "m.pt").digests["b"] == zlib.crc32(raw_bytes(weight))
    write(lay_out(copies, expand_ties=True), tmp_path / "e.pt", tensors)
    found = loaded(tmp_path / "e.pt")
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 4


def test_a_trainer_state_goes_through_and_loads_into_its_optimizer(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9))
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "pair": (torch.ones(1), {"k": None}),
        "e": {},
        "l": [],
    }
    source = saved(tmp_path, state)
    values = {tensor.name: read(source, tensor.name) for tensor in source.tensors}
    copies = [entry(t.name, values[t.name], t.path) for t in source.tensors]
    write(
        lay_out(copies, nesting=source.nesting, objects=source.objects),
        tmp_path / "m.pt",
        values,
    )
    found = loaded(tmp_path / "m.pt")
    assert list(found) == list(state)
    assert found["optim"]["param_groups"] == state["optim"]["param_groups"]
    assert list(found["optim"]["state"]) == [0, 1, 2, 3]
    assert isinstance(found["pair"], tuple)
    assert (found["pair"][1], found["e"], found["l"]) == ({"k": None}, {}, [])
    fresh = torch.optim.AdamW(model.parameters())
    fresh.load_state_dict(found["optim"])
    assert same(
        fresh.state[next(model.parameters())]["exp_avg"],
        optimizer.state[next(model.parameters())]["exp_avg"],
    )
    again = opened(tmp_path / "m.pt")
    assert [(t.name, t.path) for t in again.tensors] == [(t.name, t.path) for t in source.tensors]


def test_objects_lie_at_the_top_of_a_flat_file(tmp_path):
    objects = [Object("step", ("step",), "", inline=7, is_inline=True)]
    write(
        lay_out(entries({"a.b": torch.ones(1)}), objects=objects),
        tmp_path / "m.pt",
        {"a.b": torch.ones(1)},
    )
    assert loaded(tmp_path / "m.pt") == {"a.b": torch.ones(1), "step": 7}


def test_what_does_not_fit_is_refused_by_name():
    objects = [Object("args", ("args",), "", inline=Opaque("m", "C", (), False), is_inline=True)]
    with pytest.raises(TargetError, match=r"'args'.*--exclude") as caught:
        lay_out([], objects=objects)
    assert (caught.value.code, caught.value.tensor) == ("unsupported", "args")
    with pytest.raises(TargetError, match="rename"):
        lay_out(entries({"a\ud800": torch.ones(1)}))
    collision = [entry("a", torch.ones(1), ("a",)), entry("a.b", torch.ones(1), ("a", "b"))]
    with pytest.raises(TargetError) as caught:
        lay_out(collision, nesting=Nesting())
    assert caught.value.code == "name-collision"


@pytest.mark.slow
def test_a_file_above_four_gigabytes(tmp_path):
    """zip64: one storage above 4 GiB, and one that begins behind it. Payloads are holes of a sparse file."""
    big = entry("big", torch.empty(2**32 + 8, dtype=torch.uint8, device="meta"))
    small = entry("small", torch.empty(4, device="meta"))
    target = lay_out([big, small])
    path = tmp_path / "m.pt"
    zeros = 0
    for _ in range(2**12):
        zeros = zlib.crc32(bytes(2**20), zeros)
    crcs = [zlib.crc32(bytes(8), zeros), zlib.crc32(bytes(16))]
    with path.open("wb") as file:
        file.truncate(target.files[""])
        for frame in all_header_bytes(target, crcs, {"big": crcs[0], "small": crcs[1]}):
            file.seek(frame.offset)
            file.write(frame.data)
    found = loaded(path)
    assert (found["big"].numel(), found["small"].tolist()) == (2**32 + 8, [0.0] * 4)
    assert [tensor.nbytes for tensor in opened(path).tensors] == [2**32 + 8, 16]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def rebuilt(tensor: torch.Tensor, number: int) -> tuple[torch.Tensor, int]:
    return tensor, number


class Rebuilt:
    """An object that pickles as a call of a function with a tensor, as wrappers of tensors do."""

    def __reduce__(self):
        return rebuilt, (torch.ones(3), 4)


def jagged() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor(
            [torch.arange(3.0), torch.arange(2.0)], layout=torch.jagged
        )


@pytest.mark.parametrize(
    ("value", "code"), [(jagged, "unsupported"), (Rebuilt, "unsafe-pickle")], ids=["jagged", "call"]
)
def test_what_is_not_read_is_refused_only_where_it_is_selected(tmp_path, value, code):
    path, weights = tmp_path / "run.pt", {"w": torch.arange(3.0)}
    torch.save({"model": weights, "extra": {"x": value()}}, path)
    assert code in {warning.code for warning in ema_ckpt.inspect(path).warnings}
    ema_ckpt.consolidate(path, tmp_path / "out.pt", tree="model")
    assert torch.equal(torch.load(tmp_path / "out.pt")["w"], weights["w"])
    with ema_ckpt.open(path) as ckpt:
        assert torch.equal(ckpt["model.w"], weights["w"])
    for name in ("all.pt", "all.safetensors"):
        with pytest.raises(EmaCkptError, match=r"extra\.x") as caught:
            ema_ckpt.convert(path, tmp_path / name)
        assert caught.value.code == code
    ema_ckpt.convert(path, tmp_path / "rest.pt", exclude=["extra.x"])
    assert ema_ckpt.verify(tmp_path / "rest.pt").status == "sound"


def test_what_consolidate_does_not_take_is_said(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "extra": Rebuilt()}, tmp_path / "run.pt")
    written = ema_ckpt.consolidate(tmp_path / "run.pt", tmp_path / "out.pt")
    (skipped,) = written.skipped
    assert skipped.name == "extra"
    assert "unpickling the tensors in it would call" in skipped.reason


@pytest.mark.parametrize("key", [("w", torch.ones(2)), (10**5000,), ((1, 10**5000),)])
def test_a_key_that_no_text_can_stand_for_is_refused(tmp_path, key):
    with pytest.raises(SourceError, match="a key of type tuple") as caught:
        saved(tmp_path, {"model": {key: torch.ones(2)}})
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize("extra", [b"\0" * 64, b"\0" * 1000], ids=len)
def test_bytes_after_the_end_make_no_other_kind_of_archive(tmp_path, extra):
    """As a crashed host leaves them, which had reserved more than was written."""
    path = tmp_path / "c.pt"
    torch.save({"w": torch.ones(2)}, path)
    path.write_bytes(path.read_bytes() + extra)
    assert torch.load(path)["w"].equal(torch.ones(2))
    assert ema_ckpt.verify(path).status == "sound"


@pytest.mark.parametrize("order", [b"", b"Little", b"little\n"])
def test_a_byte_order_that_torch_does_not_know_is_damage(tmp_path, order):
    path, other = tmp_path / "c.pt", tmp_path / "other.pt"
    torch.save({"w": torch.ones(2)}, path)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(other, "w") as target:
        for name in source.namelist():
            is_order = name.endswith("/byteorder")
            target.writestr(name, order if is_order else source.read(name))
    with pytest.raises(ValueError, match="endianness"):
        torch.load(other)
    found = ema_ckpt.verify(other)
    assert (found.status, found.problems[0].code) == ("damaged", "bad-header")
