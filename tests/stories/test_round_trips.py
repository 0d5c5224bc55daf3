"""A nested state goes through chains of formats and comes back the same, key types and order included."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ema_ckpt import EmaCkptError, convert, reshard

ENDINGS = {"dcp": "", "dcp of 3": "", "hf": "", "safetensors": ".safetensors", "pt": ".pt"}
CHAINS = [
    ("pt",),
    ("dcp",),
    ("safetensors",),
    ("dcp", "safetensors"),
    ("hf", "dcp of 3"),
    ("pt", "safetensors", "dcp"),
    ("dcp of 3", "dcp", "hf"),
]
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex64,
]  # fmt: skip
T = torch.arange(6.0).reshape(2, 3)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, dict):
        keys = list(zip(a, b, strict=False))
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in keys)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def raw(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


def through(state: Any, chain: tuple[str, ...], folder: Path) -> Any:
    path = folder / "start.pt"
    torch.save(state, path)
    for number, form in enumerate(chain):
        to = folder / f"{number}{ENDINGS[form]}"
        ranks = 3 if form == "dcp of 3" else None
        kind = "safetensors" if form == "hf" else None
        convert(path, to, to=kind, world_size=ranks, strict=True, no_fsync=True)
        path = to
    convert(path, folder / "end.pt", strict=True, no_fsync=True)
    return torch.load(folder / "end.pt", weights_only=True)


def trained() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"step": 1, "model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}


STATES = {
    "an optimizer": trained(),
    "integer keys in an order of their own": {"state": {n: {"m": T + n} for n in (10, 9, 2, 100)}},
    "keys of other types": {"m": {-1: {2: T}, None: T, 1.5: T, True: T, (1, 2): T}},
    "numbers as text and numbers": {"m": {0: T, 1: T}, "n": {"0": T, "1": T}, "l": [T, T]},
    "tuples in lists in tuples": {"a": (T, (T, [T, (1, T)])), "p": ((1, 2), [3])},
    "objects between tensors": {"b": T, "step": 1, "a": {"x": [T, 2, (T, 3)], "y": ()}, "z": {}, "lr": 0.1},
    "ties between others": {"z": T, "k": 5, "a": T, "m": {"q": T, "b": torch.ones(2)}},
    "odd names": {"m": dict.fromkeys(("a/b", "a b", "é", "*", "..", ".", "x.", "-", "0", "$dict"), T)},
    "names with dots": {"a.b": T, "a": {"c.d": T}},
    "a list at the top": [T, {"a": T}, 5],
    "a tuple at the top": (T, {"a": (T, 1)}, 5),
    "every dtype": {"m": {str(dtype): torch.ones(3, 2).to(dtype) for dtype in DTYPES}},
    "shapes": {"m": {"s": torch.tensor(3), "e": torch.empty(0, 3), "f": torch.empty(2, 0), "t": T.t()}},
    "values of torch's classes": {
        "w": T, "at": torch.device("cuda", 1), "size": torch.Size([2, 3]), "kind": (torch.strided, torch.bfloat16),
        "in": {"l": [torch.Size([1]), {"a": torch.device("cpu")}], torch.device("meta"): torch.Size([])},
    },
    "nothing": {},
    "no tensor": {"a": 1, "b": {"c": [1, (2,)]}},
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_through_every_chain(name: str, tmp_path: Path) -> None:
    for number, chain in enumerate(CHAINS):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert same(STATES[name], through(STATES[name], chain, folder)), chain


def test_an_optimizer_accepts_its_state_after_dcp(tmp_path: Path) -> None:
    state = through(trained(), ("dcp of 3",), tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(state["optimizer"])
    first = next(model.parameters())
    assert optimizer.state[first]["exp_avg"].equal(state["optimizer"]["state"][0]["exp_avg"])
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize("form", ENDINGS)
def test_a_path_becomes_text_with_a_word_and_a_bare_storage_is_left_out(
    form: str, tmp_path: Path
) -> None:
    torch.save(
        {"w": T, "out": [Path("/a/b")], "bare": [torch.UntypedStorage(4)]}, tmp_path / "in.pt"
    )
    target = tmp_path / f"out{ENDINGS[form]}"
    result = convert(tmp_path / "in.pt", target, to="safetensors" if form == "hf" else None)
    assert [(one.code, "'out'" in one.message) for one in result.warnings] == [("opaque", True)]
    assert [(one.name, "a storage without" in one.reason) for one in result.skipped] == [
        ("bare", True)
    ]
    convert(target, tmp_path / "back.pt")
    assert torch.load(tmp_path / "back.pt", weights_only=True)["out"] == ["/a/b"]


def test_text_and_a_device_that_read_the_same_are_two_keys(tmp_path: Path) -> None:
    torch.save({"w": T, "at": {"cpu": 1, torch.device("cpu"): 2}}, tmp_path / "in.pt")
    with pytest.raises(EmaCkptError) as caught:
        convert(tmp_path / "in.pt", tmp_path / "out.pt")
    assert caught.value.code == "name-collision"


@pytest.mark.parametrize("form", ENDINGS)
def test_keys_that_read_the_same_are_refused(form: str, tmp_path: Path) -> None:
    with pytest.raises(EmaCkptError, match="two keys that read '0'") as caught:
        through({"m": {0: T, "0": T}}, (form,), tmp_path)
    assert caught.value.code == "name-collision"
    assert [path.name for path in tmp_path.iterdir()] == ["start.pt"]


def test_keys_stay_numbers_under_another_name(tmp_path: Path) -> None:
    torch.save(trained(), tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b", rename=["optimizer=optim"])
    reshard(tmp_path / "b", tmp_path / "c", 2, tree="optim")
    convert(tmp_path / "c", tmp_path / "d.pt", rename=["optim.="])
    state = torch.load(tmp_path / "d.pt", weights_only=True)
    assert same(trained()["optimizer"]["param_groups"], state["param_groups"])
    assert list(state["state"]) == [0, 1, 2, 3]


KEYS = st.one_of(
    st.integers(-3, 12), st.text("ab.0/é ", max_size=3), st.sampled_from(["weight", "ema", "state"])
)
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3)
)
TENSORS = st.builds(
    lambda dtype, shape, fill: torch.full(shape, fill).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 1),
)
VALUES = st.recursive(
    st.one_of(TENSORS, PLAIN),
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=4),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, VALUES, max_size=4), st.sampled_from(CHAINS))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_state_comes_back_or_is_refused_by_name(state: Any, chain: tuple[str, ...]) -> None:
    with TemporaryDirectory() as folder:
        try:
            found = through(state, chain, Path(folder))
        except EmaCkptError as error:
            assert error.code in ("name-collision", "unsupported"), error
            assert not list(Path(folder).glob(".*"))
        else:
            assert same(state, found)
