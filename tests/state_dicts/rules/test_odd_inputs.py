"""Rules over what is rare: no elements, no axes, odd types and names, many names, hostile ones."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ema_ckpt import EmaCkptError, convert
from ema_ckpt.core.catalog import Catalog, Chunk, Tensor
from ema_ckpt.core.dtypes import by_name
from ema_ckpt.state_dicts.rules.rule_file import parse_rules
from ema_ckpt.state_dicts.rules.ruled_catalog import apply_rules
from ema_ckpt.state_dicts.tree import list_trees
from tests.catalogs import Memory
from tests.sharded import save_cut
from tests.state_dicts.rules import stored

DTYPES = [
    torch.float64, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.complex128, torch.int8, torch.bool,
    torch.uint16, torch.bfloat16,
]  # fmt: skip


def rules_file(folder: Path, text: str) -> Path:
    (folder / "rules.toml").write_text(text)
    return folder / "rules.toml"


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_is_moved_unread(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randint(0, 2, (4, 6, 3)).to(dtype)
    torch.save({"a.0": values, "a.1": values.clone()}, tmp_path / "a.pt")
    text = "[[rule]]\nfrom = 'a.{n}'\nto = 'b'\nsteps = [{ stack = 'n', dim = 1 }, { permute = [3, 1, 0, 2] }]"
    convert(tmp_path / "a.pt", tmp_path / "b.pt", rules=rules_file(tmp_path, text))
    found = torch.load(tmp_path / "b.pt", weights_only=True)["b"]
    expected = torch.stack([values, values], 1).permute(3, 1, 0, 2)
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    assert bits(found) == bits(expected)


def test_no_axes_and_no_elements(tmp_path: Path) -> None:
    named = {f"s.{n}": torch.tensor(float(n)) for n in range(3)}
    named |= {f"e.{n}": torch.empty(0, 4) for n in range(2)}
    named |= {"one": torch.tensor([5.0]), "zero.a": torch.empty(2, 0)}
    save_file(named, tmp_path / "a.safetensors")
    text = """
