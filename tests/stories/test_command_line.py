"""What scripts rely on: exit codes and output where a stream is full, closed, or read by nobody."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoints import dcp_at, torch_at

ROOT = Path(__file__).parents[2]


def _shell(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell in which `"$@"` is the command with `words`."""
    command = [sys.executable, "-m", "ema_ckpt", *words]
    return subprocess.run(
        ["sh", "-c", script, "sh", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize(
    "words", [["inspect", "PATH"], ["inspect", "PATH", "--json"], ["verify", "PATH"], ["--help"]]
)
def test_output_on_a_full_disk_is_trouble_and_no_bug(tmp_path: Path, words: list[str]) -> None:
    path = dcp_at(tmp_path / "run")
    done = _shell('"$@" > /dev/full', *(str(path) if word == "PATH" else word for word in words))
    assert done.returncode == 2
    assert done.stderr == "Error: standard output: No space left on device\n"


@pytest.mark.parametrize("closed", ["1", "2"])
def test_a_closed_stream_changes_no_exit_code(tmp_path: Path, closed: str) -> None:
    path = dcp_at(tmp_path / "run")
    done = _shell(f'"$@" {closed}>&-', "inspect", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    failed = _shell(f'"$@" {closed}>&-', "inspect", str(tmp_path / "none"))
    assert failed.returncode == 2
    assert "Traceback" not in failed.stderr


def test_an_error_stays_out_of_the_document_if_stderr_is_closed(tmp_path: Path) -> None:
    done = _shell('"$@" 2>&-', "inspect", str(tmp_path / "none"), "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "not-found"


@pytest.mark.parametrize(
    "words", [["inspect", "PATH", "--json"], ["--help"], ["inspect", "--help"]]
)
def test_a_reader_that_left_before_the_first_line(tmp_path: Path, words: list[str]) -> None:
    path = dcp_at(tmp_path / "run")
    words = [str(path) if word == "PATH" else word for word in words]
    done = _shell('{ "$@"; echo $? >&2; } | sleep 0', *words)
    assert done.stderr == "141\n"


@pytest.mark.parametrize(
    "words",
    [
        ["consolidate"],
        ["consolidate", "a"],
        ["consolidate", "a", "b", "--threads", "x"],
        ["nonsense"],
        ["inspect"],
    ],
)
def test_usage_errors_are_a_document_too(words: list[str]) -> None:
    done = _shell('"$@"', *words, "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "usage"
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert ".;" not in done.stderr


def _on_a_terminal(words: list[str], **environment: str) -> str:
    """What the command prints where both its streams are a terminal."""
    import pty

    controller, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "ema_ckpt", *words],
        stdout=terminal,
        stderr=terminal,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    ) as process:
        os.close(terminal)
        text = b""
        while True:
            try:
                part = os.read(controller, 65536)
            except OSError:  # the last writer closed it
                break
            text += part
        assert process.wait(timeout=60) == 0
    os.close(controller)
    return text.decode()


def test_styles_on_a_terminal_unless_no_color_is_set(tmp_path: Path) -> None:
    path = dcp_at(tmp_path / "run")
    style = re.compile(r"\x1b\[[0-9;]*m")
    assert style.search(_on_a_terminal(["inspect", str(path)], NO_COLOR=""))
    for words in (["inspect", str(path)], ["inspect", str(path), "--shards"], ["diff", str(path)]):
        plain = _on_a_terminal(words, NO_COLOR="1")
        assert not style.search(plain)
        assert "ema" in plain


def test_short_work_and_pipes_show_no_progress(tmp_path: Path) -> None:
    path = dcp_at(tmp_path / "run")
    quick = _on_a_terminal(["consolidate", str(path), str(tmp_path / "a.pt")])
    assert quick.startswith("wrote ")  # a bar is for work of over a second
    assert _on_a_terminal(["consolidate", str(path), str(tmp_path / "b.pt"), "-q"]) == ""
    document = _on_a_terminal(["consolidate", str(path), str(tmp_path / "c.pt"), "--json"])
    assert json.loads(document)["tree"] == "ema"
    piped = _shell('"$@"', "consolidate", str(path), str(tmp_path / "d.pt"))
    assert (piped.returncode, piped.stderr) == (0, "")
    assert "writing" not in piped.stdout


@pytest.mark.parametrize("words", [["inspect"], ["inspect", "--shards"], ["diff"]])
def test_an_encoding_without_the_signs_of_a_table_is_no_bug(
    tmp_path: Path, words: list[str]
) -> None:
    path = dcp_at(tmp_path / "run")
    done = _shell('PYTHONIOENCODING=ascii "$@"', words[0], str(path), *words[1:])
    assert (done.returncode, done.stderr) == (0, "")
    assert "layer.w" in done.stdout or "layer" in done.stdout
    assert done.stdout.isascii()


def test_names_are_not_cut_where_no_terminal_limits_the_line(tmp_path: Path) -> None:
    name = "a_long_name_of_a_block.and_a_layer_in_it." * 4 + "weight"
    path = torch_at(tmp_path / "run.pt", {name: torch.ones(2)})
    assert name in _shell('"$@"', "inspect", str(path), "--shards").stdout


def test_a_target_whose_name_is_no_text(tmp_path: Path) -> None:
    path = dcp_at(tmp_path / "run")
    out = os.fsdecode(bytes(tmp_path) + b"/out\xff.pt")
    done = _shell('"$@"', "consolidate", str(path), out)
    assert (done.returncode, done.stderr) == (0, "")
    assert "out\\udcff.pt" in done.stdout
    assert os.path.exists(out)
