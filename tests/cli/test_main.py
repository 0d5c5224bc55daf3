"""The process around a command: exit codes, signals, one line for an error, one document for --json."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ema_ckpt.cli.shared_options import spread

FIXTURES = Path(__file__).parents[2] / "fixtures"
TINY = str(FIXTURES / "tiny-lm")


def call(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ema_ckpt", *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, **options
    )  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["inspect"], "usage", "Missing argument 'PATH'"),
        (["nonsense"], "usage", "No such command"),
        (["inspect", TINY, "--colour"], "usage", "No such option"),
        (["-q", "inspect", TINY], "usage", "options of a command follow its name"),
        (["inspect", TINY, "--depth", "-1"], "usage", "--depth"),
        (["diff", TINY, "--top", "-1"], "usage", "--top"),
        (["inspect", "/does/not/exist"], "not-found", "/does/not/exist"),
        (["inspect", "/usr/include"], "not-a-checkpoint", "/usr/include"),
        (["consolidate", TINY, "OUT.safetensors", "--tree", "emma"], "unknown-tree", "'ema'"),
        (["consolidate", TINY, "OUT.safetensors", "--tree", "optimizer"], "usage", "convert"),
        (
            ["consolidate", TINY, "OUT.safetensors", "--dtype", "int8"],
            "usage",
            "fp32, bf16 or fp16",
        ),
        (["consolidate", TINY, "OUT.safetensors", "--threads", "0"], "usage", "1 or more"),
        (["consolidate", TINY, "OUT.safetensors", "--max-memory", "1MiB"], "usage", "4MiB"),
        (
            ["consolidate", TINY, "OUT.safetensors", "--match", "nothing*"],
            "empty-selection",
            "nothing*",
        ),
        (["inspect", TINY, "--match", "nothing*"], "empty-selection", "nothing*"),
        (["inspect", TINY, "--match", "model.*", "nothing"], "empty-selection", "nothing"),
        (["inspect", TINY, "--tree", "ema", "--match", "model.*"], "empty-selection", "model.*"),
        (["consolidate", TINY, "OUT.safetensors", "--rename", "x"], "usage", "="),
        (["convert", TINY, "OUT.gguf"], "usage", ".gguf is the ending of a format"),
        (["convert", TINY, "missing/OUT.NPZ"], "usage", ".NPZ is the ending of a format"),
        (["convert", TINY, "OUT.zip"], "usage", "--to"),
        (["reshard", TINY, "OUT", "--world-size", "0"], "usage", "1 to 1048576"),
        (["convert", TINY, "OUT", "--to", "onnx"], "usage", "dcp, safetensors or pt"),
        (["convert", TINY, "OUT.pt", "--world-size", "2"], "usage", "DCP"),
    ],
)
def test_errors_are_one_line_and_one_document(
    tmp_path: Path, args: list[str], code: str, words: str
) -> None:
    done = call(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    document = call(*args, "--json", cwd=tmp_path)
    assert document.returncode == 2
    error = json.loads(document.stdout)["error"]
    assert error["code"] == code
    assert words in error["message"]
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_a_traceback(tmp_path: Path) -> None:
    done = call("inspect", str(tmp_path / "x"), "--debug")
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: ")


def test_quiet_and_json_on_success(tmp_path: Path) -> None:
    quiet = call("consolidate", TINY, str(tmp_path / "a.safetensors"), "-q")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    loud = call("consolidate", TINY, str(tmp_path / "b.safetensors"))
    assert "tree 'ema'" in loud.stdout
    assert str(tmp_path / "b.safetensors") in loud.stdout
    document = json.loads(
        call("consolidate", TINY, str(tmp_path / "c.safetensors"), "--json").stdout
    )
    assert document["tree"] == "ema"
    assert document["files"] == [
        {"path": "c.safetensors", "nbytes": (tmp_path / "c.safetensors").stat().st_size}
    ]


@pytest.mark.parametrize("flag", ["--version", "--help", "-h"])
def test_help_and_version(flag: str) -> None:
    done = call(flag)
    assert done.returncode == 0
    assert done.stdout


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    command = f"{sys.executable} -m ema_ckpt inspect {TINY} --json; echo $? >{tmp_path}/code"
    done = subprocess.run(
        ["bash", "-c", f"({command}) | true"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    # The pipe may have been read before it closed.
    assert (tmp_path / "code").read_text().strip() in ("0", "141")


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_leave_nothing(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    source = tmp_path / "source"
    _write_large(source)
    out = tmp_path / "out"
    out.mkdir()
    command = [
        sys.executable,
        "-m",
        "ema_ckpt",
        "convert",
        str(source / "w.safetensors"),
        str(out / "w.pt"),
        "--threads",
        "1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not any(out.iterdir()):
        assert time.monotonic() < deadline, "the stage appears"
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    process.send_signal(sent)
    _, errors = process.communicate(timeout=60)
    if process.returncode == 0:  # it was faster than the signal
        assert (out / "w.pt").exists()
        return
    assert process.returncode == code
    assert errors.count("\n") == 1
    assert list(out.iterdir()) == []


def _write_large(folder: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir()
    save_file({f"t{i}": np.zeros(8 << 20, np.float32) for i in range(16)}, folder / "w.safetensors")


def test_names_that_a_terminal_would_obey_are_escaped(tmp_path: Path) -> None:
    target = tmp_path / "bad\x1b[31m\n"
    done = call("inspect", str(target))
    assert "\x1b" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_start_up_imports_little() -> None:
    code = (
        "import sys; from ema_ckpt.ops.consolidate import consolidate;"
        f"consolidate({TINY!r}, sys.argv[1]); print(sorted({{m.partition('.')[0] for m in sys.modules}}))"
    )
    out = str(Path(os.environ.get("TMPDIR", "/tmp")) / f"start-up-{os.getpid()}.safetensors")
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, out],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    finally:
        Path(out).unlink(missing_ok=True)
    assert not {"torch", "numpy", "rich", "fsspec", "asyncio"} & set(eval(done.stdout))


# What a verb loads only where an option or the source asks for it: a part of each start otherwise.
_AGAINST = {
    "ema_ckpt.ops.verify_against",
    "ema_ckpt.ops.verify_manifest",
    "ema_ckpt.ops.dequantize",
}
_WRITES = {"ema_ckpt.ops.results.write", "ema_ckpt.writing.options", "hashlib", "tempfile"}


@pytest.mark.parametrize(
    ("command", "later"),
    [
        (
            ["verify", TINY],
            {"numpy", "rich", "ema_ckpt.state_dicts.selection"} | _AGAINST | _WRITES,
        ),
        (["inspect", TINY, "--json"], {"numpy", "rich", "ema_ckpt.ops.open"} | _AGAINST | _WRITES),
        (["inspect", TINY], {"numpy", "rich._emoji_codes", "ema_ckpt.ops.open"} | _WRITES),
    ],
)
def test_a_verb_loads_what_it_needs(command: list[str], later: set[str]) -> None:
    code = (
        "import sys, ema_ckpt.cli.main as cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "finally: print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not later & set(done.stderr.split())


@pytest.mark.parametrize(
    ("given", "positionals", "expected"),
    [
        ("P O --match a b -q", 2, "P O --match a --match b -q"),
        ("--match a P O", 2, "--match a P O"),
        ("P --match a O", 2, "P --match a O"),
        ("P O --match=a b", 2, "P O --match=a --match b"),
        ("P O --fill", 2, "P O --fill"),
        ("P O --fill model", 2, "P O --fill model"),
        ("--fill P O", 2, "--fill= P O"),
        ("P O --tree ema --exclude x y", 2, "P O --tree ema --exclude x --exclude y"),
        ("P O -- --match a b", 2, "P O -- --match a b"),
    ],
)
def test_options_with_several_values(given: str, positionals: int, expected: str) -> None:
    valued = ["--match", "--exclude", "--rename", "--keep-dtype", "--tree"]
    assert spread(given.split(), positionals, valued) == expected.split()


@pytest.mark.parametrize("args", [["inspect", "."], ["verify", TINY, "--manifest", "sums"]])
def test_a_current_directory_that_was_deleted_is_named(args: list[str], tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    shell = ["sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", sys.executable, "-m", "ema_ckpt"]
    done = subprocess.run(
        [*shell, *args], cwd=gone, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "the current directory, which was deleted" in done.stderr


def test_a_pipe_that_does_not_block_gets_all(tmp_path: Path) -> None:
    """Some programs give such a one to what they start; Python leaves out what it has no room for."""
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    head = json.dumps({f"w{number}": entry for number in range(2000)}).encode()
    (tmp_path / "many.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    near, far = os.pipe()
    os.set_blocking(far, False)
    command = [sys.executable, "-m", "ema_ckpt", "inspect", "many.safetensors", "--json"]
    with subprocess.Popen(command, stdout=far, cwd=tmp_path) as process:
        os.close(far)
        with open(near, "rb") as stream:
            time.sleep(2)  # the pipe is full by then
            data = stream.read()
    assert process.returncode == 0
    assert len(data) > 100_000
    json.loads(data)
