"""Commands that a message offers: complete, quoted, and taken as they are."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ema_ckpt.cli.commands import run
from ema_ckpt.core.errors import UsageError
from ema_ckpt.ops.suggested_commands import suggested_command, suggested_options
from ema_ckpt.ops.synthesize import synthesize
from tests.checkpoints import ema, torch_at, weights


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, ""),
        (
            {
                "dtype": "keep",
                "threads": None,
                "strict": False,
                "match": (),
                "world_size": 1,
                "progress": print,
            },
            "",
        ),
        ({"dtype": "bf16", "strict": True, "no_fsync": True}, " --dtype bf16 --strict --no-fsync"),
        (
            {"match": ["a*", "b c"], "keep_dtype": ("n",)},
            " --match 'a*' --match 'b c' --keep-dtype n",
        ),
        ({"rename": {"a.": "b."}, "max_memory": 1 << 22}, " --rename a.=b. --max-memory 4194304"),
        (
            {"weights": (0.5, -1.0, 1e-7), "sigma_rel": 0.07},
            " --weights 0.5,-1,1e-07 --sigma-rel 0.07",
        ),
    ],
)
def test_options_as_a_shell_takes_them(given: dict[str, Any], options: str) -> None:
    assert suggested_options(given, {"world_size": 1}) == options


def test_paths_are_quoted() -> None:
    assert suggested_command("convert", "x y", Path("out")) == "ema-ckpt convert 'x y' out"


def _offered(words: list[str]) -> list[list[str]]:
    """The commands in the message that `words` end with."""
    with pytest.raises(UsageError) as caught:
        run(words)
    assert caught.value.code == "ambiguous-tree"
    return [shlex.split(part) for part in str(caught.value).split("`")[1::2]]


def test_every_candidate_of_synthesize_comes_with_a_command_that_runs(tmp_path: Path) -> None:
    runs = [
        torch_at(tmp_path / f"step {n}.pt", {"a_ema": ema(n), "b_ema": ema(n + 5)}) for n in (1, 2)
    ]
    words = [
        "synthesize",
        *map(str, runs),
        str(tmp_path / "o p.safetensors"),
        "--weights",
        "0.25,0.75",
    ]
    words += ["--dtype", "bf16", "--match", "b", "layer.*", "--overwrite", "-q"]
    commands = _offered(words)
    assert [command[5:7] for command in commands] == [["--tree", "a_ema"], ["--tree", "b_ema"]]
    for command in commands:
        assert command[0] == "ema-ckpt"
        assert run([*command[1:], "-q"]) == 0
        found = load_file(tmp_path / "o p.safetensors")
        assert {name: t.dtype for name, t in found.items()} == dict.fromkeys(
            weights(), torch.bfloat16
        )


def test_every_candidate_of_consolidate_comes_with_a_command_that_runs(tmp_path: Path) -> None:
    path = torch_at(tmp_path / "a run.pt", {"a_ema": ema(1), "b_ema": ema(2), "model": weights()})
    commands = _offered(
        ["consolidate", str(path), str(tmp_path / "o p"), "--basename", "x", "--overwrite"]
    )
    assert len(commands) == 3
    for command in commands:
        assert run([*command[1:], "-q"]) == 0
        assert (tmp_path / "o p" / "x.safetensors").exists()


def test_a_sum_of_several_trees_names_them_all(tmp_path: Path) -> None:
    path = torch_at(tmp_path / "run.pt", {"a_ema": ema(1), "b_ema": ema(2)})
    written = synthesize([path], tmp_path / "out.pt", weights=[0.5, 0.5], tree=["a_ema", "b_ema"])
    assert written.tree == "a_ema, b_ema"
    assert (
        synthesize([path, path], tmp_path / "out2.pt", weights=[0.5, 0.5], tree="a_ema").tree
        == "a_ema"
    )
