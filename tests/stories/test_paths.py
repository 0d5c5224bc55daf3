"""Targets and sources that URLs, links and relative names spell in many ways (pytorch/torchtitan#3884)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch

import ema_ckpt
from ema_ckpt.core.errors import EmaCkptError
from tests.checkpoints import dcp_at, safetensors_at, torch_at


def _bytes_below(root: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()
    }


@pytest.mark.parametrize("scheme", ["file", "local"])
def test_a_source_behind_a_file_url_is_never_replaced(tmp_path: Path, scheme: str) -> None:
    source = dcp_at(tmp_path / "run")
    before = _bytes_below(source)
    for target in (source, source / "inside", tmp_path / "link"):
        if target.name == "link":
            target.symlink_to(source)
        with pytest.raises(EmaCkptError) as caught:
            ema_ckpt.consolidate(f"{scheme}://{source}", target, overwrite=True)
        assert caught.value.code == "target-is-source"
    assert _bytes_below(source) == before


def test_a_file_behind_a_file_url_is_never_replaced(tmp_path: Path) -> None:
    source = torch_at(tmp_path / "model.pt")
    before = source.read_bytes()
    with pytest.raises(EmaCkptError) as caught:
        ema_ckpt.consolidate(f"file://{source}", source, overwrite=True)
    assert caught.value.code == "target-is-source"
    assert source.read_bytes() == before


@pytest.mark.parametrize("out", ["memory://x", "http://127.0.0.1:9/x.pt", "nosuch://bucket/x.pt"])
def test_a_url_that_cannot_be_written_is_refused_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    source = dcp_at(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EmaCkptError, match=f"^{out}: ") as caught:
        ema_ckpt.consolidate(source, out)
    assert caught.value.code in ("usage", "missing-extra")
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("out", [Path("s3://bucket/key"), "s3:/bucket/key"])
def test_a_url_that_lost_a_slash_makes_no_directory_named_after_its_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str | Path
) -> None:
    source = dcp_at(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EmaCkptError, match="URL loses a slash") as caught:
        ema_ckpt.consolidate(source, out)
    assert caught.value.code == "usage"
    with pytest.raises(EmaCkptError, match="URL loses a slash") as caught:
        ema_ckpt.save(out, model=torch.nn.Linear(2, 2))
    assert caught.value.code == "usage"
    assert os.listdir(tmp_path) == ["run"]


CHAINS = ["simplecache::memory://bucket/out", "a::b::s3://bucket/out.pt", "zip://a::file:///b.zip"]


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_of_urls_is_no_local_path(
    chain: str, fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = fixtures / "dcp" / "fsdp2-w2"
    calls: list[Callable[[], object]] = [
        lambda: ema_ckpt.consolidate(source, chain),
        lambda: ema_ckpt.consolidate(source, chain, dry_run=True),
        lambda: ema_ckpt.reshard(source, chain, 2, overwrite=True),
        lambda: ema_ckpt.save(chain, model=torch.nn.Linear(2, 2)),
        lambda: ema_ckpt.inspect(chain),
    ]
    for call in calls:
        with pytest.raises(EmaCkptError, match="chain of URLs"):
            call()
    assert list(tmp_path.iterdir()) == []


EMPTY = [
    "memory://empty/w//x.safetensors",
    "memory://empty/w//x.pt",
    "memory://empty/w//step_1",
    "memory://empty//step_1/",
    "memory://empty/step_1//",
    "s3://bucket/w//x.safetensors",
    "s3://bucket//d",
]


@pytest.mark.parametrize("url", EMPTY)
def test_an_empty_component_of_a_url_is_refused_and_nothing_is_written(
    url: str, fixtures: Path
) -> None:
    """It is part of an object's name; without it another object was read, and replaced."""
    source = fixtures / "dcp" / "fsdp2-w2"
    calls: list[Callable[[], object]] = [
        lambda: ema_ckpt.consolidate(source, url, overwrite=True),
        lambda: ema_ckpt.consolidate(source, url, dry_run=True),
        lambda: ema_ckpt.reshard(source, url, 2, overwrite=True),
        lambda: ema_ckpt.save(url, model=torch.nn.Linear(2, 2)),
        lambda: ema_ckpt.restore(url, model=torch.nn.Linear(2, 2)),
        lambda: ema_ckpt.inspect(url),
        lambda: ema_ckpt.verify(url),
        lambda: ema_ckpt.latest(url),
        lambda: ema_ckpt.open(url),
    ]
    for call in calls:
        with pytest.raises(EmaCkptError, match="'//'") as caught:
            call()
        assert caught.value.code == "usage"
    filesystem, _ = fsspec.core.url_to_fs("memory://empty")
    assert not filesystem.exists("memory://empty")


