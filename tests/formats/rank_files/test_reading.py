"""What several processes read of rank files is what one does."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ema_ckpt.formats.rank_files.reading import read_file
from ema_ckpt.formats.rank_files.sent_file import NotSentError, from_json, to_json
from ema_ckpt.runtime.executor import dump_json
from ema_ckpt.storage.files import LocalFiles
from tests.formats.rank_files import reading_programs as programs
from tests.runtime.fork_programs import run

FIXTURES = Path(__file__).parents[3] / "fixtures" / "rank-files"
SHARDED = sorted(FIXTURES.glob("*/*world_size*rank*.pt"))
RANKS = 6


class Unknown:
    """A class that is only named in the pickle."""

    def __init__(self, number: int) -> None:
        self.number = number


def _plain(rank: int) -> dict[str, Any]:
    base = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    weights = OrderedDict(w=base, t=base.t(), row=base[1:3], n=torch.tensor(3))
    odd = {7: torch.ones(2), (1, 2): b"\xff\0", "list": [1, 2.5, float("nan"), (None, True)]}
    return {"model": weights, "odd": odd, "rng_state": torch.full((3,), rank), "rank": rank}


def _distinct(rank: int) -> dict[str, Any]:
    return {"w": torch.full((3,), float(rank)), "same": torch.zeros(2)}


def _unknown(rank: int) -> dict[str, Any]:
    return _plain(rank) | ({"args": Unknown(rank)} if rank == 3 else {})


@pytest.mark.parametrize("state", [_plain, _distinct, _unknown])
@pytest.mark.parametrize("damage", ["none", "cut", "missing"])
def test_the_number_of_processes_changes_nothing(state: Any, damage: str, tmp_path: Path) -> None:
    for rank in range(RANKS):
        torch.save(state(rank), tmp_path / f"model_world_size_{RANKS}_rank_{rank}.pt")
    harmed = tmp_path / f"model_world_size_{RANKS}_rank_4.pt"
    if damage == "cut":
        harmed.write_bytes(harmed.read_bytes()[:-40])
    elif damage == "missing":
        harmed.unlink()
    out, _ = run(programs.compare, tmp_path)
    received, told = out.split("\n", 1)
    assert int(received) > 0
    assert ("its end record is missing" in told) == (damage == "cut")
    assert ("the files of rank 4" in told) == (damage == "missing")


@pytest.mark.parametrize("path", SHARDED, ids=lambda path: f"{path.parent.name}-{path.stem[-1]}")
def test_what_is_sent_of_a_file_is_all_of_it(path: Path) -> None:
    source = LocalFiles(str(path.parent))
    file = read_file(source, path.name)
    received = from_json(source, json.loads(dump_json(to_json(file))))
    assert file.has_shards
    assert list(received.leaves.items()) == list(file.leaves.items())
    assert (received.nesting, received.has_shards) == (file.nesting, True)
    assert received.content.archive.records == file.content.archive.records
    assert received.content[2:] == file.content[2:]


def test_a_value_that_refers_to_itself_over_and_over_is_not_sent(tmp_path: Path) -> None:
    value: list[object] = [1]
    for _ in range(40):
        value = [value, value]
    torch.save({"w": torch.ones(1)}, tmp_path / "m_rank_0.pt")
    file = read_file(LocalFiles(str(tmp_path)), "m_rank_0.pt")
    to_json(file)
    with pytest.raises(NotSentError):
        to_json(replace(file, leaves={("bomb",): value}))


def test_values_of_torchs_classes_are_sent_as_what_they_are(tmp_path: Path) -> None:
    stored = {"at": torch.device("cuda", 1), "l": [torch.Size([2]), torch.strided, Path("/a")]}
    torch.save({"w": torch.ones(1), **stored}, tmp_path / "m_rank_0.pt")
    source = LocalFiles(str(tmp_path))
    file = read_file(source, "m_rank_0.pt")
    leaves = from_json(source, json.loads(dump_json(to_json(file)))).leaves
    assert leaves == file.leaves
    assert list(map(type, leaves["l",])) == list(map(type, file.leaves["l",]))
    assert type(leaves["l",][0]) is not tuple
