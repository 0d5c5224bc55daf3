"""Lines that commands print: the first of a kind and a count, broken between words on a terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch

from ema_ckpt.cli.output import Style, fitted, print_written, warning_lines
from ema_ckpt.core.catalog import Diagnostic
from ema_ckpt.ops.convert import convert
from tests.checkpoints import torch_at


def test_warnings_of_a_code_are_counted() -> None:
    warnings = [Diagnostic("hole", f"w{i}") for i in range(30)] + [Diagnostic("opaque", "o")]
    lines = list(warning_lines(warnings))
    assert lines[:2] == ["Warning: w0 [hole]", "Warning: w1 [hole]"]
    assert lines[10:] == ["… 20 more warnings, which --json lists", "Warning: o [opaque]"]


def test_eleven_are_shown_whole() -> None:
    assert len(list(warning_lines([Diagnostic("hole", f"w{i}") for i in range(11)]))) == 11


def test_what_is_tied_and_renamed_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = torch.ones(2)
    path = torch_at(tmp_path / "run.pt", {"module.a": shared, "module.b": shared})
    print_written(convert(path, tmp_path / "out.safetensors"), Style())
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("renamed")] == [
        "renamed module.a -> a",
        "renamed module.b -> b",
    ]
    assert [line for line in lines if line.startswith("tied")] == ["tied b -> a, stored once"]


def test_words_are_not_broken_at_80_columns(fixtures: Path) -> None:
    near, far = pty.openpty()
    fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    environment["NO_COLOR"] = "1"
    holed = next(p for p in (fixtures / "nasty").iterdir() if p.name.startswith("hole"))
    command = [sys.executable, "-m", "ema_ckpt", "inspect", str(holed)]
    process = subprocess.Popen(command, stdout=far, stderr=far, env=environment)
    os.close(far)
    shown = b""
    while True:
        try:
            shown += os.read(near, 65536)
        except OSError:
            break
    os.close(near)
    assert process.wait(timeout=60) == 0
    lines = shown.decode().splitlines()
    assert any(line.startswith("Warning: ") for line in lines)
    assert [line for line in lines if len(line) > 80 and " " in line.strip()] == []


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_break_between_words_and_commands_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    command = "`ema-ckpt consolidate some/run out.pt --tree 'net ema'`"
    line = f"Error: two trees could be meant here; for one of them: {command}; or name the other"
    lines = fitted(line, Screen()).split("\n")
    assert lines[0] == "Error: two trees could be meant here;"
    assert any(command in one for one in lines)
    assert all(len(one) <= 40 for one in lines if command not in one)
    assert " ".join(one.strip() for one in lines) == line
    assert fitted(line, io.StringIO()) == line
