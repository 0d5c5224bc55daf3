"""Opening: every format through one call, parts joined into one catalog, EMA settings read."""

from __future__ import annotations

import io
import json
import pickle
import time
import zlib
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from ema_ckpt.core.catalog import Catalog, Tensor
from ema_ckpt.core.errors import EmaCkptError
from ema_ckpt.discovery.opening import open_catalog
from ema_ckpt.ops.consolidate import consolidate
from ema_ckpt.ops.convert import convert
from ema_ckpt.state_dicts.ema_config import EmaConfig, read_ema_config
from ema_ckpt.state_dicts.selection import options, select_all
from ema_ckpt.state_dicts.tree import Tree, find_tree, list_trees, live_of
from tests.catalogs import INT, SCALAR, T, catalog_of
from tests.checkpoints import (
    dcp_at,
    ema,
    safetensors_at,
    save_dcp,
    save_replicas,
    torch_at,
    touch,
    weights,
)


def value(catalog: Catalog, name: str) -> list[float]:
    """The numbers of a float32 tensor that is stored whole, read through the catalog alone."""
    tensor = next(tensor for tensor in catalog.tensors if tensor.name == name)
    (payload,) = catalog.reader.payloads(tensor)
    data = catalog.source.read(payload.file, payload.offset, payload.nbytes)
    if payload.crc is not None:
        assert zlib.crc32(data) == payload.crc
    return torch.frombuffer(bytearray(data), dtype=torch.float32).tolist()


def refused(code: str, path: Path) -> str:
    with pytest.raises(EmaCkptError) as caught:
        list_trees(open_catalog(path))
    assert caught.value.code == code
    return str(caught.value)


def roles(catalog: Catalog) -> dict[str, str]:
    return {tree.name: tree.role for tree in list_trees(catalog)}


def picked(catalog: Catalog, name: str) -> Tree:
    return find_tree(list_trees(catalog), name)


@pytest.mark.parametrize("kind", ["dcp", "safetensors", "torch"])
def test_every_format_through_one_call(tmp_path: Path, kind: str) -> None:
    if kind == "dcp":
        path = save_dcp(tmp_path / "ckpt", weights())
    elif kind == "safetensors":
        path = safetensors_at(tmp_path / "ckpt.safetensors")
    else:
        path = torch_at(tmp_path / "ckpt.pt")
    for catalog in (open_catalog(path), open_catalog(str(path)), open_catalog(tmp_path)):
        assert catalog.format == kind
        # The only safetensors file of a directory is what that directory is.
        assert catalog.resolved in (
            str(path),
            str(tmp_path) if kind == "safetensors" else str(path),
        )
        assert value(catalog, "layer.w") == weights()["layer.w"].flatten().tolist()
        assert roles(catalog) == {"": "live"}
        catalog.source.close()


def test_the_choice_of_a_step_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (9, 10):
        dcp_at(tmp_path / f"step_{step}")
    caplog.set_level("INFO", "ema_ckpt")
    caplog.clear()  # torch logged each save
    catalog = open_catalog(tmp_path)
    assert (catalog.path, catalog.resolved) == (str(tmp_path), str(tmp_path / "step_10"))
    assert caplog.messages == [f"reading step_10, the newest complete of 2 steps in {tmp_path}"]
    open_catalog(tmp_path / "step_10")
    assert len(caplog.messages) == 1


def test_torch_shards_of_an_index(tmp_path: Path) -> None:
    torch_at(tmp_path / "pytorch_model-00001-of-00002.bin", {"a": torch.ones(2)})
    torch_at(tmp_path / "pytorch_model-00002-of-00002.bin", {"b": torch.zeros(2)})
    files = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    index = touch(tmp_path / "pytorch_model.bin.index.json", json.dumps({"weight_map": files}))
    catalog = open_catalog(tmp_path)
    assert [(t.name, t.chunks[0].file) for t in catalog.tensors] == list(files.items())
    assert (value(catalog, "a"), value(catalog, "b")) == ([1.0, 1.0], [0.0, 0.0])
    assert set(catalog.files) == set(files.values())
    index.write_text(json.dumps({"weight_map": {**files, "c": files["a"]}}))
    assert "'c'" in refused("index-mismatch", tmp_path)
    index.write_text(json.dumps({"weight_map": {**files, "b": "../x.bin"}}))
    refused("unsafe-path", tmp_path)
    index.write_text(json.dumps(["a"]))
    refused("bad-header", tmp_path)


