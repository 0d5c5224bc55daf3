"""`--distributed`: the same bytes as from one process, and one's failure reaches all."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ema_ckpt
from ema_ckpt.comm.launched import command_group, launched_ranks
from ema_ckpt.storage.stage_names import stages_of
from tests.checkpoints import save_dcp
from tests.local_ports import free_port

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tensors of several segments each, one of them stored transposed, and many small ones."""
    generator = torch.Generator().manual_seed(0)
    tree: dict[str, torch.Tensor] = {
        f"small{i}": torch.randn(7, i + 1, generator=generator) for i in range(40)
    }
    tree["big"] = torch.randn(21_000, 1000, generator=generator)
    tree["turned"] = torch.randn(1000, 17_000, generator=generator).t()
    return save_dcp(tmp_path_factory.mktemp("source") / "step_1", {"model": tree})


def launch(
    size: int,
    *arguments: object,
    limits: dict[int, Callable[[], None]] | None = None,
    until: Callable[[], bool] | None = None,
    further: dict[int, list[str]] | None = None,
    first: dict[int, str] | None = None,
) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each of `size` processes that a launcher would start, and stop at `until`.

    A process whose rank `first` names runs that code before the command.
    """
    port = str(free_port())
    processes = []
    for rank in range(size):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": port, "PYTHONPATH": str(REPO)}
        code = (first or {}).get(rank)
        begin = ["-m", "ema_ckpt"]
        if code is not None:
            begin = ["-c", f"{code}\nfrom ema_ckpt.cli.main import main; main()"]
        command = [sys.executable, *begin, *map(str, arguments), "--distributed"]
        command += (further or {}).get(rank, [])
        pipe = subprocess.PIPE
        setup = (limits or {}).get(rank)
        processes.append(
            subprocess.Popen(
                command,
                stdout=pipe,
                stderr=pipe,
                text=True,
                env=env,
                preexec_fn=setup,  # noqa: PLW1509 - this process has no threads here
            )
        )
    ends = []
    try:
        while (
            until is not None
            and not until()
            and all(process.poll() is None for process in processes)
        ):
            time.sleep(0.001)
        for process in processes if until is not None else ():
            process.send_signal(signal.SIGTERM)
        for process in processes:
            out, err = process.communicate(timeout=60)
            said = [line for line in err.splitlines(True) if not line.startswith("waiting for")]
            ends.append((process.returncode, out, "".join(said)))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return ends


def contents(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(path.iterdir())
    return {file.name: file.read_bytes() for file in files}


def test_same_bytes_as_from_one_process(source: Path, tmp_path: Path) -> None:
    (tmp_path / "three").mkdir()
    ends = launch(3, "reshard", source, tmp_path / "three" / "out", "--world-size", 4, "--json")
    assert [code for code, *_ in ends] == [0, 0, 0], ends
    assert json.loads(ends[0][1])["tensors"] == 42
    assert [(out, err) for _, out, err in ends[1:]] == [("", ""), ("", "")]
    ema_ckpt.reshard(source, tmp_path / "out", 4)
    assert contents(tmp_path / "three" / "out") == contents(tmp_path / "out")
    assert os.listdir(tmp_path / "three") == ["out"]


def test_within_one_file_with_casts(source: Path, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    command = [
        Path(sys.executable).parent / "torchrun",
        "--nproc-per-node",
        "2",
        "-m",
        "ema_ckpt",
        "consolidate",
    ]
    command += [source, tmp_path / "two" / "x.safetensors", "--dtype", "bf16", "--distributed"]
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [str(part) for part in command], check=True, timeout=60, env=env, capture_output=True
    )
    ema_ckpt.consolidate(source, tmp_path / "x.safetensors", dtype="bf16")
    assert contents(tmp_path / "two" / "x.safetensors") == contents(tmp_path / "x.safetensors")


_KILLED_THE_FIRST_TIME = """
import os
from ema_ckpt.cli.main import main
from ema_ckpt.runtime import executor
def die(job):
    os.kill(os.getpid(), 9)
if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
    executor.on_job = die
