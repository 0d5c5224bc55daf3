"""Writing by copies of the process: the same bytes as by one worker, whatever becomes of a copy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from ema_ckpt.writing.partial import PartialItem, PartialResult

from ema_ckpt.core.catalog import Payload
from ema_ckpt.writing.journal import JOURNAL, Finished, Journal
from tests.sharded import Box, rows, save_cut

REPO = Path(__file__).parents[2]
FIXTURES = REPO / "fixtures"

HEAD = """
import os, signal, sys, time
os.environ["OPENBLAS_NUM_THREADS"] = "1"
import ema_ckpt.writing.engine as engine
from ema_ckpt.cli.main import main
engine._LEAST_FORKED_NBYTES = 0
engine._WORTH_NBYTES = 0
made = []
usual = engine.run_forked
def seen(work, jobs, count, progress=None):
    made.append((min(count, jobs), None))
    result = usual(work, jobs, count, progress)
    made[-1] = (min(count, jobs), len(result or ()))
    return result
engine.run_forked = seen
def run(*arguments):
    try:
        main([*map(str, arguments), "-q"])
    except SystemExit as ended:
        return ended.code
"""


def ran(body: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEAD + body, *map(str, arguments)]
    return subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors that have to be put together from what lies across, in several jobs each, and some that have not."""
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


COMPARED = """
import filecmp
from pathlib import Path
out = Path(sys.argv[2])
for verb, name, *options in (
    ("consolidate", "a.safetensors"),
    ("consolidate", "a.pt"),
    ("consolidate", "folder", "--max-shard-size", "8MB"),
    ("consolidate", "half.safetensors", "--dtype", "bf16"),
    ("reshard", "ranks", "--world-size", 3),
):
    left, right = out / "one" / name, out / "copies" / name
    for parent in (left.parent, right.parent):
        parent.mkdir(exist_ok=True)
    first = run(verb, sys.argv[1], left, "--threads", 1, *options)
    assert not made, "one worker makes no copies"
    assert run(verb, sys.argv[1], right, "--threads", 3, "--max-memory", "12MiB", *options) == first, (verb, name)
    if first == 0:
        ((expected, found),) = made
        assert found == max(expected, 1), (name, made)
    print(name, first, *made)
    made.clear()
    files = [p.relative_to(left) for p in left.rglob("*") if p.is_file()] if left.is_dir() else [Path()]
    assert first or files
    _, differing, lost = filecmp.cmpfiles(left, right, files, shallow=False) if left.is_dir() else (
        0, [] if first or filecmp.cmp(left, right, shallow=False) else [name], [])
    assert not differing and not lost, (differing, lost)
"""


def test_the_same_bytes_as_by_one_worker(source: Path, tmp_path: Path) -> None:
    result = ran(COMPARED, source, tmp_path)
    assert result.stdout.splitlines() == [
        "a.safetensors 0 (3, 3)",
        "a.pt 0 (3, 3)",
        "folder 0 (3, 3)",
        "half.safetensors 0 (3, 3)",
        "ranks 0 (3, 3)",
    ], result.stderr


@pytest.mark.parametrize(
    "folder", sorted(path.name for path in (FIXTURES / "dcp").iterdir() if path.is_dir())
)
def test_fixtures(folder: str, tmp_path: Path) -> None:
    result = ran(f"engine._MOVED_NBYTES = 64\n{COMPARED}", FIXTURES / "dcp" / folder, tmp_path)
    assert len(result.stdout.splitlines()) == 5, result.stderr
    assert " 0 " in result.stdout


@pytest.mark.parametrize(
    ("budget", "made"), [("4MiB", "[]"), ("12MiB", "[(3, 3)]"), ("16MiB", "[(4, 4)]")]
)
def test_copies_fit_the_budget(source: Path, tmp_path: Path, budget: str, made: str) -> None:
    body = "print(run('consolidate', *sys.argv[1:], '--threads', 64), made)"
    assert (
        ran(body, source, tmp_path / "a.safetensors", "--max-memory", budget).stdout
        == f"0 {made}\n"
    )