def test_tensors_of_a_dcp_come_in_the_order_of_the_state_dict(tmp_path: Path) -> None:
    # The entries of .metadata lie by rank. An EMA that is a list would be paired with the wrong live tensors.
    live = {f"layer{n}.w": torch.full((2, 2), float(n)) for n in range(6)}
    tree = {
        "model": live,
        "ema": {"shadow_params": [tensor + 0.5 for tensor in live.values()], "decay": 0.9},
    }
    catalog = open_catalog(save_replicas(tmp_path / "x", tree, 2))
    assert len(catalog.files) == 2
    assert [tensor.name for tensor in catalog.tensors][:6] == [f"model.{name}" for name in live]
    average = picked(catalog, "ema")
    for fqn, tensor in live.items():
        assert value(catalog, average.weights[fqn].name) == (tensor + 0.5).flatten().tolist()


def test_a_list_of_averages_is_not_paired_with_a_sorted_file(tmp_path: Path) -> None:
    # safetensors sorts by name: bias before weight, though modules have the weight first.
    live = {"norm.weight": torch.ones(3), "norm.bias": torch.zeros(3)}
    shadows = {f"ema.shadow_params.{n}": tensor.clone() for n, tensor in enumerate(live.values())}
    save_file(live | shadows, tmp_path / "x.safetensors")
    with pytest.raises(EmaCkptError, match="their order is lost") as caught:
        _ = picked(open_catalog(tmp_path / "x.safetensors"), "ema").weights
    assert caught.value.code == "unsupported"
    live = {"w.weight": torch.ones(3, 2), "w.bias": torch.zeros(3)}
    shadows = {f"ema.shadow_params.{n}": tensor.clone() for n, tensor in enumerate(live.values())}
    save_file(live | shadows, tmp_path / "y.safetensors")
    average = picked(open_catalog(tmp_path / "y.safetensors"), "ema")
    assert {fqn: tensor.name for fqn, tensor in average.weights.items()} == {
        "w.weight": "ema.shadow_params.0",
        "w.bias": "ema.shadow_params.1",
    }


def test_a_conversion_keeps_the_order_that_a_list_of_averages_needs(tmp_path: Path) -> None:
    live = {f"{name}.{kind}": torch.rand(3) for name in ("z", "a") for kind in ("weight", "bias")}
    tree = {
        "model": live,
        "ema": {"shadow_params": [tensor + 1 for tensor in live.values()], "decay": 0.9},
    }
    convert(torch_at(tmp_path / "a.pt", tree), tmp_path / "b.safetensors", no_fsync=True)
    convert(tmp_path / "b.safetensors", tmp_path / "c", to="dcp", no_fsync=True)
    for path in (tmp_path / "b.safetensors", tmp_path / "c"):
        catalog = open_catalog(path)
        average = picked(catalog, "ema")
        for fqn, tensor in live.items():
            assert value(catalog, average.weights[fqn].name) == (tensor + 1).tolist()


# Parts.


def accelerate_like(root: Path) -> Path:
    save_dcp(root / "pytorch_model_fsdp_0", {"model": weights()})
    save_dcp(
        root / "optimizer_0",
        {"optimizer": {"state": {"layer.w": {"exp_avg": torch.zeros(2, 3)}}, "lr": 0.1}},
    )
    safetensors_at(root / "unet_ema" / "diffusion_pytorch_model.safetensors", 0.5)
    touch(
        root / "unet_ema" / "config.json",
        json.dumps({"optimization_step": 7, "decay": 0.9999, "_class_name": "X"}),
    )
    torch_at(root / "scheduler.bin", {"step": 1})
    return root


