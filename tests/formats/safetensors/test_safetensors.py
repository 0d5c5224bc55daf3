"""safetensors files and Hugging Face directories, against the `safetensors` and `transformers` packages."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ema_ckpt
from ema_ckpt.core.catalog import Nesting, Object
from ema_ckpt.core.errors import EmaCkptError, SourceError, TargetError, UnsafeError
from ema_ckpt.formats.safetensors import header as format_module
from ema_ckpt.formats.safetensors.reader import open_safetensors
from ema_ckpt.formats.safetensors.writer import lay_out, refusal
from ema_ckpt.storage.files import LocalFiles
from tests.formats.writing import entries, entry, raw_bytes, read, write
from tests.searches import examples

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16,
    torch.uint32, torch.uint64, torch.bool, torch.complex64,
]  # fmt: skip


def of_dtype(dtype: torch.dtype, numel: int = 6) -> torch.Tensor:
    """Arbitrary bits, one for the types whose bits are not all allowed."""
    if dtype is torch.bool:
        return torch.arange(numel) % 2 == 0
    itemsize = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(numel)
    return torch.randint(0, 256, (numel * itemsize,), dtype=torch.uint8, generator=generator).view(
        dtype
    )


def state() -> dict[str, torch.Tensor]:
    tensors = {f"layer.{str(dtype)[6:]}": of_dtype(dtype).reshape(2, 3) for dtype in DTYPES}
    odd = {
        "zero": torch.empty(0, 5),
        "none": torch.tensor([]),
        "none.too": torch.tensor([]),
        "scalar": torch.tensor(2.5),
        'naïve/päth\n"quoted"\\ 模型 😀': torch.arange(3),
        "": torch.arange(4, dtype=torch.int16),
    }
    return tensors | odd


def open_one(path: Path, **options):
    return open_safetensors(LocalFiles(path.parent), (path.name,), str(path), str(path), **options)


def open_index(directory: Path, **options):
    (index,) = directory.glob("*.index.json")
    return open_safetensors(
        LocalFiles(directory), (index.name,), str(directory), str(directory), **options
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and raw_bytes(a) == raw_bytes(b)


def raw_file(header: object, data: bytes = b"", *, nbytes: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if nbytes is None else nbytes).to_bytes(8, "little") + text + data


# --- writing, with safetensors as the oracle ------------------------------------------------------------


def test_what_is_written_loads_bit_for_bit(tmp_path):
    tensors = state()
    target = lay_out(entries(tensors), {"note": "käse"})
    write(target, tmp_path / "m.safetensors", tensors)
    loaded = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(same(loaded[name], tensors[name]) for name in tensors)
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.metadata()["note"] == "käse"


def test_header_is_padded_and_every_tensor_is_aligned(tmp_path):
    target = lay_out(entries(state()))
    assert target.items[0].offset % 8 == 0
    assert all(piece.offset % piece.output.dtype.itemsize == 0 for piece in target.items)
    order = [(-piece.output.dtype.itemsize, piece.output.name) for piece in target.items]
    assert order == sorted(order)


def test_digests_are_recorded_in_the_form_that_is_documented(tmp_path):
    tensors = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.empty(0)}
    write(lay_out(entries(tensors)), tmp_path / "m.safetensors", tensors)
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as file:
        document = json.loads(file.metadata()["ema_ckpt"])
    assert document["version"] == 1
    crc = zlib.crc32(tensors["w"].numpy().tobytes())
    assert document["digests"]["w"] == {
        "crc32": f"crc32:{crc:08x}",
        "dtype": "float32",
        "shape": [2, 3],
    }
    assert document["digests"]["n"]["crc32"] == "crc32:00000000"
    catalog = open_one(tmp_path / "m.safetensors")
    assert catalog.digests == {"w": crc, "n": 0}


@pytest.mark.parametrize("tensors", [{}, {"e": torch.empty(0)}], ids=["no tensors", "no bytes"])
def test_empty_checkpoints_round_trip(tmp_path, tensors):
    write(lay_out(entries(tensors), {"only": "metadata"}), tmp_path / "m.safetensors", tensors)
    assert safetensors.torch.load_file(tmp_path / "m.safetensors").keys() == tensors.keys()
    catalog = open_one(tmp_path / "m.safetensors")
    assert [t.name for t in catalog.tensors] == list(tensors)
    assert catalog.header_text == {"format": "pt", "only": "metadata"}
    write(lay_out(entries(tensors), max_shard_nbytes=100), tmp_path / "hf", tensors)
    assert safetensors.torch.load_file(tmp_path / "hf/model.safetensors").keys() == tensors.keys()


def test_directory_is_split_by_size_in_the_given_order(tmp_path):
    tensors = {
        "a": torch.arange(4.0),
        "b": torch.arange(30.0),
        "c": torch.arange(3.0),
        "d": torch.arange(4.0),
    }
    target = lay_out(entries(tensors), max_shard_nbytes=32)
    write(target, tmp_path, tensors)
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path)) == [
        "ema_ckpt.json",
        *shards,
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 41 * 4
    assert index["weight_map"] == {"a": shards[0], "b": shards[1], "c": shards[2], "d": shards[2]}
    for name, shard in index["weight_map"].items():
        assert same(safetensors.torch.load_file(tmp_path / shard)[name], tensors[name])
    catalog = open_index(tmp_path)
    assert catalog.digests == {
        name: zlib.crc32(raw_bytes(tensor)) for name, tensor in tensors.items()
    }
    assert all(same(read(catalog, name), tensors[name]) for name in tensors)
    assert catalog.files == {shard: (tmp_path / shard).stat().st_size for shard in shards}
    assert not catalog.warnings


def test_shards_agree_with_hugging_face_hub():
    from huggingface_hub import split_torch_state_dict_into_shards

    tensors = {
        f"t{i}": torch.empty(size) for i, size in enumerate([7, 1, 9, 30, 2, 2, 2, 12, 4, 4, 1])
    }
    ours = lay_out(entries(tensors), max_shard_nbytes=48)
    theirs = split_torch_state_dict_into_shards(tensors, max_shard_size=48)
    assert {n: len(names) for n, names in theirs.filename_to_tensors.items()}.keys() == set(ours.files) - {
        "ema_ckpt.json", "model.safetensors.index.json"
    }  # fmt: skip


@pytest.mark.thorough
def test_transformers_loads_a_directory_of_shards(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=50, n_positions=16)
    )
    tensors = {
        name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }
    write(lay_out(entries(tensors), max_shard_nbytes=3000), tmp_path, tensors)
    model.config.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists()
    loaded, info = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(
        same(a, b)
        for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
    )


def test_a_header_above_the_limit_is_refused_or_split(tmp_path, monkeypatch):
    monkeypatch.setattr(format_module, "MAX_HEADER_NBYTES", 1000)
    tensors = {f"name-{i:03}": torch.tensor(i) for i in range(40)}
    with pytest.raises(TargetError, match="above the limit of 1000") as caught:
        lay_out(entries(tensors))
    assert caught.value.code == "unsupported"
    target = lay_out(entries(tensors), max_shard_nbytes=10**9)
    assert len(target.shards) > 1
    assert all(start - 8 <= 1000 for start in target.starts)
    write(target, tmp_path, tensors)
    assert all(same(read(open_index(tmp_path), name), tensors[name]) for name in tensors)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32])
def test_a_dtype_that_the_format_lacks_is_refused_by_name(dtype):
    tensors = {"fine": torch.zeros(1), "bad.one": torch.zeros(16, dtype=torch.uint8).view(dtype)}
    with pytest.raises(TargetError, match=f"{str(dtype)[6:]}, which 'bad.one'") as caught:
        lay_out(entries(tensors))
    assert (caught.value.code, caught.value.tensor) == ("unsupported", "bad.one")
    assert refusal(entries(tensors)[1].dtype, (1,))


def test_numbers_of_four_bits_are_stored_as_the_library_stores_them(tmp_path):
    """The header counts numbers, torch pairs of them; the library has no form for a scalar."""
    bits = torch.arange(24, dtype=torch.uint8).reshape(3, 8)
    state = {"codes": bits.view(torch.float4_e2m1fn_x2), "scale": torch.ones(3)}
    safetensors.torch.save_file(state, tmp_path / "theirs.safetensors")
    assert ema_ckpt.verify(tmp_path / "theirs.safetensors").problems == ()
    for out in ("ours.safetensors", "dcp", "ours.pt", "again.safetensors"):
        source = tmp_path / ("dcp" if out.startswith("again") else "theirs.safetensors")
        ema_ckpt.convert(source, tmp_path / out)
        assert ema_ckpt.diff(tmp_path / "theirs.safetensors", tmp_path / out).identical == 2
    for file in ("ours.safetensors", "again.safetensors"):
        loaded = safetensors.torch.load_file(tmp_path / file)["codes"]
        assert loaded.shape == (3, 8)
        assert loaded.view(torch.uint8).equal(bits)
    loaded = torch.load(tmp_path / "ours.pt")["codes"]
    assert loaded.view(torch.uint8).equal(bits)
    scalar = {"one": bits.reshape(-1)[0].view(torch.float4_e2m1fn_x2)}
    with pytest.raises(TargetError, match="no scalar of float4_e2m1fn_x2"):
        lay_out(entries(scalar))


def test_types_that_torch_lacks_stop_only_who_needs_them(tmp_path):
    entries = {
        "six": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]},
        "bytes": {"dtype": "U8", "shape": [2], "data_offsets": [3, 5]},
        "odd": {"dtype": "F4", "shape": [2, 1], "data_offsets": [5, 6]},
    }
    source = tmp_path / "a.safetensors"
    source.write_bytes(raw_file(entries, b"123456"))
    with safetensors.safe_open(source, "pt") as file:
        assert set(file.keys()) == set(entries)
    assert [one.code for one in ema_ckpt.inspect(source).warnings] == ["unsupported"] * 2
    report = ema_ckpt.verify(source)
    assert (report.status, report.problems) == ("unproven", ())
    with pytest.raises(EmaCkptError, match=r"'six'.*F6_E2M3"):
        ema_ckpt.convert(source, tmp_path / "all")
    ema_ckpt.convert(source, tmp_path / "b.safetensors", exclude=["six", "odd"])
    (kept,) = safetensors.torch.load_file(tmp_path / "b.safetensors").values()
    assert kept.tolist() == list(b"45")


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800"])
def test_a_name_that_the_format_cannot_hold_is_refused(name):
    with pytest.raises(TargetError) as caught:
        lay_out(entries({name: torch.zeros(1)}), max_shard_nbytes=100)
    assert caught.value.code == "unsupported"


# --- nesting, objects and ties ---------------------------------------------------------------------------


def test_nesting_objects_and_ties_come_back(tmp_path):
    tensors = {"model.a.b": torch.arange(3.0), "optim.state.0": torch.arange(2)}
    nested = [
        entry("model.a.b", tensors["model.a.b"], ("model", "a.b")),
        entry("optim.state.0", tensors["optim.state.0"], ("optim", "state", 0)),
    ]
    value = {
        "betas": (0.9, 0.999),
        "lr": float("inf"),
        3: [None, True, 2**70, b"\0x", {1, 2}, 1 - 2j],
        "$x": "y",
    }
    objects = [Object("optim.groups", ("optim", "groups"), "", inline=value, is_inline=True)]
    ties = {"head.weight": "model.a.b"}
    nesting = Nesting(
        {("optim", "state", "3"): 3, ("a", "(1, 2)"): (1, 2)}, frozenset({(), ("optim", "t")})
    )
    for target, out in [
        (
            lay_out(nested, nesting=nesting, objects=objects, ties=ties),
            tmp_path / "m.safetensors",
        ),
        (
            lay_out(nested, max_shard_nbytes=10**9, nesting=nesting, objects=objects, ties=ties),
            tmp_path / "hf",
        ),
    ]:
        write(target, out, tensors)
        catalog = open_one(out if out.suffix else out / "model.safetensors")
        assert catalog.nested
        assert [tensor.path for tensor in catalog.tensors] == [
            ("model", "a.b"),
            ("optim", "state", 0),
            ("head.weight",),
        ]
        (item,) = catalog.objects
        assert (item.name, item.path) == ("optim.groups", ("optim", "groups"))
        assert repr(catalog.reader.load(item)) == repr(value)
        assert catalog.ties == ties
        assert catalog.nesting == nesting


@pytest.mark.parametrize("limit", [None, 10**9, 20])
def test_the_order_of_the_model_is_kept(tmp_path, limit):
    tensors = {
        "z": torch.ones(1),
        "m": torch.ones(3, dtype=torch.float64),
        "a": torch.ones(2),
        "b": torch.ones(1).bool(),
    }
    target = lay_out(entries(tensors), max_shard_nbytes=limit)
    out = tmp_path / "hf" if limit else tmp_path / "m.safetensors"
    write(target, out, tensors)
    catalog = (
        open_index(out) if limit == 20 else open_one(out / "model.safetensors" if limit else out)
    )
    assert [tensor.name for tensor in catalog.tensors] == list(tensors)


def test_tied_names_are_listed_again_at_their_recorded_paths(tmp_path):
    tensors = {"m.a": torch.arange(3.0), "m.c": torch.arange(2)}
    nested = [entry("m.a", tensors["m.a"], ("m", "a")), entry("m.c", tensors["m.c"], ("m", "c"))]
    path = tmp_path / "m.safetensors"
    target = lay_out(nested, nesting=Nesting(), ties={"m.b": "m.a"}, tied_paths={"m.b": ("m", "b")})
    write(target, path, tensors)
    assert safetensors.torch.load_file(path).keys() == tensors.keys()
    catalog = open_one(path)
    found = {tensor.name: tensor for tensor in catalog.tensors}
    assert list(found) == ["m.a", "m.c", "m.b"]
    assert found["m.b"].path == ("m", "b")
    assert found["m.b"].storage == found["m.a"].storage != found["m.c"].storage
    assert same(read(catalog, "m.b"), tensors["m.a"])
    assert catalog.digests["m.b"] == catalog.digests["m.a"]


def test_ties_that_save_model_recorded_are_known(tmp_path):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    safetensors.torch.save_model(model, str(tmp_path / "m.safetensors"))
    foreign = open_one(tmp_path / "m.safetensors")
    assert foreign.ties == {"b.weight": "a.weight"}
    assert "b.weight" not in {
        tensor.name for tensor in foreign.tensors
    }  # any text may stand there: writers pass it on
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "b.weight"}
    write(
        lay_out(entries(tensors), ties={"b.weight": "a.weight"}),
        tmp_path / "w.safetensors",
        tensors,
    )
    fresh = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    fresh["b"].weight = fresh["a"].weight
    ours = {tensor.name: tensor for tensor in open_one(tmp_path / "w.safetensors").tensors}
    assert sorted(ours) == sorted(model.state_dict())
    assert ours["b.weight"].storage == ours["a.weight"].storage != ours["a.bias"].storage
    assert ours["b.weight"].chunks == ours["a.weight"].chunks
    assert safetensors.torch.load_model(fresh, str(tmp_path / "w.safetensors")) == (set(), [])
    assert same(fresh["b"].weight, model["a"].weight)


# --- reading, with safetensors as the oracle --------------------------------------------------------------


def test_what_safetensors_writes_is_read_bit_for_bit(tmp_path):
    tensors = state()
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors", {"format": "pt", "a": "b"})
    catalog = open_one(tmp_path / "m.safetensors")
    assert {t.name: (t.path, t.shape, t.dtype.name) for t in catalog.tensors} == {
        name: ((name,), tuple(tensor.shape), str(tensor.dtype)[6:])
        for name, tensor in tensors.items()
    }
    assert all(same(read(catalog, name), tensor) for name, tensor in tensors.items())
    assert not catalog.nested
    assert not catalog.digests
    assert catalog.header_text == {"format": "pt", "a": "b"}


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD_HEADERS = {
    "not json": (raw_file(b"{nonsense}"), "bad-header"),
    "not an object": (raw_file(b"[]"), "bad-header"),
    "byte order mark": (raw_file(b"\xef\xbb\xbf{}"), "bad-header"),
    "vertical tab": (raw_file(b"\x0b{}"), "bad-header"),
    "NaN": (raw_file(b'{"a": NaN}'), "bad-header"),
    "deep": (raw_file(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "bad-header"),
    "huge number": (raw_file(b'{"a":' + b"9" * 5000 + b"}"), "bad-header"),
    "not utf-8": (raw_file(b'{"\xff":{}}'), "bad-header"),
    "surrogate": (raw_file(b'{"\\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'), "bad-header"),
    "same key twice": (
        raw_file(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                 b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"), "bad-header"),
    "same field twice": (
        raw_file(b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"x"), "bad-header"),
    "unknown dtype": (raw_file({"a": F32 | {"dtype": "F33"}}, b"12345678"), "bad-header"),
    "dtype no text": (raw_file({"a": F32 | {"dtype": []}}, b"12345678"), "bad-header"),
    "six bits against bytes": (raw_file({"a": F32 | {"dtype": "F6_E2M3"}}, b"12345678"), "bad-header"),
    "half a byte": (raw_file({"a": F32 | {"dtype": "F4", "shape": [15]}}, b"12345678"), "bad-header"),
    "four bits against bytes": (raw_file({"a": F32 | {"dtype": "F4"}}, b"12345678"), "bad-header"),
    "negative dim": (raw_file({"a": F32 | {"shape": [-2]}}, b"12345678"), "bad-header"),
    "fractional dim": (raw_file({"a": F32 | {"shape": [2.0]}}, b"12345678"), "bad-header"),
    "bool dim": (raw_file({"a": F32 | {"shape": [2, True]}}, b"12345678"), "bad-header"),
    "huge shape": (raw_file({"a": F32 | {"shape": [2**40, 2**40]}}, b"12345678"), "out-of-bounds"),
    "shape against bytes": (raw_file({"a": F32 | {"shape": [3]}}, b"12345678"), "bad-header"),
    "three offsets": (raw_file({"a": F32 | {"data_offsets": [0, 4, 8]}}, b"12345678"), "bad-header"),
    "backward offsets": (raw_file({"a": F32 | {"data_offsets": [8, 0]}}, b"12345678"), "bad-header"),
    "field missing": (raw_file({"a": {"dtype": "F32", "shape": [2]}}, b"12345678"), "bad-header"),
    "hole": (raw_file({"a": F32 | {"data_offsets": [4, 12]}}, b"123456789012"), "bad-header"),
    "overlap": (raw_file({"a": F32, "b": F32 | {"data_offsets": [4, 12]}}, b"123456789012"), "bad-header"),
    "same bytes twice": (raw_file({"a": F32, "b": F32}, b"12345678"), "bad-header"),
    "trailing bytes": (raw_file({"a": F32}, b"123456789"), "bad-header"),
    "metadata no text": (raw_file({"__metadata__": {"a": 1}}), "bad-header"),
    "metadata no map": (raw_file({"__metadata__": []}), "bad-header"),
    "own record damaged": (raw_file({"__metadata__": {"ema_ckpt": "{}"}}), "bad-header"),
    "own record no json": (raw_file({"__metadata__": {"ema_ckpt": "}"}}), "bad-header"),
    "length above limit": (raw_file(b"{}", nbytes=100_000_001), "bad-header"),
    "pickle": (b"PK\x03\x04\0\0\x08\x08" + b"\0" * 100, "bad-header"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\n", "bad-header"),
    "empty file": (b"", "truncated-file"),
    "seven bytes": (b"1234567", "truncated-file"),
    "header cut": (raw_file(b'{"a":', nbytes=500), "truncated-file"),
    "one byte short": (raw_file({"a": F32}, b"1234567"), "truncated-file"),
    "offsets of no tensor": (
        raw_file({"a": F32, "__metadata__": {"DCP_SHARDING_INFO": "{}"}}, b"12345678"), "bad-header"),
    "offsets of another rank": (
        raw_file({"a": F32, "__metadata__": {"DCP_SHARDING_INFO": '{"a":{"saved_offsets":[0,0]}}'}},
                 b"12345678"), "bad-header"),
    "offsets beyond all bounds": (
        raw_file({"a": F32, "__metadata__": {"DCP_SHARDING_INFO": f'{{"a":{{"saved_offsets":[{2**62}]}}}}'}},
                 b"12345678"), "out-of-bounds"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_damaged_files_are_refused_by_name(tmp_path, case):
    data, code = BAD_HEADERS[case]
    (tmp_path / "bad.safetensors").write_bytes(data)
    with pytest.raises(SourceError, match=r"bad\.safetensors") as caught:
        open_one(tmp_path / "bad.safetensors")
    assert (caught.value.code, caught.value.file) == (code, "bad.safetensors")


@pytest.mark.thorough
@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_mutated_header_gives_the_truth_or_an_error(tmp_path, data):
    """Never stricter than needed to be safe, never laxer than safetensors itself, and no other exception."""
    tensors = {"a": torch.arange(4.0), "b.c": torch.arange(3), "z": torch.empty(0)}
    image = bytearray(safetensors.torch.save(tensors, {"k": "v"}))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(image) - 1))
        if data.draw(st.booleans()):
            image[position] = data.draw(st.integers(0, 255))
        else:
            del image[position : position + data.draw(st.integers(1, 4))]
    path = tmp_path / "m.safetensors"
    path.write_bytes(image)
    try:
        catalog = open_one(path)
    except EmaCkptError:
        return
    theirs = safetensors.torch.load_file(path)
    assert {t.name for t in catalog.tensors} == theirs.keys()
    assert all(same(read(catalog, name), tensor) for name, tensor in theirs.items())


# --- digests, indices, directories -----------------------------------------------------------------------


def rewrite_header(path: Path, change) -> None:
    image = path.read_bytes()
    nbytes = int.from_bytes(image[:8], "little")
    header = json.loads(image[8 : 8 + nbytes])
    change(header)
    path.write_bytes(raw_file(header, image[8 + nbytes :]))


def without_description(header: dict) -> None:
    """As a record of ema_ckpt before it said of what tensors it is, and had a checksum."""
    record = json.loads(header["__metadata__"]["ema_ckpt"])
    del record["describes"], record["crc32"]
    header["__metadata__"]["ema_ckpt"] = json.dumps(record)


def test_a_digest_of_another_dtype_is_damage(tmp_path):
    tensors = {"w": torch.arange(6, dtype=torch.float16)}
    path = tmp_path / "m.safetensors"
    write(lay_out(entries(tensors)), path, tensors)
    rewrite_header(path, lambda header: header["w"].update(dtype="BF16"))
    rewrite_header(path, without_description)
    with pytest.raises(
        SourceError, match=r"'w' is bfloat16 \[6\], but its digest was taken of float16"
    ) as caught:
        open_one(path)
    assert caught.value.code == "checksum"


def test_a_lost_tensor_is_noticed_by_its_digest(tmp_path):
    tensors = {"w": torch.arange(2.0), "lost": torch.empty(0)}
    path = tmp_path / "m.safetensors"
    write(lay_out(entries(tensors)), path, tensors)
    rewrite_header(path, lambda header: header.pop("lost"))
    rewrite_header(path, without_description)
    with pytest.raises(SourceError, match="'lost'") as caught:
        open_one(path)
    assert caught.value.code == "index-mismatch"


EDITS = {
    "renamed": lambda tensors: {f"new.{name}": tensor for name, tensor in tensors.items()},
    "cast": lambda tensors: {name: tensor.half() for name, tensor in tensors.items()},
    "one left out": lambda tensors: dict([*tensors.items()][1:]),
    "one more": lambda tensors: {**tensors, "model.more": torch.ones(2)},
    "another shape": lambda tensors: {**tensors, "model.a": tensors["model.a"].t().contiguous()},
    "other values": lambda tensors: {name: tensor + 1 for name, tensor in tensors.items()},
    "exchanged": lambda tensors: {
        **tensors,
        "model.b": tensors["ema.weights.b"],
        "ema.weights.b": tensors["model.b"],
    },
}


@pytest.mark.parametrize("is_directory", [False, True])
@pytest.mark.parametrize("edit", EDITS)
def test_another_program_changes_the_tensors_and_keeps_the_record(tmp_path, edit, is_directory):
    """As `save_file(changed, path, metadata=f.metadata())` does: noticed, and read for what it is now."""
    tree = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
    average = {
        "weights": {name: tensor + 0.5 for name, tensor in tree.items()},
        "num_updates": torch.tensor(2),
    }
    torch.save({"model": tree, "ema": average}, tmp_path / "source.pt")
    path = tmp_path / "ours.safetensors"
    if is_directory:
        ema_ckpt.convert(tmp_path / "source.pt", tmp_path / "ours", to="safetensors")
        path = tmp_path / "ours" / "model.safetensors"
    else:
        ema_ckpt.convert(tmp_path / "source.pt", path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(path)
    changed = EDITS[edit](tensors)
    safetensors.torch.save_file(changed, path, metadata)
    named = path.parent if is_directory else path
    seen = ema_ckpt.verify(named)
    if edit in ("other values", "exchanged"):
        assert seen.status == "damaged"
        assert {problem.code for problem in seen.problems} == {"checksum"}
        return
    assert seen.status == "unproven"
    assert "stale-file" in {warning.code for warning in seen.warnings}
    with ema_ckpt.open(named) as ckpt:
        assert set(ckpt) == set(changed)
        for name, tensor in changed.items():
            assert torch.equal(ckpt[name], tensor)


def test_another_program_that_changes_no_tensor_is_not_noticed(tmp_path):
    torch.save({"model": {"a": torch.ones(2, 3)}, "step": 3}, tmp_path / "source.pt")
    path = tmp_path / "ours.safetensors"
    ema_ckpt.convert(tmp_path / "source.pt", path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file(tensors, path, {**metadata, "author": "me"})
    seen = ema_ckpt.verify(path)
    assert (seen.status, seen.warnings) == ("sound", ())
    with ema_ckpt.open(path) as ckpt:
        assert ckpt.objects["step"] == 3


def test_a_record_of_a_later_version_is_left_alone_with_a_warning(tmp_path):
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(1)}, path, {"ema_ckpt": '{"version": 3}'})
    catalog = open_one(path)
    assert not catalog.digests
    assert [warning.code for warning in catalog.warnings] == ["unchecked"]


def sharded(tmp_path: Path) -> dict[str, torch.Tensor]:
    tensors = {f"t{i}": torch.full((4,), float(i)) for i in range(3)}
    write(lay_out(entries(tensors), max_shard_nbytes=16), tmp_path, tensors)
    return tensors


def test_one_shard_opens_alone_with_its_digest(tmp_path):
    tensors = sharded(tmp_path)
    catalog = open_one(tmp_path / "model-00002-of-00003.safetensors")
    assert catalog.digests == {"t1": zlib.crc32(raw_bytes(tensors["t1"]))}


def test_a_sidecar_of_other_files_is_not_believed(tmp_path):
    sharded(tmp_path)
    safetensors.torch.save_file({"t1": torch.zeros(9)}, tmp_path / "other.safetensors")
    assert not open_one(tmp_path / "other.safetensors").digests


def change_index(tmp_path: Path, change) -> None:
    index = tmp_path / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    change(document)
    index.write_text(json.dumps(document))


INDEX_FAULTS = {
    "name in no shard": (lambda d: d["weight_map"].update(extra="model-00001-of-00003.safetensors"), "index-mismatch"),
    "name in another shard": (
        lambda d: d["weight_map"].update(t0="model-00002-of-00003.safetensors"), "index-mismatch"),
    "no such shard": (lambda d: d["weight_map"].update(t0="model-00009-of-00003.safetensors"), "missing-file"),
    "leaves the directory": (lambda d: d["weight_map"].update(t0="../m.safetensors"), "unsafe-path"),
    "absolute": (lambda d: d["weight_map"].update(t0="/etc/passwd"), "unsafe-path"),
    "no weight map": (lambda d: d.pop("weight_map"), "bad-header"),
    "weight map no text": (lambda d: d["weight_map"].update(t0=3), "bad-header"),
}  # fmt: skip


@pytest.mark.parametrize("case", INDEX_FAULTS)
def test_an_index_against_its_shards(tmp_path, case):
    change, code = INDEX_FAULTS[case]
    sharded(tmp_path)
    change_index(tmp_path, change)
    with pytest.raises(SourceError) as caught:
        open_index(tmp_path)
    assert caught.value.code == code
    assert isinstance(caught.value, UnsafeError) == (code == "unsafe-path")


def test_the_same_key_twice_in_an_index_is_refused(tmp_path):
    sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"t1":', '"t0":'))
    with pytest.raises(SourceError, match="'t0' is given twice") as caught:
        open_index(tmp_path)
    assert caught.value.code == "bad-header"


def test_a_wrong_total_size_is_only_a_warning(tmp_path):
    sharded(tmp_path)
    change_index(tmp_path, lambda d: d["metadata"].update(total_size=1))
    codes = [warning.code for warning in open_index(tmp_path).warnings]
    assert codes == ["index-mismatch", "stale-file"]


def test_the_record_beside_an_index_that_was_written_again_is_ignored(tmp_path):
    sharded(tmp_path)
    assert open_index(tmp_path).digests.keys() == {"t0", "t1", "t2"}
    change_index(tmp_path, lambda d: d["weight_map"].pop("t1"))
    catalog = open_index(tmp_path)
    assert [tensor.name for tensor in catalog.tensors] == ["t0", "t2"]
    assert catalog.digests == {}
    assert [warning.code for warning in catalog.warnings][-1:] == ["stale-file"]


def test_missing_and_short_shards_stop_all_but_a_lenient_reader(tmp_path):
    sharded(tmp_path)
    first, second = (
        tmp_path / "model-00001-of-00003.safetensors",
        tmp_path / "model-00002-of-00003.safetensors",
    )
    first.unlink()
    os.truncate(second, second.stat().st_size - 1)
    with pytest.raises(SourceError) as caught:
        open_index(tmp_path)
    assert (caught.value.code, caught.value.file) == ("missing-file", first.name)
    for told in (first.name, "'t0'", second.name, "'t1'", "truncated"):
        assert told in str(caught.value)
    catalog = open_index(tmp_path, lenient=True)
    assert [problem.code for problem in catalog.problems] == ["missing-file"]
    assert "'t0'" in catalog.problems[0].message
    assert [tensor.name for tensor in catalog.tensors] == ["t1", "t2"]


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_every_entry_of_an_index_is_tried_whatever_was_found_before(tmp_path, kind):
    """Two files away, one without its header or directory, one wrong entry: all are told, by every verb."""
    names = [f"model-0000{i}-of-00005.{kind}" for i in range(1, 6)]
    save = safetensors.torch.save_file if kind == "safetensors" else torch.save
    for number, name in enumerate(names):
        save({f"t{number}": torch.arange(3.0) + number}, tmp_path / name)
    weight_map = {f"t{number}": name for number, name in enumerate(names)}
    index = tmp_path / ("model.safetensors" if kind == "safetensors" else "pytorch_model.bin")
    document = {"metadata": {}, "weight_map": weight_map | {"not.there": names[4]}}
    index.with_name(f"{index.name}.index.json").write_text(json.dumps(document))
    (tmp_path / names[0]).unlink()
    (tmp_path / names[2]).unlink()
    os.truncate(tmp_path / names[3], 30)

    found = ema_ckpt.verify(tmp_path)
    assert found.status == "damaged"
    told = {names[0]: "t0", names[2]: "t2", names[3]: "t3", names[4]: "not.there"}
    assert {problem.file for problem in found.problems} == told.keys()
    assert found.checked_bytes + found.unchecked_bytes >= 24  # of what is there
    for file, name in told.items():
        assert any(
            file in problem.message and repr(name) in problem.message for problem in found.problems
        )
    for refused in (ema_ckpt.inspect, lambda path: ema_ckpt.consolidate(path, f"{path}.pt")):
        with pytest.raises(SourceError) as caught:
            refused(tmp_path)
        message = str(caught.value)
        assert all(file in message and repr(name) in message for file, name in told.items())

    document["weight_map"] = weight_map
    index.with_name(f"{index.name}.index.json").write_text(json.dumps(document))
    listed = ema_ckpt.inspect(tmp_path)
    assert [tensor.name for tensor in listed.tensors] == ["t1", "t4"]
    assert {w.message.partition(":")[0] for w in listed.warnings} >= {names[0], names[2], names[3]}


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**40) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.thorough
@settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    spaces=st.tuples(*[st.text(" \n\t\r\x0b\0", max_size=2)] * 2),
    fields=st.dictionaries(st.text(min_size=1, max_size=9), JSON_VALUES, max_size=2),
    metadata=JSON_VALUES | st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
)
def test_headers_are_accepted_just_as_the_reference_does(tmp_path, spaces, fields, metadata):
    """Spaces around the header, unknown fields in an entry, any `__metadata__`."""
    header = {
        "a": F32 | {k: v for k, v in fields.items() if k not in F32},
        "__metadata__": metadata,
    }
    text = spaces[0] + json.dumps(header, ensure_ascii=False) + spaces[1]
    data = raw_file(text.encode("utf-8", "surrogatepass"), b"12345678")
    (tmp_path / "x.safetensors").write_bytes(data)
    try:
        expected = safetensors.torch.load(data)["a"]
    except safetensors.SafetensorError:
        expected = None
    try:
        found = read(open_one(tmp_path / "x.safetensors"), "a")
    except SourceError as error:
        assert expected is None, error
        assert error.code == "bad-header"
    else:
        assert expected is not None
        assert same(found, expected)


def test_a_fifo_in_the_place_of_a_shard_is_refused_and_does_not_hang(tmp_path):
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    os.mkfifo(tmp_path / "model-00002-of-00003.safetensors")
    with pytest.raises(UnsafeError):
        open_index(tmp_path)


def test_one_damaged_character_of_a_name_is_no_change_by_a_program(
    tmp_path: Path, fixtures: Path
) -> None:
    path = tmp_path / "ours.safetensors"
    ema_ckpt.convert(fixtures / "dcp" / "trees-w1", path)
    data = path.read_bytes()
    at = data.index(b',"optimizer.state.') + 12  # in the header's entry, not in the record
    changed = data[:at] + b"w" + data[at + 1 :]
    path.write_bytes(changed)
    seen = ema_ckpt.verify(path)
    assert seen.status == "damaged"
    assert {problem.code for problem in seen.problems} == {"index-mismatch"}
    with pytest.raises(SourceError, match="one character"):
        ema_ckpt.convert(path, tmp_path / "copy")