main()
"""


def under_torchrun(*words: object) -> str:
    """What torchrun and two processes say; their store is torchrun's own."""
    command = [Path(sys.executable).parent / "torchrun", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [str(word) for word in (*command, *words)],
        timeout=90,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_processes_that_torchrun_starts_anew_meet(source: Path, tmp_path: Path) -> None:
    """Nobody waits for those of the first time, whose addresses torchrun still has."""
    script, target = tmp_path / "once.py", tmp_path / "out"
    script.write_text(_KILLED_THE_FIRST_TIME)
    words = ("reshard", source, target, "--world-size", 2, "--distributed")
    said = under_torchrun("--max-restarts", 1, script, *words)
    assert said.count("wrote 42 tensors") == 1
    assert ema_ckpt.verify(target).status == "sound"


def test_two_commands_of_one_launch_meet_each_for_itself(source: Path, tmp_path: Path) -> None:
    script = tmp_path / "twice.sh"
    ours = f"{sys.executable} -m ema_ckpt"
    script.write_text(
        f"{ours} reshard {source} {tmp_path}/a --world-size 2 --distributed &&\n"
        f"{ours} consolidate {tmp_path}/a {tmp_path}/b.pt --distributed\n"
    )
    said = under_torchrun("--no-python", "bash", script)
    assert said.count("wrote 42 tensors") == 2
    assert ema_ckpt.verify(tmp_path / "b.pt").status == "sound"


# Several machines are not to be had here; what one process asks of the system is seen.
_SAYS_HOW_IT_WRITES = """
import fcntl, os, sys
fsync = os.fsync
def tell(fd):
    name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
    mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    print("synced", name, mode == os.O_WRONLY, file=sys.stderr)
    fsync(fd)
os.fsync = tell
"""


@pytest.mark.parametrize(
    ("option", "synced"), [("--quiet", ["x.safetensors True"]), ("--no-fsync", [])]
)
def test_each_process_makes_durable_what_it_wrote(
    source: Path, tmp_path: Path, option: str, synced: list[str]
) -> None:
    """On several machines with one file system, each has written pages that the others cannot sync.

    What may be read as well, NFS would write in whole pages, those that two processes share too.
    """
    words = ("consolidate", source, tmp_path / "x.safetensors", option)
    ends = launch(2, *words, first={1: _SAYS_HOW_IT_WRITES})
    assert [code for code, *_ in ends] == [0, 0], ends
    assert [line.removeprefix("synced ") for line in ends[1][2].splitlines()] == synced


def test_damage_that_no_process_sees_whole_is_found(source: Path, tmp_path: Path) -> None:
    """The storage of `big` is read by both: its checksum can only be told from both shares."""
    broken = tmp_path / "src"
    broken.mkdir()
    for file in source.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    big = next(t for t in ema_ckpt.inspect(broken).tensors if t.name == "model.big")
    data = bytearray((broken / big.chunks[0].file).read_bytes())
    with ema_ckpt.open(source) as ckpt:
        row = ckpt["model.big"][10_500].numpy().tobytes()
    at = data.find(row)
    data[at] ^= 1
    (broken / big.chunks[0].file).write_bytes(data)
    ends = launch(2, "consolidate", broken, tmp_path / "x.safetensors")
    assert [code for code, *_ in ends] == [2, 2]
    assert all("'model.big'" in err and "CRC-32" in err for _, _, err in ends)
    assert sorted(os.listdir(tmp_path)) == ["src"]


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def test_failure_of_one_reaches_all_with_its_cause(source: Path, tmp_path: Path) -> None:
    ends = launch(
        2, "consolidate", source, tmp_path / "x.safetensors", "--json", limits={1: small_files}
    )
    assert [code for code, *_ in ends] == [2, 2]
    error = json.loads(ends[0][1])["error"]
    assert error["code"] == "rank-failed"
    assert error["message"].startswith("rank 1: ") and "File too large" in error["message"]
    assert "File too large" in ends[1][2] and "Traceback" not in ends[0][2] + ends[1][2]
    assert os.listdir(tmp_path) == []


def test_a_signal_to_all_is_said_once(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    for _ in range(10):
        ends = launch(
            2, "reshard", source, target, "--world-size", 2, until=lambda: bool(stages_of(target))
        )
        if not target.exists():
            break
        shutil.rmtree(target)
    else:
        pytest.fail("never caught")
    assert [code for code, *_ in ends] == [143, 143], ends
    assert ends[0][2].splitlines()[-1] == "Error: terminated"
    assert ends[1][1] == ends[1][2] == ""
    assert os.listdir(tmp_path) == []


class Stop(Exception):
    """Ends a run as a crash would."""


def test_continues_what_one_process_began(source: Path, tmp_path: Path) -> None:
    def stop(nbytes: int) -> None:
        if nbytes > 1 << 20:
            raise Stop

    (tmp_path / "a").mkdir()
    target = tmp_path / "a" / "out"
    with pytest.raises(Stop):
        ema_ckpt.reshard(source, target, 2, resume=True, progress=stop)
    assert stages_of(target)
    ends = launch(2, "reshard", source, target, "--world-size", 2, "--resume")
    assert [code for code, *_ in ends] == [0, 0], ends
    ema_ckpt.reshard(source, tmp_path / "out", 2)
    assert contents(target) == contents(tmp_path / "out")


def test_processes_that_do_different_things_are_told(source: Path, tmp_path: Path) -> None:
    ends = launch(2, "consolidate", source, tmp_path / "x.pt", further={0: ["--dry-run"]})
    for code, _, err in ends:
        assert code == 2 and err.count("\n") == 1
        assert "give all of them the same arguments" in err
    assert list(tmp_path.iterdir()) == []
    ends = launch(2, "consolidate", source, tmp_path / "x.pt", further={1: ["--dtype", "bf16"]})
    for code, _, err in ends:
        assert code == 2 and "plan different outputs" in err


@pytest.mark.parametrize("option", ["--dry-run", "--overwrite"])
def test_processes_that_name_different_targets_are_told(
    source: Path, tmp_path: Path, option: str
) -> None:
    """One relative path names two places where the processes have two working directories."""
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    limits: dict[int, Callable[[], None]] = {
        rank: partial(os.chdir, place) for rank, place in enumerate(places)
    }
    for code, out, err in launch(2, "consolidate", source, "x.pt", option, limits=limits):
        assert code == 2 and out == "" and err.count("\n") == 1
        assert f"rank 0: {places[0]}/x.pt; rank 1: {places[1]}/x.pt" in err
    assert [os.listdir(place) for place in places] == [[], []]


def alone(rank: int, *arguments: object, **variables: str) -> subprocess.Popen[str]:
    """Start one of two processes, whose other one never comes."""
    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(REPO), **variables}
    command = [sys.executable, "-m", "ema_ckpt", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env)


@pytest.mark.parametrize("verb", ["inspect", "consolidate"])
def test_without_the_option_no_process_waits_for_another(
    source: Path, tmp_path: Path, verb: str
) -> None:
    target = tmp_path / "x.safetensors"
    arguments = [verb, source, *([target] if verb == "consolidate" else []), "--json"]
    with alone(1, *arguments) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out)
    assert target.exists() == (verb == "consolidate")


