"""Verbs that read: threads and child processes find what one worker finds, and failing children are noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import save_dcp
from tests.runtime import verb_programs as programs
from tests.runtime.fork_programs import run

FIXTURES = Path(__file__).parents[2] / "fixtures"
CHECKED = [
    "dcp/fsdp2-w8", "dcp/fsdp2-w2-crc-off", "dcp/hsdp-2x2", "dcp/objects-w2", "dcp/replicated-w4", "dcp/empty",
    "hf/sharded", "rank-files/replicas", "torch/crc-off.pt", "safetensors/dtypes.safetensors",
    "nasty/flipped-byte", "nasty/zip-directory-zeroed", "nasty/item-of-other-shape", "nasty/missing-file",
    "nasty/flipped-byte.pt", "nasty/truncated-by-half",
]  # fmt: skip


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its average in rows, columns of memory, and many small tensors; one value is NaN."""
    torch.manual_seed(0)
    model = {f"large{i}": torch.randn(3000, 400) for i in range(3)}
    model["turned"] = torch.randn(300, 500).t()
    model |= {f"small{i}": torch.randn(16, i % 3 + 1) for i in range(300)}
    model["small7"][3, 0] = torch.nan
    ema = {name: value * 0.99 for name, value in model.items()}
    folder = tmp_path_factory.mktemp("verbs")
    return save_dcp(folder / "step_1", {"model": model, "ema": {"weights": ema}, "note": "text"})


def ways(*words: object) -> tuple[int, list[tuple[int, int]], bool]:
    out, err = run(programs.compare_ways, *words)
    code, runs, same = (
        out.split(maxsplit=1)[0],
        out[out.index("[") : out.index("]") + 1],
        out.split()[-1],
    )
    assert same == "True", err
    pairs = [
        tuple(map(int, pair.split(", "))) for pair in runs.strip("[]() \n").split("), (") if pair
    ]
    return int(code), pairs, True


def forked(*words: object) -> int:
    """Check that all ways agree and no child failed; return how often children were forked."""
    _, runs, _ = ways(*words)
    assert all(asked == ended > 1 for asked, ended in runs)
    return len(runs)


@pytest.mark.parametrize("name", CHECKED)
def test_verify_of_fixtures(name: str) -> None:
    ways("verify", FIXTURES / name)


def test_verify(large: Path, tmp_path: Path) -> None:
    assert forked("verify", large) == 1
    assert forked("verify", large, "--values") == 2
    assert forked("verify", large, "--against", large) >= 1


def test_verify_of_safetensors(tmp_path: Path) -> None:
    save_file({f"w{i}": torch.randn(700, 300) for i in range(20)}, tmp_path / "m.safetensors")
    assert forked("verify", tmp_path / "m.safetensors", "--values") == 2


def test_diff(large: Path) -> None:
    assert forked("diff", large) == 1


@pytest.mark.parametrize("how", ["killed", "raises"])
@pytest.mark.parametrize("words", [("verify",), ("verify", "--values"), ("diff",)])
def test_failing_children(large: Path, words: tuple[str, ...], how: str) -> None:
    out, err = run(programs.compare_harmed, how, words[0], large, *words[1:])
    same, failed = out.split()
    assert (same, int(failed) > 0) == ("True", True), err