[[rule]]
from = "s.{n}"
to = "scalars"
steps = [{ stack = "n" }]
[[rule]]
from = "e.{n}"
to = "empty"
steps = [{ stack = "n", dim = -1 }, { flatten = [0, 2], sizes = [-1, 4, 2] }]
[[rule]]
from = "zero.a"
to = ["zero.b", "zero.c"]
steps = [{ split = 0 }, { transpose = [0, 1] }]
"""
    rules = rules_file(tmp_path, text)
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rules=rules)
    found = load_file(tmp_path / "b.safetensors")
    assert torch.equal(found["scalars"], torch.arange(3.0))
    assert found["empty"].shape == (0,)
    assert found["zero.b"].shape == found["zero.c"].shape == (0, 1)
    convert(tmp_path / "b.safetensors", tmp_path / "c.safetensors", rules=rules, inverse=True)
    back = load_file(tmp_path / "c.safetensors")
    assert back.keys() == named.keys()
    assert all(torch.equal(back[name], named[name]) for name in named)


def test_columns_on_several_ranks_are_transposed(tmp_path: Path) -> None:
    values = torch.randn(700, 300)
    cuts = {"model.w": [[((0, 0), (700, 130))], [((0, 130), (400, 170)), ((400, 130), (300, 170))]]}
    save_cut(tmp_path / "run", {"model.w": values}, cuts)
    text = "[[rule]]\nfrom = 'w'\nto = 'w'\nsteps = [{ transpose = [0, 1] }]"
    rules = rules_file(tmp_path, text)
    for name, options in {"a.pt": {}, "b.pt": {"max_memory": "4MiB", "threads": 3}}.items():
        convert(tmp_path / "run", tmp_path / name, rules=rules, **options)
        found = torch.load(tmp_path / name, weights_only=True)["model"]["w"]
        assert torch.equal(found, values.T)


def test_large_tiles_are_transposed(tmp_path: Path) -> None:
    """Rows so long that each is a read of its own, and shorter ones that are read over."""
    for shape in ((300, 40_000), (9_000, 700)):
        values = torch.arange(shape[0] * shape[1], dtype=torch.int32).reshape(shape)
        save_file({"w": values}, tmp_path / "a.safetensors")
        rules = rules_file(
            tmp_path, "[[rule]]\nfrom = 'w'\nto = 'v'\nsteps = [{ transpose = [0, 1] }]"
        )
        for options in ({}, {"max_memory": "4MiB", "threads": 1}):
            target = tmp_path / "b.safetensors"
            convert(tmp_path / "a.safetensors", target, rules=rules, overwrite=True, **options)
            assert torch.equal(load_file(target)["v"], values.T)


def test_damage_behind_a_rule_is_found(tmp_path: Path) -> None:
    save_file({"w": torch.randn(64, 64)}, tmp_path / "plain.safetensors")
    convert(tmp_path / "plain.safetensors", tmp_path / "a.safetensors")
    data = bytearray((tmp_path / "a.safetensors").read_bytes())
    data[-100] ^= 1
    (tmp_path / "a.safetensors").write_bytes(data)
    for steps in (
        "{ transpose = [0, 1] }",
        "{ flatten = [0, 1] }",
        "{ unflatten = 1, sizes = [2, -1] }",
    ):
        rules = rules_file(tmp_path, f"[[rule]]\nfrom = 'w'\nto = 'v'\nsteps = [{steps}]")
        with pytest.raises(EmaCkptError) as found:
            convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", rules=rules)
        assert found.value.code == "checksum"
        assert not (tmp_path / "b.safetensors").exists()


def test_a_hole_is_told_only_where_it_is_written() -> None:
    catalog = stored.catalog_of(
        {"a.0": torch.ones(4), "a.1": torch.ones(4)}, random.Random(0), strided=False
    )
    first = catalog.tensors[0]
    broken = Tensor(first.name, first.path, first.shape, first.dtype, ())
    catalog = Catalog(
        "m",
        "m",
        "safetensors",
        (broken, catalog.tensors[1]),
        (),
        catalog.source,
        catalog.reader,
        nested=False,
    )
    rules = parse_rules(
        {"rule": [{"from": "a.{n}", "to": "b", "steps": [{"stack": "n"}]}]}, "r", {}
    )
    done = apply_rules(rules, catalog, list_trees(catalog))
    (tensor,) = done.catalog.tensors
    with pytest.raises(EmaCkptError, match=r"'a\.0'.*not stored whole") as found:
        stored.read(done.catalog, tensor)
    assert found.value.code == "hole"


def test_odd_names(tmp_path: Path) -> None:
    named = {
        "a/b.w": torch.ones(2),
        "ü {x}.w": torch.ones(3),
        "l.007.w": torch.ones(4),
        "l.1.w": torch.ones(5),
    }
    save_file(named, tmp_path / "a.safetensors")
    text = (
        "[[rule]]\nfrom = '{name}.w'\nto = '{name}.v'\n[[rule]]\nfrom = 'l.{n}.w'\nto = 'l.{n}.u'\n"
    )
    convert(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", rules=rules_file(tmp_path, text)
    )
    assert load_file(tmp_path / "b.safetensors").keys() == {"a/b.v", "ü {x}.v", "l.007.u", "l.1.u"}
    text = "[[rule]]\nfrom = 'l.{n}.w'\nto = 'l'\nsteps = [{ stack = 'n' }]\n"
    with pytest.raises(
        EmaCkptError, match=r"1 of 2 members are missing: 'l\.0\.w'"
    ):  # 007 is no index
        convert(
            tmp_path / "a.safetensors", tmp_path / "c.safetensors", rules=rules_file(tmp_path, text)
        )


def wide_catalog(names: list[str]) -> Catalog:
    memory, dtype = Memory(), by_name("float32")
    tensors = tuple(Tensor(n, (n,), (2,), dtype, (Chunk((0,), (2,), "f", 0, 8),)) for n in names)
    return Catalog("m", "m", "safetensors", tensors, (), memory, memory, nested=False)


def test_hostile_names_end_soon() -> None:
    """Counted in names, not in seconds; a search that grew without bound would not end at all."""
    names = ["x" * 200 + f".{n}" for n in range(20)]
    patterns = {"from": "{a:.*}y{b:.*}z{c:.*}", "to": "{a}.{b}.{c}", "optional": True}
    rules = parse_rules({"rule": [patterns, {"from": "{r:.*}.0", "to": "{r}"}]}, "r", {})
    catalog = wide_catalog(names)
    assert len(apply_rules(rules, catalog, list_trees(catalog)).catalog.tensors) == 20
    catalog = wide_catalog(["e.0.w", "e.999999.w"])
    rules = parse_rules(
        {"rule": [{"from": "e.{n}.w", "to": "e", "steps": [{"stack": "n"}]}]}, "r", {}
    )
    with pytest.raises(EmaCkptError, match="999998 of 1000000 members are missing"):
        apply_rules(rules, catalog, list_trees(catalog))


@pytest.mark.parametrize(("letters", "code"), [(400, "empty-selection"), (20_000, "unsupported")])
def test_a_long_name_keeps_no_pattern_busy(tmp_path: Path, letters: int, code: str) -> None:
    """Three repetitions are tried at the cube of its length: hours for 20 000 letters."""
    save_file({"a" * letters + "cb": torch.zeros(2)}, tmp_path / "in.safetensors")
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nfrom = "{x:a*}{y:a*}{z:a*}b"\nto = "{x}{y}{z}"\n')
    with pytest.raises(EmaCkptError) as caught:
        convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", rules=rules)
    assert caught.value.code == code