def test_values_that_a_copy_made_infinite_are_told(source: Path, tmp_path: Path) -> None:
    # Slow here, so that copies find something to do.
    body = """
here = os.getpid()
usual_alone = engine._Engine._alone
def alone(self, index, hands):
    if os.getpid() == here:
        time.sleep(0.3)
    return usual_alone(self, index, hands)
engine._Engine._alone = alone
try:
    main(["consolidate", sys.argv[1], sys.argv[2], "--dtype", "fp16", "--threads", "3"])
finally:
    print(made)
"""
    result = ran(body, source, tmp_path / "a.safetensors")
    assert result.stdout.splitlines()[-1] == "[(3, 3)]"
    for i in range(4):
        assert f"{1500 * 301:,} finite values of 'huge{i}' became infinite" in result.stderr


# The first job here waits until a copy has died, so that one takes part whatever the scheduler does.
DYING = """
here, waited = os.getpid(), False
def has_died():
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
usual_alone = engine._Engine._alone
def alone(self, index, hands):
    global waited
    if os.getpid() != here:
        {harm}
    while not waited and not has_died():
        time.sleep(0.01)
    waited = True
    return usual_alone(self, index, hands)
engine._Engine._alone = alone
code = run("consolidate", sys.argv[1], sys.argv[2], "--threads", 3)
print(code, made)
"""


@pytest.mark.parametrize(
    "harm", ["os.kill(os.getpid(), signal.SIGKILL)", "raise OSError('the disk does not answer')"]
)
def test_right_when_a_copy_fails(source: Path, tmp_path: Path, harm: str) -> None:
    plain, out = tmp_path / "plain.safetensors", tmp_path / "out.safetensors"
    assert (
        ran("sys.exit(run('consolidate', *sys.argv[1:]))", source, plain, "--threads", 1).returncode
        == 0
    )
    result = ran(DYING.format(harm=harm), source, out)
    assert result.stdout == "0 [(3, 0)]\n", result.stderr
    assert out.read_bytes() == plain.read_bytes()


