"""Targets and sources that URLs, links and relative names spell in many ways (pytorch/torchtitan#3884)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

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


@pytest.mark.parametrize("chain", ["simplecache::memory://bucket/out", "a::b::s3://bucket/out.pt"])
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
