"""`--help`: groups, examples that run, nothing cut; and the nearest right word of a wrong one."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ema_ckpt.cli.commands import cli
from ema_ckpt.cli.help import OPTION_GROUPS, VerbCommand, grouped_options

FIXTURES = Path(__file__).parents[2] / "fixtures"
VERBS = ("inspect", "consolidate", "reshard", "convert", "diff", "verify", "synthesize")


def call(
    *args: str, columns: int = 80, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": str(columns)}
    return subprocess.run(
        [sys.executable, "-m", "ema_ckpt", *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env=environment,
    )


@pytest.mark.parametrize("verb", [*VERBS, ""])
def test_nothing_is_cut_at_80_columns(verb: str) -> None:
    done = call(*([verb] if verb else []), "--help")
    assert done.returncode == 0
    assert "..." not in done.stdout.replace("ARGS]...", "").replace("SNAPSHOTS...", "")
    examples = done.stdout.partition("Examples:")[2].splitlines()
    assert [
        line for line in done.stdout.splitlines() if len(line) > 80 and line not in examples
    ] == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_stands_in_a_group_of_its_own_kind(verb: str) -> None:
    command = cli.commands[verb]
    context = click.Context(command, info_name=verb)
    groups = grouped_options(command, context)
    named = {name for _, names in OPTION_GROUPS for name in names.split()}
    options = {p.name for p in command.params if isinstance(p, click.Option)}
    assert options <= named
    shown = [option.name for _, grouped in groups for option in grouped]
    assert len(shown) == len(set(shown)) == len(options) + 1  # and --help
    order = [heading for heading, _ in OPTION_GROUPS]
    assert [h for h, _ in groups] == [h for h in order if h in dict(groups)]


@pytest.mark.parametrize("verb", VERBS)
def test_examples_run_as_they_stand(verb: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "tiny-lm", tmp_path / "RUN")
    shutil.copytree(FIXTURES / "tiny-lm", tmp_path / "OTHER")
    if verb == "synthesize":
        shutil.rmtree(tmp_path / "RUN")
        for step in (1, 2):
            _snapshot(tmp_path / f"STEP_{step}", step)
            shutil.copytree(tmp_path / f"STEP_{step}", tmp_path / "RUN" / f"step_{step}")
    if verb == "verify":
        assert call("consolidate", "RUN", "ema.safetensors", cwd=tmp_path).returncode == 0
    command = cli.commands[verb]
    assert isinstance(command, VerbCommand)
    assert 1 <= len(command.examples) <= 3
    for example in command.examples:
        program, *args = shlex.split(example)
        assert program == "ema-ckpt"
        assert args[0] == verb
        done = call(*args, cwd=tmp_path)
        assert done.returncode == 0, f"{example}\n{done.stderr}"
        assert done.stdout


def _snapshot(folder: Path, step: int) -> None:
    """A checkpoint whose EMA follows a power function and is 4·`step` updates old."""
    import torch

    from ema_ckpt import PowerFunction, ShardedEMA, save

    model = torch.nn.Linear(2, 2)
    ema = ShardedEMA(model, PowerFunction(sigma_rel=0.1))
    for _ in range(4 * step):
        ema.update()
    save(folder, model=model, ema=ema)


@pytest.mark.parametrize("verb", ["consolidate", "verify"])
def test_help_of_a_verb_is_its_own_help(verb: str) -> None:
    assert call("help", verb).stdout == call(verb, "--help").stdout != ""


def test_help_alone_is_the_help_of_all() -> None:
    assert call("help").stdout == call("--help").stdout != ""


@pytest.mark.parametrize(
    ("args", "near"),
    [
        (["conslidate", "a"], "did you mean 'consolidate'?"),
        (["Inspect", "a"], "did you mean 'inspect'?"),
        (["merge", "a"], "did you mean 'consolidate'?"),
        (["check", "a"], "did you mean 'verify'?"),
        (["help", "dif"], "did you mean 'diff'?"),
        (["xyzzy"], "there are inspect, consolidate"),
        (["consolidate", "a", "b", "--dtyp", "bf16"], "did you mean --dtype?"),
        (["reshard", "a", "b", "--worldsize", "2"], "did you mean --world-size?"),
        (["verify", "a", "--value"], "did you mean --values?"),
        (["consolidate", str(FIXTURES / "tiny-lm"), "b", "--tree", "eam"], "'ema', 'model'"),
        (["consolidate", str(FIXTURES / "tiny-lm"), "b", "--dtype", "bf8"], "fp32, bf16 or fp16"),
        (["completion", "bsh"], "'bash', 'zsh', 'fish'"),
    ],
)
def test_errors_name_the_nearest_right_thing(args: list[str], near: str, tmp_path: Path) -> None:
    done = call(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert near in done.stderr
    assert done.stderr.count("\n") == 1


def test_choices_are_on_the_line_of_the_error() -> None:
    result = call("completion")
    assert result.returncode == 2
    assert "Choose from: bash, zsh, fish" in result.stderr
    assert result.stderr.count("\n") == 1