def test_an_existing_target_under_a_launcher_names_the_option(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.safetensors"
    ema_ckpt.consolidate(source, target)
    with alone(1, "consolidate", source, target) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "already exists" in err and "--distributed" in err
    with pytest.raises(ema_ckpt.TargetError) as caught:
        ema_ckpt.consolidate(source, target)
    assert "--distributed" not in str(caught.value)


def test_without_a_launcher_the_option_is_an_error(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ema_ckpt", "reshard", str(source), str(tmp_path / "out")]
    command += ["--world-size", "2", "--distributed"]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "torchrun" in result.stderr


@pytest.mark.parametrize(
    "variable",
    "RANK=-1 RANK=2 RANK=x RANK= WORLD_SIZE=0 WORLD_SIZE=1000000000 WORLD_SIZE=two "
    "MASTER_PORT=99999 MASTER_PORT=0 MASTER_PORT=x".split(" "),
)
def test_variables_that_no_launcher_sets_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    usual = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    name, _, value = variable.partition("=")
    for key, text in (usual | {name: value}).items():
        monkeypatch.setenv(key, text)
    with pytest.raises(ema_ckpt.UsageError) as caught, command_group(print):
        pass
    assert str(caught.value).startswith(f"--distributed: {name} is {value!r}: expected ")
    assert launched_ranks() == (0, 1)


def test_one_process_alone_needs_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for key, text in alone.items():
        monkeypatch.setenv(key, text)
    with command_group(print):
        assert launched_ranks() == (0, 1)


@pytest.mark.parametrize("option", ["--distributed", "--quiet"])
def test_such_variables_are_told_in_one_line_or_not_looked_at(
    source: Path, tmp_path: Path, option: str
) -> None:
    target = tmp_path / "x.safetensors"
    target.touch()
    with alone(0, "consolidate", source, target, option, RANK="x") as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and err.count("\n") == 1
    assert ("RANK is 'x'" if option == "--distributed" else "already exists") in err


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_who_waits_says_for_whom_and_ends_at_once_when_signalled(
    source: Path, tmp_path: Path, rank: int, signum: signal.Signals
) -> None:
    with alone(rank, "consolidate", source, tmp_path / "x.safetensors", "--distributed") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"waiting for rank {1 - rank}\n"
        begin = time.monotonic()
        process.send_signal(signum)
        process.wait(timeout=30)
        seconds = time.monotonic() - begin
        said = process.stderr.read()
    assert process.returncode == (130 if signum == signal.SIGINT else 143)
    assert seconds < 1
    assert ("Error: " in said) == (rank == 0) and "Traceback" not in said
    assert os.listdir(tmp_path) == []


_KILLED_AT = {
    "a job": "from ema_ckpt.runtime import executor; executor.on_job = die",
    "the connection": "from ema_ckpt.comm import channel; channel.connect_channel = die",
}


@pytest.mark.parametrize(("moment", "killed"), [("a job", 1), ("the connection", 0)])
def test_a_process_that_is_killed_ends_the_other(
    source: Path, tmp_path: Path, moment: str, killed: int
) -> None:
    port, target = str(free_port()), tmp_path / "out"
    processes = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": port, "PYTHONPATH": str(REPO)}
        code = "import os, signal; die = lambda *_: os.kill(os.getpid(), signal.SIGKILL); "
        code += f"{_KILLED_AT[moment]}; " if rank == killed else ""
        command = [sys.executable, "-c", code + "from ema_ckpt.cli.main import main; main()"]
        command += ["reshard", str(source), str(target), "--world-size", "2", "--distributed"]
        pipe = subprocess.DEVNULL if rank == killed else subprocess.PIPE
        processes.append(subprocess.Popen(command, stderr=pipe, text=True, env=env))
    survivor, other = processes[1 - killed], processes[killed]
    try:
        _, err = survivor.communicate(timeout=60)
        assert other.wait(timeout=60) == -signal.SIGKILL
    finally:
        for process in processes:
            process.kill()
    assert survivor.returncode == 2
    told = {
        "a job": "another process ended without a word",
        "the connection": "not all ranks could be connected: the connection to another rank was lost",
    }
    said = [line for line in err.splitlines() if not line.startswith("waiting for")]
    assert said == [f"Error: {told[moment]}"]  # and nothing of gloo's or torch's own
    assert os.listdir(tmp_path) == []


# A rank that is killed when nothing is left to be done, and one whose disk fails then.
_AT_THE_LAST_STEP = """
import os
from ema_ckpt.comm.launched import CommandGroup
def end(group):
    {what}
CommandGroup.end = end
"""


@pytest.mark.parametrize(
    ("what", "code"), [("os.kill(os.getpid(), 9)", -9), ("raise OSError(5, 'no disk')", 2)]
)
def test_what_ends_after_the_target_is_in_place_is_a_warning(
    source: Path, tmp_path: Path, what: str, code: int
) -> None:
    target = tmp_path / "x.safetensors"
    end = {1: _AT_THE_LAST_STEP.format(what=what)}
    ends = launch(2, "consolidate", source, target, "--json", first=end)
    assert [code for code, *_ in ends] == [0, code], ends
    result = json.loads(ends[0][1])  # one document, and a true one
    assert result["target"] == str(target)
    assert [warning["code"] for warning in result["warnings"]] == ["rank-failed"]
    assert ema_ckpt.verify(target).status == "sound"


def test_what_ends_before_a_dry_run_is_over_is_its_failure(source: Path, tmp_path: Path) -> None:
    end = {1: _AT_THE_LAST_STEP.format(what="os.kill(os.getpid(), 9)")}
    ends = launch(2, "consolidate", source, tmp_path / "x.pt", "--dry-run", "--json", first=end)
    assert [code for code, *_ in ends] == [2, -9]
    assert json.loads(ends[0][1])["error"]["code"] == "rank-failed"


def test_a_source_that_is_replaced_while_one_process_is_late_is_told(tmp_path: Path) -> None:
    """One process has the old file open, and the other one opens the new one."""
    path, other, target = (tmp_path / f"{name}.safetensors" for name in ("a", "b", "out"))
    for file, value in ((path, 1.0), (other, 2.0)):
        save_file({f"w{i}": torch.full((512, 1024), value) for i in range(4)}, file)
    late = f"""
import os, time
from ema_ckpt.comm.launched import CommandGroup
connect = CommandGroup.connect
def connect_and_wait(group):
    connect(group)
    while os.path.exists({str(other)!r}):
        time.sleep(0.01)
CommandGroup.connect = connect_and_wait
"""
    early = f"""
import os
from ema_ckpt.ops import write
agree = write._agree_on_target
def replace_and_agree(destination):
    os.replace({str(other)!r}, {str(path)!r})
    agree(destination)
write._agree_on_target = replace_and_agree
"""
    ends = launch(2, "convert", path, target, "--json", first={0: late, 1: early})
    assert [code for code, *_ in ends] == [2, 2], ends
    assert "not the same to all processes" in json.loads(ends[0][1])["error"]["message"]
    assert os.listdir(tmp_path) == [path.name]


def test_nothing_goes_on_from_what_another_process_read_wrongly(tmp_path: Path) -> None:
    """A disk or cable that gives one wrong byte once: its checksum says so when it is too late."""
    stock = tmp_path / "stock"
    big = {"big": torch.randn(40_000, 1000)}  # two ranges of a storage, each in the journal
    save_dcp(stock, {"model": big})
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "x"
    wrong = """
from ema_ckpt.storage.files import LocalFiles
read, reads = LocalFiles.read_into, []
def read_into(self, name, offset, buffer):
    read(self, name, offset, buffer)
    reads.append(name)
    if len(buffer) > 100_000 and len(reads) > 2 and not hasattr(LocalFiles, "done"):
        LocalFiles.done = True
        buffer[5000] ^= 1
LocalFiles.read_into = read_into
from ema_ckpt.writing import schedule
schedule._share = lambda jobs, position, total, rank, ranks: jobs if rank else iter(())
"""
    idle = """
from ema_ckpt.writing import schedule
schedule._share = lambda jobs, position, total, rank, ranks: jobs if rank else iter(())
"""
    command = ("reshard", stock, target, "--world-size", 1, "--resume")
    ends = launch(2, *command, first={0: idle, 1: wrong})
    assert [code for code, *_ in ends] == [2, 2]
    assert all("'model.big'" in err and "CRC-32" in err for _, _, err in ends)
    ema_ckpt.reshard(stock, target, 1, resume=True)
    with ema_ckpt.open(target) as ckpt:
        assert torch.equal(ckpt["model.big"], big["big"])


def test_a_port_that_another_program_has_is_named(source: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        target = tmp_path / "x.pt"
        with alone(0, "consolidate", source, target, "--distributed", MASTER_PORT=port) as process:
            _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and err.count("\n") == 1
    assert f"127.0.0.1:{port}" in err and "the port is in use" in err


@pytest.mark.parametrize("option", ["--dry-run", "--overwrite"])
def test_a_url_is_refused_by_name_in_one_line(source: Path, option: str) -> None:
    """Processes share a file system and no object store; nobody waits for another one that is refused."""
    ends = launch(2, "consolidate", source, "memory://runs/x.safetensors", "--json", option)
    for code, out, err in ends:
        assert code == 2
        assert "Traceback" not in err
        assert err.count("\n") <= 1
    errors = [json.loads(out)["error"] for _, out, _ in ends if out]
    assert errors
    for error in errors:
        assert error["code"] == "unsupported"
        assert "memory://runs/x.safetensors" in error["message"]
        assert "write to a URL from one process" in error["message"]
