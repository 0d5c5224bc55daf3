"""What a file is by its content: files that the owners of the formats wrote, under names that tell nothing."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ema_ckpt
from ema_ckpt.formats.content import Kind, in_words, kind_of
from ema_ckpt.storage.files import open_files

TENSORS = {"w": torch.ones(3)}


def _wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pkg/__init__.py", "")
        archive.writestr("pkg-1.0.dist-info/WHEEL", "Wheel-Version: 1.0")


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "text")


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("weights/readme"), io.BytesIO())


def _npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, a=np.ones(2), b=np.zeros(1))


def _npy(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.ones(2))


def _legacy(path: Path) -> None:
    torch.save(TENSORS, path, _use_new_zipfile_serialization=False)


def _scripted(path: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("write", "reader", "word"),
    [
        (lambda path: torch.save(TENSORS, path), "torch", "torch.save"),
        (_legacy, "torch", "pickle"),
        (lambda path: path.write_bytes(pickle.dumps({"w": np.ones(3)}, 4)), "torch", "pickle"),
        (lambda path: path.write_bytes(pickle.dumps({"w": 1}, 0)), "torch", "pickle"),
        (lambda path: path.write_bytes(pickle.dumps({"w": 1}, 1)), "torch", "pickle"),
        (
            lambda path: path.write_bytes(
                pickle.dumps({"metadata": {}, "world_size": 1, "version": "2.0"})
            ),
            "torch-checkpointing",
            "torch_checkpointing",
        ),
        (lambda path: save_file(TENSORS, path), "safetensors", "safetensors"),
        (lambda path: save_file({}, path), "safetensors", "safetensors"),
        (lambda path: path.write_text(json.dumps({"weight_map": {"a": "b"}})), "index", "index"),
        (_scripted, "", "TorchScript"),
        (_npz, "", ".npz"),
        (_npy, "", ".npy"),
        (_wheel, "", "wheel"),
        (_zip, "", "zip archive"),
        (_tar, "", "tar archive"),
        (lambda path: path.write_bytes(gzip.compress(b"x")), "", "compressed"),
    ],
)
def test_kinds(tmp_path: Path, write: Callable[[Path], object], reader: str, word: str) -> None:
    write(tmp_path / "thing")
    kind = kind_of(open_files(str(tmp_path)), "thing")
    assert isinstance(kind, Kind)
    assert (kind.reader, word in kind.what) == (reader, True)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "an empty file"),
        (b"hello\nthere", "text"),
        ("größer".encode(), "text"),
        (b'{"hidden_size": 8}', "text"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html>", "failed download"),
        (bytes(64), "no kind"),
        (b"\xff\xd8\xff\xe0 a picture", "no kind"),
    ],
)
def test_what_no_reader_takes_is_put_in_words(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "thing").write_bytes(data)
    source = open_files(str(tmp_path))
    assert kind_of(source, "thing") is None
    assert words in in_words(source, "thing")


def test_a_damaged_archive_is_left_to_its_reader(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "thing")
    whole = (tmp_path / "thing").read_bytes()
    (tmp_path / "thing").write_bytes(whole[:-30])
    kind = kind_of(open_files(str(tmp_path)), "thing")
    assert kind is not None
    assert kind.reader == "torch"


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pt"])
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"<!DOCTYPE html><html>" * 9, "a page of markup; a failed download?"),
        (b'\n<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "a page of markup"),
        (b"Entry not found", "text, 'Entry not found'"),
        (b'{"error":"Invalid credentials"}', "Invalid credentials"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n", "git lfs pull"),
    ],
)
def test_an_answer_of_a_server_that_was_kept_as_a_checkpoint_is_put_in_words(
    tmp_path: Path, name: str, data: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(data)
    (problem,) = ema_ckpt.verify(tmp_path / name).problems
    assert problem.code == "bad-header"
    assert words in problem.message
