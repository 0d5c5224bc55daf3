"""Completion, asked for by the real shells where they are installed."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parents[2] / "fixtures"
REPO = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """`ema-ckpt` of this checkout on the path, and a directory with a checkpoint and a folder."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "ema-ckpt").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ema_ckpt "$@"\n')
    (binaries / "ema-ckpt").chmod(0o755)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "tiny-lm").symlink_to(FIXTURES / "tiny-lm")
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(REPO), "HOME": str(tmp_path)}


def words(environment: dict[str, str], *typed: str) -> list[str]:
    """What the command answers to bash for these words, the last of which is being typed."""
    done = subprocess.run(
        ["ema-ckpt"],
        env={
            **environment,
            "_EMA_CKPT_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(["ema-ckpt", *typed]),
            "COMP_CWORD": str(len(typed)),
        },
        cwd=Path(environment["HOME"]) / "here",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["con"], ["consolidate", "convert"]),
        (["help", "ver"], ["verify"]),
        (["consolidate", "tiny-lm", "out", "--tree", ""], ["ema", "model", "optimizer"]),
        (["consolidate", "tiny-lm", "out", "--tree", "mo"], ["model"]),
        (["inspect", "--tree", ""], []),
        (["inspect", "tiny-lm", "--tree", "e"], ["ema"]),
        (["convert", "tiny-lm", "out", "--tree", "ema", "--tree", "o"], ["optimizer"]),
        (["diff", "tiny-lm", "--against", "m"], ["model"]),
        (["diff", "nothing", "tiny-lm", "--against", "m"], ["model"]),
        (["consolidate", "tiny-lm", "out", "--fill", "m"], ["model"]),
        (["inspect", "no-such-path", "--tree", ""], []),
        (["convert", "tiny-lm", "out", "--to", ""], ["dcp", "safetensors", "pt"]),
        (["consolidate", "tiny-lm", "out", "--dtype", "b"], ["bf16"]),
        (["verify", "tiny-lm", "--val"], ["--values"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
    ],
)
def test_words(environment: dict[str, str], typed: list[str], expected: list[str]) -> None:
    found = words(environment, *typed)
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("typed", [["inspect", "ti"], ["verify", "tiny-lm", "--against", "ti"]])
def test_paths_are_left_to_the_shell(environment: dict[str, str], typed: list[str]) -> None:
    done = subprocess.run(
        ["ema-ckpt"],
        env={
            **environment,
            "_EMA_CKPT_COMPLETE": "fish_complete",
            "COMP_WORDS": " ".join(["ema-ckpt", *typed]),
            "COMP_CWORD": typed[-1],
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "file" in done.stdout


PROGRAMS = {
    "bash": """
        source <(ema-ckpt completion bash)
        COMP_WORDS=(ema-ckpt {words}); COMP_CWORD={index}
        _ema_ckpt_completion ema-ckpt; printf '%s\\n' "${{COMPREPLY[@]}}"
    """,
    "fish": "ema-ckpt completion fish | source; complete -C 'ema-ckpt {words}'",
}


@pytest.mark.parametrize("shell", ["bash", "fish"])
@pytest.mark.parametrize(
    ("typed", "expected"),
    [("consolidate tiny-lm out --tree mo", "model"), ("resh", "reshard")],
)
def test_in_the_shell(environment: dict[str, str], shell: str, typed: str, expected: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    program = PROGRAMS[shell].format(words=typed, index=len(typed.split()))
    done = subprocess.run(
        [shell, "-c", program],
        env=environment,
        cwd=Path(environment["HOME"]) / "here",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split()[0] == expected


def test_in_zsh_on_a_terminal(environment: dict[str, str]) -> None:
    """zsh completes only where somebody types: on a pseudo-terminal, with a tab."""
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    home = Path(environment["HOME"])
    (home / ".zshrc").write_text(
        "PS1='ready> '\nautoload -Uz compinit && compinit -u -D\nsource <(ema-ckpt completion zsh)\n"
    )
    leader, follower = pty.openpty()
    shell = subprocess.Popen(
        ["zsh", "-i"],
        env={**environment, "TERM": "dumb"},
        cwd=home / "here",
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    try:
        read_until(leader, b"ready> ")
        os.write(leader, b"ema-ckpt consolidate tiny-lm out --tree mo\t")
        read_until(leader, b"--tree model")
    finally:
        shell.kill()
        shell.wait()
        os.close(leader)
        os.close(follower)


def read_until(terminal: int, expected: bytes) -> None:
    """Read what the terminal shows until it shows `expected`."""
    seen, deadline = b"", time.monotonic() + 40
    # Unlike select, poll takes descriptors above 1 023, of which a long run may have opened as many.
    ready = select.poll()
    ready.register(terminal, select.POLLIN)
    while expected not in seen:
        assert time.monotonic() < deadline, seen
        if ready.poll(1000):
            seen += os.read(terminal, 4096)