def test_parts_are_trees_of_their_roles_and_contribute_their_content(tmp_path: Path) -> None:
    catalog = open_catalog(accelerate_like(tmp_path))
    assert roles(catalog) == {
        "optimizer_0": "optimizer",
        "pytorch_model_fsdp_0": "live",
        "unet_ema": "ema",
    }
    assert [tensor.name for tensor in catalog.tensors] == [
        "optimizer_0.state.layer.w.exp_avg",
        "pytorch_model_fsdp_0.layer.w",
        "pytorch_model_fsdp_0.b",
        "unet_ema.b",
        "unet_ema.layer.w",
    ]
    assert value(catalog, "pytorch_model_fsdp_0.b") == [7.0, 7.0]
    assert value(catalog, "unet_ema.b") == [7.5, 7.5]
    for name, nbytes in catalog.files.items():
        assert (tmp_path / name).stat().st_size >= nbytes
        assert catalog.source.size(name) == (tmp_path / name).stat().st_size
    assert {chunk.file for tensor in catalog.tensors for chunk in tensor.chunks} == set(
        catalog.files
    )
    (lr,) = [item for item in catalog.objects if item.name == "optimizer_0.lr"]
    assert catalog.reader.load(lr) == 0.1
    average = picked(catalog, "unet_ema")
    assert list(average.weights) == ["b", "layer.w"]
    assert read_ema_config(catalog, average) == EmaConfig(7, 0.9999, None, "float32")
    catalog.source.close()


def test_parts_behind_a_url(tmp_path: Path) -> None:
    accelerate_like(tmp_path / "run")
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "run"), "/joined", recursive=True)
    try:
        catalog = open_catalog("memory://joined")
        assert roles(catalog) == {
            "optimizer_0": "optimizer",
            "pytorch_model_fsdp_0": "live",
            "unet_ema": "ema",
        }
        assert value(catalog, "unet_ema.layer.w") == weights(0.5)["layer.w"].flatten().tolist()
        assert read_ema_config(catalog, picked(catalog, "unet_ema")).num_updates == 7
    finally:
        memory.rm("/joined", recursive=True)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (weights(), ["model.layer.w", "model.b"]),
        ({"model": weights()}, ["model.layer.w", "model.b"]),
        ({"model": weights(), "epoch": 3}, ["model.layer.w", "model.b", "model.epoch"]),
        ({"module": weights()}, ["model.layer.w", "model.b"]),
        ({"blocks": weights()}, ["model.blocks.layer.w", "model.blocks.b"]),
    ],
)
def test_the_content_of_a_live_part(tmp_path: Path, content: dict, names: list[str]) -> None:
    save_dcp(tmp_path / "model", content)
    catalog = open_catalog(tmp_path)
    assert [item.name for item in (*catalog.tensors, *catalog.objects)] == names
    assert roles(catalog) == {"model": "live"}


