"""Writing by child processes: the same bytes as by one worker, whatever becomes of a child."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ema_ckpt.writing.journal import JOURNAL, Finished, Journal
from tests.runtime.fork_programs import gone, run, start
from tests.sharded import Box, rows, save_cut
from tests.writing import fork_programs as programs

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors that are assembled from what lies across, in several jobs each, and some that are not."""
    torch.manual_seed(5)
    tensors = {f"model.across{i}": torch.randn(1500 + i, 301) for i in range(12)}
    tensors |= {"model.large": torch.randn(3000, 4000), "model.cube": torch.randn(60, 70, 80)}
    tensors |= {f"model.huge{i}": torch.full((1500, 301), 3e38) for i in range(4)}
    tensors["model.row"] = torch.randn(90, 1000)
    cuts = {name: [[box] for box in columns(tensor.shape)] for name, tensor in tensors.items()}
    cuts["model.row"] = rows((90, 1000), 2)
    return save_cut(tmp_path_factory.mktemp("forked") / "step_1", tensors, cuts)


def columns(shape: Sequence[int]) -> list[Box]:
    """Two parts of the last axis, uneven."""
    *outer, last = shape
    zeros, cut = [0] * len(outer), last // 3
    return [((*zeros, 0), (*outer, cut)), ((*zeros, cut), (*outer, last - cut))]


def plain(source: Path, out: Path, *options: object) -> bytes:
    """What one worker writes."""
    run(programs.write, "consolidate", source, out, "--threads", 1, "-q", *options)
    return out.read_bytes()


def test_the_same_bytes_as_by_one_worker(source: Path, tmp_path: Path) -> None:
    out, err = run(programs.same_bytes_as_by_one, source, tmp_path)
    assert out.splitlines() == [
        "a.safetensors 0 (3, 3)",
        "a.pt 0 (3, 3)",
        "folder 0 (3, 3)",
        "half.safetensors 0 (3, 3)",
        "ranks 0 (3, 3)",
        "converted.safetensors 0 (3, 3)",
        "converted.pt 0 (3, 3)",
        "sum.safetensors 0 (3, 3)",
    ], err


@pytest.mark.parametrize(
    "folder", sorted(path.name for path in (FIXTURES / "dcp").iterdir() if path.is_dir())
)
def test_fixtures(folder: str, tmp_path: Path) -> None:
    out, err = run(programs.same_bytes_as_by_one, FIXTURES / "dcp" / folder, tmp_path, 64)
    assert len(out.splitlines()) == 8, err
    assert " 0" in out


@pytest.mark.parametrize(("budget", "nbytes"), [("4MiB", 4 << 20), ("16MiB", 16 << 20)])
def test_the_buffers_of_all_processes_fit_the_budget(
    source: Path, tmp_path: Path, budget: str, nbytes: int
) -> None:
    options = ("--threads", 64, "--max-memory", budget, "--dtype", "bf16", "--world-size", 3, "-q")
    out, _ = run(programs.write_with_buffers, "reshard", source, tmp_path / "a", *options)
    buffers = [line.split() for line in out.splitlines()[:-1]]
    assert 1 < len({pid for pid, _ in buffers}) <= 64
    assert sum([int(size) for _, size in buffers]) <= nbytes


def infinite(shown: str) -> bool:
    """Whether it is said of each huge tensor that its values became infinite."""
    said = [f"{1500 * 301:,} finite values of 'huge{i}' became infinite" for i in range(4)]
    return all(text in shown for text in said)


def test_values_that_a_child_made_infinite_are_reported(source: Path, tmp_path: Path) -> None:
    options = ("--dtype", "fp16", "--threads", 3)
    target = tmp_path / "a.safetensors"
    out, err = run(programs.write_slowly_here, "consolidate", source, target, *options)
    assert out.splitlines()[-1] == "[(3, 3)]"
    assert infinite(err)


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_right_when_a_child_fails(source: Path, tmp_path: Path, how: str) -> None:
    target = tmp_path / "out.safetensors"
    options = ("--threads", 3, "-q")
    out, err = run(programs.write_harmed, how, "consolidate", source, target, *options)
    assert out == "[(3, 0)]\n", err
    assert target.read_bytes() == plain(source, tmp_path / "plain.safetensors")


def test_a_loss_that_only_closing_tells_a_child_is_noticed(source: Path, tmp_path: Path) -> None:
    """As through sshfs, where the disk of the server is full at the end."""
    target = tmp_path / "out.safetensors"
    options = ("--threads", 3, "-q")
    out, err = run(programs.write_told_late, "consolidate", source, target, *options)
    assert out == "[(3, 0)]\n", err
    assert target.read_bytes() == plain(source, tmp_path / "plain.safetensors")