def test_a_slash_behind_a_directory_url_and_those_of_its_root_are_no_empty_component(
    fixtures: Path, tmp_path: Path
) -> None:
    source = fixtures / "dcp" / "fsdp2-w2"
    for url in ("memory://one-slash/run/", "memory:///one-slash/run", f"file://{tmp_path}//run/"):
        ema_ckpt.reshard(source, url, 2, overwrite=True)
        assert ema_ckpt.verify(url).status == "sound"
    assert os.listdir(tmp_path) == ["run"]


def test_two_colons_are_letters_of_a_name_behind_a_url(fixtures: Path) -> None:
    """fsspec ends a URL there, so that another checkpoint was read, and replaced."""
    source, model = fixtures / "dcp" / "fsdp2-w2", torch.nn.Linear(2, 2)
    run = "memory://two-colons/run"
    ema_ckpt.save(run, model=model)
    ema_ckpt.consolidate(source, "memory://two-colons/run.pt")
    for absent in ("::v2", "::v2::", "::zip", "::v2.pt", ".pt::v2"):
        assert ema_ckpt.latest(run + absent) is None
        with pytest.raises(EmaCkptError) as caught:
            ema_ckpt.verify(run + absent)
        assert caught.value.code == "not-found"
    for out in ("::v2", "::v3.pt", ".pt::v4.pt"):
        ema_ckpt.consolidate(source, run + out, overwrite=True)
        assert ema_ckpt.verify(run + out).resolved == run + out
    ema_ckpt.save(f"{run}::v5/step_1", model=torch.nn.Linear(3, 3), overwrite=True)
    assert ema_ckpt.latest(f"{run}::v5") == f"{run}::v5/step_1"
    with ema_ckpt.open(run) as kept, ema_ckpt.open(f"{run}::v5") as other:
        assert torch.equal(kept["model.weight"], model.weight)
        assert other["model.weight"].shape == (3, 3)
    assert ema_ckpt.diff("memory://two-colons/run.pt", f"{run}::v3.pt").summary.changed == 0


def test_two_colons_are_letters_of_a_local_name(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/a::b"
    ema_ckpt.save(f"{url}/step_1", model=torch.nn.Linear(2, 2))
    assert ema_ckpt.latest(url) == f"{url}/step_1"
    assert ema_ckpt.verify(tmp_path / "a::b").status == ema_ckpt.verify(url).status == "sound"


@pytest.mark.parametrize("link", ["file", "directory"])
def test_a_file_that_the_source_has_through_a_link_is_never_replaced(
    tmp_path: Path, link: str
) -> None:
    real, view = tmp_path / "real", tmp_path / "view"
    if link == "file":
        ema_ckpt.consolidate(dcp_at(tmp_path / "run"), real)
        view.mkdir()
        for file in real.iterdir():
            (view / file.name).symlink_to(f"../real/{file.name}")
        targets = [real, real / "model.safetensors", tmp_path / "link"]
        (tmp_path / "link").symlink_to("real")
    else:  # parts of one checkpoint
        safetensors_at(real / "model.safetensors")
        safetensors_at(view / "ema" / "model.safetensors")
        (view / "model").symlink_to("../real")
        targets = [real]
    before = _bytes_below(real)
    for target in targets:
        with pytest.raises(EmaCkptError) as caught:
            ema_ckpt.convert(view, target, dtype="bf16", overwrite=True)
        assert caught.value.code == "target-is-source"
    assert _bytes_below(real) == before
    ema_ckpt.convert(view, tmp_path / "out", dtype="bf16")