@pytest.mark.parametrize(
    ("content", "form"),
    [
        (ema(), "weights.*"),
        ({"ema": ema()}, "weights.*"),
        ({"model": weights(0.5)}, "*"),
        ({"model": weights(0.5), "config": {"decay": 0.9}}, "model.*"),
        ({"shadow_params": list(weights(0.5).values()), "decay": 0.9}, "shadow_params.*"),
        ({"shadow": weights(0.5)}, "shadow.*"),
        (
            {"state": {name: {"ema_params": tensor} for name, tensor in weights(0.5).items()}},
            "state.<fqn>.ema_params",
        ),
        ({"ema_model": weights(0.5), "step": torch.tensor(3)}, "ema_model.*"),
    ],
)
def test_the_content_of_an_ema_part(tmp_path: Path, content: dict, form: str) -> None:
    save_dcp(tmp_path / "model", weights())
    save_dcp(tmp_path / "ema", content)
    catalog = open_catalog(tmp_path)
    known = list_trees(catalog)
    assert {tree.name: tree.role for tree in known} == {"model": "live", "ema": "ema"}
    average = find_tree(known, "ema")
    assert average.layout == form
    assert sorted(average.weights) == ["b", "layer.w"]
    assert live_of(known, average) is find_tree(known, "model")
    assert value(catalog, average.weights["b"].name) == [7.5, 7.5]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            {"model": weights(), "optim": {"state": weights()}},
            {"model": "live", "optim": "optimizer"},
        ),
        (
            {f"net.{n}": t for n, t in weights().items()}
            | {f"net_ema.{n}": t for n, t in weights(1).items()},
            None,
        ),
        ({"app": {"model": weights(), "ema": weights()}}, {"app.model": "live", "app.ema": "ema"}),
    ],
)
def test_a_part_that_holds_several_trees_keeps_them(
    tmp_path: Path, content: dict, expected: dict | None
) -> None:
    save_dcp(tmp_path / "model_and_optim", content)
    catalog = open_catalog(tmp_path)
    assert roles(catalog) == (expected or {"net": "live", "net_ema": "ema"})
    assert [tensor.name for tensor in catalog.tensors] == [
        t.name for t in open_catalog(tmp_path / "model_and_optim").tensors
    ]


def test_one_tree_in_two_parts_is_refused(tmp_path: Path) -> None:
    save_dcp(tmp_path / "model_and_optim", {"model": weights(), "ema": weights()})
    save_dcp(tmp_path / "ema", weights())
    assert "both hold a tree 'ema'" in refused("name-collision", tmp_path)


def test_parts_inside_a_part(tmp_path: Path) -> None:
    save_dcp(tmp_path / "actor" / "model", weights())
    save_dcp(tmp_path / "actor" / "optim", {"state": {"b": {"exp_avg": torch.zeros(2)}}})
    catalog = open_catalog(tmp_path)
    assert roles(catalog) == {"model": "live", "optim": "optimizer"}
    assert set(catalog.files) == {"actor/model/__0_0.distcp", "actor/optim/__0_0.distcp"}
    assert value(catalog, "model.b") == [7.0, 7.0]


def test_files_that_are_parts_lie_in_the_common_directory(tmp_path: Path) -> None:
    safetensors_at(tmp_path / "model.safetensors")
    safetensors_at(tmp_path / "ema.safetensors", 0.5)
    catalog = open_catalog(tmp_path)
    assert roles(catalog) == {"ema": "ema", "model": "live"}
    assert (value(catalog, "model.b"), value(catalog, "ema.b")) == ([7.0, 7.0], [7.5, 7.5])
    assert {chunk.file for tensor in catalog.tensors for chunk in tensor.chunks} == {
        "model.safetensors",
        "ema.safetensors",
    }
    chosen = select_all(catalog, list_trees(catalog), options(), ["ema"])
    assert [entry.path for entry in chosen.entries] == [("ema", "b"), ("ema", "layer.w")]
    catalog.source.close()


def test_tensors_of_different_parts_share_no_memory(tmp_path: Path) -> None:
    shared = torch.ones(3)
    torch_at(tmp_path / "model" / "a.pt", {"x": shared, "y": shared})
    torch_at(tmp_path / "ema" / "a.pt", {"x": shared})
    storages = {tensor.name: tensor.storage for tensor in open_catalog(tmp_path).tensors}
    assert storages["model.x"] == storages["model.y"] is not None
    assert storages["ema.x"] != storages["model.x"]


def test_the_nesting_of_a_part_follows_it(tmp_path: Path) -> None:
    torch_at(
        tmp_path / "optim" / "a.pt",
        {"state": {0: {"exp_avg": torch.ones(2)}}, "betas": (0.9, torch.ones(1))},
    )
    save_dcp(tmp_path / "model", weights())
    catalog = open_catalog(tmp_path)
    nesting = catalog.nesting
    assert nesting.keys == {("optim", "state", "0"): 0}  # type: ignore[attr-defined]
    assert ("optim", "betas") in nesting.tuples  # type: ignore[attr-defined]