def test_a_damaged_source_is_told_as_any_other(source: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in source.iterdir():
        data = bytearray(path.read_bytes())
        if path.suffix == ".distcp":
            data[len(data) // 2] ^= 4
        (damaged / path.name).write_bytes(data)
    result = ran(
        "code = run('consolidate', *sys.argv[1:], '--threads', 3); print(code, made)",
        damaged,
        tmp_path / "out",
    )
    assert result.stdout.startswith("2 [")
    assert result.stderr.count("\n") == 1
    assert "damaged" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged"]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(source: Path, tmp_path: Path, signum: signal.Signals) -> None:
    body = """
signal.signal(signal.SIGINT, signal.default_int_handler)
usual_alone = engine._Engine._alone
def alone(self, index, hands):
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(0.3)
    return usual_alone(self, index, hands)
engine._Engine._alone = alone
main(["consolidate", sys.argv[1], sys.argv[2], "--threads", "3", "-q"])
"""
    command = [sys.executable, "-c", HEAD + body, str(source), str(tmp_path / "out.safetensors")]
    with subprocess.Popen(
        command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            pids = set()
            while len(pids) < 3:
                pids.add(int(process.stdout.readline()))
            process.send_signal(signum)
            _, shown = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, shown.count("\n")) == (130 if signum == signal.SIGINT else 143, 1)
    assert gone(pids)
    assert not list(tmp_path.iterdir())


def gone(pids: Iterable[int], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        if time.monotonic() > deadline:
            return not left
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("threads", [1, 3])
def test_what_copies_wrote_before_a_kill_is_not_written_again(
    source: Path, tmp_path: Path, threads: int
) -> None:
    plain, out, log = tmp_path / "plain.safetensors", tmp_path / "out.safetensors", tmp_path / "log"
    options = ("--dtype", "fp16", "--threads")
    assert (
        ran("sys.exit(run('consolidate', *sys.argv[1:]))", source, plain, *options, 1).returncode
        == 0
    )
    body = """
here = os.getpid()
usual_wrote = engine._Engine.wrote
def wrote(self, *rest):
    usual_wrote(self, *rest)
    os.write(1, f"{os.getpid()} {os.getpid() == here}\\n".encode())
    time.sleep(0.2)
engine._Engine.wrote = wrote
main(["consolidate", *sys.argv[1:], "--resume", "-q"])
"""
    command = [sys.executable, "-c", HEAD + body, str(source), str(out), *options, "3"]
    with subprocess.Popen(
        command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().split()]
        while [is_here for _, is_here in lines].count("False") < 3 or "True" not in [
            is_here for _, is_here in lines
        ]:
            lines.append(process.stdout.readline().split())
        process.kill()
    assert gone({int(pid) for pid, _ in lines})
    (stage,) = (path for path in tmp_path.iterdir() if path.name.startswith("."))
    recorded = (stage / JOURNAL).read_text().splitlines()
    assert recorded[0].startswith('{"journal"')
    assert len(recorded) - 1 >= len(lines)
    body = """
usual_write = engine.Outputs.write
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def write(self, file, offset, data):
    os.write(log, b"%d\\n" % len(data))
    return usual_write(self, file, offset, data)
engine.Outputs.write = write
try:
    main(["consolidate", *sys.argv[2:], "--resume"])
finally:
    print(made)
"""
    result = ran(body, log, source, out, *options, threads)
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1] == ("[(3, 3)]" if threads == 3 else "[]")
    assert sum(map(int, log.read_text().split())) <= plain.stat().st_size - 4 * 1500 * 301 * 2
    assert out.read_bytes() == plain.read_bytes()
    for i in range(4):
        assert f"{1500 * 301:,} finite values of 'huge{i}' became infinite" in result.stderr


def test_progress_ends_at_what_was_written(source: Path, tmp_path: Path) -> None:
    body = DYING.format(harm="raise OSError('the disk does not answer')").replace(
        'code = run("consolidate", sys.argv[1], sys.argv[2], "--threads", 3)',
        "import ema_ckpt\n"
        "told = []\n"
        "result = ema_ckpt.consolidate(sys.argv[1], sys.argv[2], threads=3, progress=told.append)\n"
        "code = sum(told) - result.nbytes",
    )
    assert ran(body, source, tmp_path / "out.safetensors").stdout == "0 [(3, 0)]\n"


def test_a_copy_waits_for_the_journals_first_line(tmp_path: Path) -> None:
    stage = tmp_path / ".stage"
    stage.mkdir()
    journal = Journal(stage, stage / "out", {"plan": "1"}, after=0.0001)
    time.sleep(0.01)
    if not (pid := os.fork()):
        try:
            journal.follow()
            journal.done("", 0, 4, Finished(1, {}))
            os._exit((stage / JOURNAL).exists())
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    journal.done("", 4, 4, Finished(2, {}))
    if not (pid := os.fork()):
        try:
            journal.follow()
            journal.done("", 8, 4, Finished(3, {}))
            os._exit(0)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    journal.close()
    lines = (stage / JOURNAL).read_text().splitlines()
    assert lines[0].startswith('{"journal"')
    assert lines[1:] == ['["",4,4,"00000002"]', '["",8,4,"00000003"]']


def test_a_part_comes_back_as_it_was() -> None:
    strided = Payload("__0_0.distcp", 64, 400, (1, 10), 3, 7)
    part = PartialResult(
        {3: 9, 1: 8},
        {"näme\udcff": [(0, 4, 1), (4, 4, 2)]},
        {"w": 2},
        [PartialItem(5, 2, [(0, 8, 3)], [(0, 16, 4)])],
        {
            ("__0_0.distcp", 64): ("w", strided, [(0, 200, 5)], 200),
            ("b", 0): ("v", Payload("b", 0, 8), [], 0),
        },
    )
    assert PartialResult.load(part.dump()) == part