def test_progress_never_runs_backwards_and_ends_at_the_total(source: Path, tmp_path: Path) -> None:
    run(programs.progress_when_children_fail, source, tmp_path / "out.safetensors")


def test_a_damaged_source_is_reported_as_any_other(source: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in source.iterdir():
        data = bytearray(path.read_bytes())
        if path.suffix == ".distcp":
            data[len(data) // 2] ^= 4
        (damaged / path.name).write_bytes(data)
    target = tmp_path / "out"
    _, err = run(programs.write, "consolidate", damaged, target, "--threads", 3, "-q", code=2)
    assert err.count("\n") == 1
    assert "damaged" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(source: Path, tmp_path: Path, signum: signal.Signals) -> None:
    arguments = ("consolidate", source, tmp_path / "out.safetensors", "--threads", 3, "-q")
    # A shell in the background makes its children deaf to SIGINT.
    usual = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    with start(programs.write_slowly, 0.3, *arguments, **usual) as process:
        try:
            assert process.stdout is not None
            pids: set[int] = set()
            while len(pids) < 3:
                pids.add(int(process.stdout.readline()))
            process.send_signal(signum)
            _, shown = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, shown.count("\n")) == (130 if signum == signal.SIGINT else 143, 1)
    assert gone(pids)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("threads", [1, 3])
def test_what_children_wrote_before_a_kill_is_not_written_again(
    source: Path, tmp_path: Path, threads: int
) -> None:
    target, log = tmp_path / "out.safetensors", tmp_path / "log"
    expected = plain(source, tmp_path / "plain.safetensors", "--dtype", "fp16")
    arguments = ("consolidate", source, target, "--dtype", "fp16", "--resume", "--threads")
    with start(programs.write_recording, *arguments, 3, "-q", stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        lines: list[list[str]] = []
        while [here for _, here in lines].count("False") < 3 or "True" not in dict(lines).values():
            lines.append(process.stdout.readline().split())
        process.kill()
    assert gone({int(pid) for pid, _ in lines})
    (stage,) = (path for path in tmp_path.iterdir() if path.name.startswith("."))
    recorded = (stage / JOURNAL).read_text().splitlines()
    assert recorded[0].startswith('{"journal"')
    assert len(recorded) - 1 >= len(lines)
    out, err = run(programs.write_counting, log, *arguments, threads)
    assert out.splitlines()[-1] == ("[(3, 3)]" if threads == 3 else "[]")
    assert sum(map(int, log.read_text().split())) <= len(expected) - 4 * 1500 * 301 * 2
    assert target.read_bytes() == expected
    assert infinite(err)


def test_sums_that_a_child_made_infinite_are_reported(source: Path, tmp_path: Path) -> None:
    options = ("--weights", "1,1", "--tree", "model", "--dtype", "bf16", "--threads", 3)
    target = tmp_path / "a.safetensors"
    out, err = run(programs.write_slowly_here, "synthesize", source, source, target, *options)
    assert out.splitlines()[-1] == "[(3, 3)]"
    for i in range(4):
        assert f"{1500 * 301:,} finite sums of 'huge{i}' became infinite" in err


def in_a_child(act: object) -> None:
    if not (pid := os.fork()):
        try:
            act()  # type: ignore[operator]
            os._exit(0)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_child_waits_for_the_journals_first_line(tmp_path: Path) -> None:
    stage = tmp_path / ".stage"
    stage.mkdir()
    journal = Journal(stage, stage / "out", {"plan": "1"}, after=0.2)
    time.sleep(0.3)
    in_a_child(lambda: journal.done("", 0, 4, Finished(1, {})))
    assert not (stage / JOURNAL).exists()
    journal.done("", 4, 4, Finished(2, {}))
    in_a_child(lambda: journal.done("", 8, 4, Finished(3, {})))
    journal.close()
    lines = (stage / JOURNAL).read_text().splitlines()
    assert lines[0].startswith('{"journal"')
    ranges = [json.loads(line)[:4] for line in lines[1:]]
    assert ranges == [["", 4, 4, "00000002"], ["", 8, 4, "00000003"]]


@pytest.mark.parametrize(("ranks", "most"), [(1, 4), (3, 12)])
def test_at_most_four_write_one_file(source: Path, tmp_path: Path, ranks: int, most: int) -> None:
    """The files that say what lies in the others are written by one, and do not count."""
    options = ("--threads", 64, "--world-size", ranks, "-q")
    out, err = run(programs.write, "reshard", source, tmp_path / "a", *options)
    assert out.strip() == f"[({most}, {most})]", err