def test_the_digests_of_a_part_follow_it(tmp_path: Path) -> None:
    source = dcp_at(tmp_path / "source")
    (tmp_path / "joined").mkdir()
    consolidate(source, tmp_path / "joined" / "ema.safetensors", no_fsync=True)
    consolidate(source, tmp_path / "joined" / "model.safetensors", "model", no_fsync=True)
    digests = open_catalog(tmp_path / "joined").digests
    expected = {f"ema.{name}": tensor for name, tensor in weights(0.5).items()}
    expected |= {f"model.{name}": tensor for name, tensor in weights().items()}
    assert digests == {
        name: zlib.crc32(tensor.numpy().tobytes()) for name, tensor in expected.items()
    }


def test_a_warning_names_the_part(tmp_path: Path) -> None:
    import argparse

    save_dcp(tmp_path / "model", weights())
    torch_at(tmp_path / "ema" / "a.pt", {"w": torch.ones(2), "args": argparse.Namespace(a=1)})
    warnings = open_catalog(tmp_path).warnings
    assert [warning.code for warning in warnings] == ["opaque"]
    assert warnings[0].message.startswith("ema: ")


# Settings.


def settings_of(path: Path) -> EmaConfig:
    catalog = open_catalog(path)
    return read_ema_config(
        catalog, next(tree for tree in list_trees(catalog) if tree.role == "ema")
    )


def exchange_object(path: Path, name: str, value: object) -> None:
    """Store another value in the place of an object; torch would take containers apart."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (place,) = [place for key, place in metadata.storage_data.items() if key.fqn == name]
    with open(path / place.relative_path, "ab") as file:
        place.offset, place.length = file.tell(), file.write(buffer.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _repeated(levels: int) -> object:
    value: object = [1]
    for _ in range(levels):
        value = [value] * 100
    return value


@pytest.mark.parametrize("schedule", [_repeated(8), {"kind": _repeated(7)}, _repeated(30)])
def test_a_schedule_that_repeats_itself_is_not_followed(schedule: object, tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "c", {"model": weights(), "ema": {**weights(), "config": "x"}})
    exchange_object(path, "ema.config", {"decay": 0.9, "schedule": schedule})
    begin = time.process_time()
    config = settings_of(path)
    assert (config.decay, config.schedule) == (0.9, None)
    assert time.process_time() - begin < 2


def test_settings_have_names(tmp_path: Path) -> None:
    path = save_dcp(tmp_path / "c", {"model": weights(), "ema": {**weights(), "config": "x"}})
    exchange_object(path, "ema.config", {(10**5000,): 1, 10**5000: 2, "decay": 0.9})
    assert settings_of(path).decay == 0.9


def test_the_settings_of_our_own_form(tmp_path: Path) -> None:
    schedule = {"kind": "constant", "decay": 0.999}
    assert settings_of(dcp_at(tmp_path / "ckpt")) == EmaConfig(3, 0.999, schedule, "float32")


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ({"shadow": {"b": torch.ones(2)}, "decay": 0.99, "num_updates": 12}, (12, 0.99, "float32")),
        (
            {"module": {"b": torch.ones(2).double()}, "n_averaged": torch.tensor(4)},
            (4, None, "float64"),
        ),
        (
            {
                "b": torch.ones(2).half(),
                "decay": torch.tensor(0.9999),
                "num_updates": torch.tensor(9, dtype=torch.int32),
            },
            (9, 0.9999, "float16"),
        ),
        (
            {"b": torch.ones(2), "decay": torch.tensor(0.998, dtype=torch.bfloat16)},
            (None, 0.99609375, "float32"),
        ),
        (
            {"b": torch.ones(2), "decay": torch.tensor(0.99, dtype=torch.float16)},
            (None, 0.99, "float32"),
        ),
        (
            {"b": torch.ones(2), "decay": torch.tensor([0.5], dtype=torch.float64)},
            (None, 0.5, "float32"),
        ),
        (
            {"model": {"b": torch.ones(2)}, "config": {"decay": 0.95, "num_updates": 6}},
            (6, 0.95, "float32"),
        ),
        ({"b": torch.ones(2), "c": torch.ones(2).bfloat16()}, (None, None, "mixed")),
        (
            {
                "ema_model": {"b": torch.ones(2)},
                "step": torch.tensor([8]),
                "initted": torch.tensor([True]),
            },
            (8, None, "float32"),
        ),
        (
            {"weights": {"b": torch.ones(2)}, "num_updates": torch.tensor(0), "config": "{broken"},
            (0, None, "float32"),
        ),
        ({"b": torch.ones(2), "num_updates": True, "decay": "high"}, (None, None, "float32")),
    ],
)
@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_the_settings_of_other_forms(
    tmp_path: Path, inside: dict, expected: tuple, kind: str
) -> None:
    tree = {"ema": inside, "model": {"b": torch.ones(2)}}
    path = save_dcp(tmp_path / "x", tree) if kind == "dcp" else torch_at(tmp_path / "x.pt", tree)
    found = settings_of(path)
    assert (found.num_updates, found.decay, found.dtype) == expected


def test_no_object_is_opened_unless_asked(tmp_path: Path) -> None:
    inside = {"b": torch.ones(2), "decay": 0.9, "num_updates": torch.tensor(5)}
    catalog = open_catalog(save_dcp(tmp_path / "x", {"ema": inside}))
    average = picked(catalog, "ema")
    assert read_ema_config(catalog, average, open_objects=False) == EmaConfig(
        5, None, None, "float32"
    )
    assert read_ema_config(catalog, average).decay == 0.9


def test_a_large_object_is_not_opened(tmp_path: Path) -> None:
    inside = {"b": torch.ones(2), "config": json.dumps({"decay": 0.9, "note": "x" * 70_000})}
    assert settings_of(save_dcp(tmp_path / "x", {"ema": inside})).decay is None


class Marker:
    """Would leave a file behind if anything unpickled it the usual way."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __reduce__(self) -> tuple:
        return (Path.touch, (Path(self.place),))


def test_a_hostile_setting_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = save_dcp(tmp_path / "x", {"ema": {"b": torch.ones(2), "config": Marker(str(marker))}})
    with pytest.raises(EmaCkptError) as caught:
        settings_of(path)
    assert caught.value.code == "unsafe-pickle"
    assert not marker.exists()


def test_a_damaged_counter_is_noticed(tmp_path: Path) -> None:
    path = dcp_at(tmp_path / "ckpt")
    catalog = open_catalog(path)
    tensor: Tensor = next(t for t in catalog.tensors if t.name == "ema.num_updates")
    (payload,) = catalog.reader.payloads(tensor)
    file = path / payload.file
    data = bytearray(file.read_bytes())
    data[payload.offset] ^= 1
    file.write_bytes(data)
    with pytest.raises(EmaCkptError) as caught:
        settings_of(path)
    assert caught.value.code == "checksum"
    assert caught.value.tensor == "ema.num_updates"


def test_a_counter_that_no_chunk_holds() -> None:
    catalog = catalog_of({"ema": {"w": T(), "num_updates": INT, "decay": SCALAR}})
    average = picked(catalog, "ema")
    bare = replace(average.settings["num_updates"], chunks=())  # type: ignore[type-var]
    hollow = Tree("ema", "ema", named=average.named, settings={"num_updates": bare})
    with pytest.raises(EmaCkptError) as caught:
        read_ema_config(catalog, hollow)
    assert caught.value.code == "hole"


def test_safetensors_settings(tmp_path: Path) -> None:
    save_file(
        {"ema.w": torch.ones(2), "ema.num_updates": torch.tensor(2), "w": torch.ones(2)},
        tmp_path / "x.safetensors",
    )
    assert settings_of(tmp_path / "x.safetensors") == EmaConfig(2, None, None, "float32")
