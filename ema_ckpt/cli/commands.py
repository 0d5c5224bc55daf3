"""The commands: parse, call the verb, render, exit code. Nothing is decided here."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ema_ckpt import __version__
from ema_ckpt.cli.help import VerbCommand, VerbGroup, explain_usage
from ema_ckpt.cli.shared_options import (
    COMPLETION_VARIABLE,
    choice_option,
    complete_tree,
    distributed,
    general,
    path_argument,
    ruled,
    tree_option,
    writer,
)
from ema_ckpt.core.errors import UsageError

if TYPE_CHECKING:
    from ema_ckpt.cli.output import Style
    from ema_ckpt.ops.results.write import WriteResult

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_VERIFY_EXIT_CODES = {"sound": 0, "damaged": 1, "unproven": 3}
_COUNT = click.IntRange(min=0)
_THREADS = "Maximum number of workers. Default: usable CPUs, at most 8."


@click.group(cls=VerbGroup, context_settings=_CONTEXT)
@click.version_option(__version__, prog_name="ema-ckpt")
def cli() -> None:
    """Inspect, consolidate and convert sharded checkpoints. Nothing stored in them is executed."""


def _style(options: dict[str, Any]) -> Style:
    """Remove the general options from `options` and return how to print."""
    from ema_ckpt.cli.output import Style

    options.pop("debug")
    return Style(json=options.pop("as_json"), quiet=options.pop("quiet"))


def _run_writer(
    verb: Callable[..., WriteResult], *paths: str | tuple[str, ...], **options: Any
) -> None:
    from ema_ckpt.cli import output
    from ema_ckpt.cli.progress import progress

    style = _style(options)
    with progress(style.talks, "writing") as on_progress:
        result = verb(*paths, progress=on_progress, **options)
    output.print_written(result, style)


@cli.command(
    "inspect",
    cls=VerbCommand,
    examples=(
        "ema-ckpt inspect RUN",
        "ema-ckpt inspect RUN --tree ema --shards",
        "ema-ckpt inspect RUN --match '*.weight' --json",
    ),
)
@path_argument("path")
@tree_option(help="Only this tree, or tensors below this dotted path.")
@click.option("--match", multiple=True, metavar="GLOB", help="Only matching names. Repeatable.")
@click.option(
    "--depth", type=_COUNT, default=2, metavar="N", help="Levels of modules to show. Default: 2."
)
@click.option("--shards", is_flag=True, help="Show which file holds which rows.")
@general
def inspect_command(
    path: str,
    tree: str | None,
    match: tuple[str, ...],
    depth: int,
    shards: bool,
    **options: Any,
) -> None:
    """Show trees, tensors, shards, EMA settings. Reads metadata, and of data files only the
    settings of EMA trees.
    """
    from ema_ckpt.cli import output
    from ema_ckpt.cli.object_lines import MAX_OBJECTS
    from ema_ckpt.ops.inspect import inspect_with_values

    style = _style(options)
    most_objects = MAX_OBJECTS if style.talks else 0
    result, values = inspect_with_values(path, tree, match, most_objects)
    output.print_result(result, style, result.warnings)
    if style.talks:
        from ema_ckpt.cli.inspect_tables import print_inspected

        print_inspected(result, tree, depth, shards, values)


@cli.command(
    "consolidate",
    cls=VerbCommand,
    examples=(
        "ema-ckpt consolidate RUN ema.safetensors",
        "ema-ckpt consolidate RUN hf-model --dtype bf16 --max-shard-size 2GB",
        "ema-ckpt consolidate RUN layers.pt --tree model --match '*.layers.*'",
    ),
)
@path_argument("path")
@path_argument("out")
@tree_option(help="Tree to write. Default: the only EMA, or the only live tree.")
@click.option(
    "--max-shard-size",
    default="5GB",
    metavar="SIZE",
    help="Largest size of one file of a directory. Default: 5GB.",
)
@click.option(
    "--basename",
    default="model",
    metavar="NAME",
    help="Name that the files of a directory begin with. Default: model.",
)
@click.option(
    "--fill",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[TREE]",
    shell_complete=complete_tree,
    help="Take weights the EMA lacks from the live tree, or TREE.",
)
@writer
@distributed
@general
def consolidate_command(path: str, out: str, fill: str | None, **options: Any) -> None:
    """Write one tree whole: OUT.safetensors, a torch file (OUT.pt), or else a Hugging Face
    directory.
    """
    from ema_ckpt.ops.consolidate import consolidate

    _run_writer(consolidate, path, out, fill=fill is not None and (fill or True), **options)


@cli.command(
    "reshard",
    cls=VerbCommand,
    examples=(
        "ema-ckpt reshard RUN on-3 --world-size 3",
        "ema-ckpt reshard RUN ema-on-8 --world-size 8 --tree ema",
    ),
)
@path_argument("path")
@path_argument("out")
@click.option("--world-size", type=int, required=True, metavar="N", help="Ranks to write for.")
@tree_option(multiple=True, help="Only this tree. Repeatable.")
@writer
@distributed
@general
def reshard_command(path: str, out: str, **options: Any) -> None:
    """Write a checkpoint as FSDP2 on N ranks would: all trees, one process, no model, no GPU."""
    from ema_ckpt.ops.convert import reshard

    _run_writer(reshard, path, out, **options)


@cli.command(
    "convert",
    cls=VerbCommand,
    examples=(
        "ema-ckpt convert RUN all.safetensors",
        "ema-ckpt convert RUN all.pt --strict",
        "ema-ckpt convert RUN on-8 --to dcp --world-size 8",
    ),
)
@path_argument("src")
@path_argument("dst")
@choice_option(
    "--to",
    "dcp|safetensors|pt",
    help="Format to write. Default: that of the suffix of DST, or DCP.",
)
@click.option(
    "--world-size",
    type=int,
    metavar="N",
    help="Ranks of a DCP target. Default: those of a source saved by several ranks, else 1.",
)
@tree_option(multiple=True, help="Only this tree. Repeatable.")
@click.option(
    "--max-shard-size",
    default="5GB",
    metavar="SIZE",
    help="Largest size of one file of a safetensors directory. Default: 5GB.",
)
@writer
@distributed
@general
def convert_command(src: str, dst: str, **options: Any) -> None:
    """Write a checkpoint in another format, all trees under their full names and nesting."""
    from ema_ckpt.ops.convert import convert

    _run_writer(convert, src, dst, **options)


@cli.command(
    "diff",
    cls=VerbCommand,
    examples=(
        "ema-ckpt diff RUN",
        "ema-ckpt diff RUN OTHER --tree ema --exit-code",
        "ema-ckpt diff RUN --top 3 --html report.html",
    ),
)
@path_argument("path")
@path_argument("other", required=False)
@tree_option(metavar="A", help="Tree to compare. Default: the only EMA, or the only live tree.")
@tree_option(
    "--against", metavar="B", help="Tree to compare it with. Default: its live tree, by name."
)
@click.option(
    "--top", type=_COUNT, default=10, metavar="K", help="Number of tensors to list. Default: 10."
)
@click.option(
    "--rtol",
    type=float,
    default=0.0,
    metavar="X",
    help="Changed means |a-b| > Y + X*|b|. Default: 0.",
)
@click.option("--atol", type=float, default=0.0, metavar="Y", help="See --rtol. Default: 0.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if anything differs.")
@click.option("--html", type=click.Path(), metavar="FILE", help="Also write a self-contained page.")
@click.option("--threads", type=int, metavar="N", help=_THREADS)
@click.option("--max-memory", metavar="SIZE", help="Memory for buffers. Default: 16MiB.")
@general
def diff_command(path: str, other: str | None, top: int, exit_code: bool, **options: Any) -> int:
    """Compare an EMA with its live weights, or two checkpoints, tensor by tensor."""
    from ema_ckpt.cli import output
    from ema_ckpt.cli.progress import progress
    from ema_ckpt.ops.diff import diff

    style = _style(options)
    with progress(style.talks, "comparing") as on_progress:
        result = diff(path, other, progress=on_progress, **options)
    output.print_result(result, style, result.warnings)
    if style.talks:
        from ema_ckpt.cli.diff_tables import print_diff

        print_diff(result, top)
    return int(exit_code and result.differs)


@cli.command(
    "verify",
    cls=VerbCommand,
    examples=(
        "ema-ckpt verify RUN",
        "ema-ckpt verify RUN --quick --manifest RUN.sha256",
        "ema-ckpt verify ema.safetensors --against RUN",
    ),
)
@path_argument("path")
@click.option(
    "--values",
    is_flag=True,
    help="Also look for NaN, infinities, all-zero tensors, absurd magnitudes.",
)
@click.option(
    "--against",
    type=click.Path(),
    metavar="SRC",
    help="The checkpoint this one was made from: compare every tensor's digest.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Read no payload: files, sizes, headers, settings. Exit code 0 if nothing is wrong.",
)
@click.option(
    "--manifest",
    type=click.Path(),
    metavar="FILE",
    help="SHA-256 of the files, as sha256sum writes it: compared if FILE is there, else written.",
)
@click.option("--check", is_flag=True, help="The manifest has to be there; it is not written.")
@ruled
@click.option("--threads", type=int, metavar="N", help=_THREADS)
@general
def verify_command(path: str, **options: Any) -> int:
    """Check structure, sizes and every stored checksum. Exit code 0 sound, 3 unproven, 1
    damaged.
    """
    from ema_ckpt.cli import output
    from ema_ckpt.cli.progress import progress
    from ema_ckpt.ops.results.verify import GateResult
    from ema_ckpt.ops.verify import verify

    style = _style(options)
    with progress(style.talks, "checking") as on_progress:
        result = verify(path, progress=on_progress, **options)
    output.print_verified(result, style)
    if isinstance(result, GateResult) and result.passes:
        return 0  # nothing that was looked at is wrong, and payload was not to be looked at
    return _VERIFY_EXIT_CODES[result.status]


def _numbers(text: str) -> tuple[float, ...]:
    """Parse numbers with commas between them."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        message = f"{text!r} is not numbers with commas between them, as in 0.5,0.5"
        raise click.BadParameter(message) from None


@cli.command(
    "synthesize",
    cls=VerbCommand,
    examples=(
        "ema-ckpt synthesize STEP_1 STEP_2 mean.safetensors --weights 0.5,0.5",
        "ema-ckpt synthesize STEP_1 STEP_2 wide.safetensors --sigma-rel 0.15",
        "ema-ckpt synthesize RUN merged.safetensors --last 2 --scheme minus-sqrt",
    ),
)
@path_argument("snapshots", nargs=-1, required=True)
@path_argument("out")
@click.option("--sigma-rel", type=float, metavar="S", help="Relative width of the average to make.")
@click.option(
    "--weights", type=_numbers, metavar="W1,W2,…", help="One for each snapshot, used as they are."
)
@click.option(
    "--sigma-rels",
    type=_numbers,
    metavar="S1,…",
    help="Widths of the snapshots, if they record none.",
)
@click.option(
    "--steps", type=_numbers, metavar="N1,…", help="Steps of the snapshots, if they record none."
)
@click.option("--last", type=int, metavar="N", help="The newest N complete steps of a run.")
@click.option(
    "--from",
    "--from-step",
    "from_step",
    type=int,
    metavar="STEP",
    help="Steps of a run from this number on.",
)
@click.option(
    "--to-step", type=int, metavar="STEP", help="Steps up to this number; --to STEP is the same."
)
@click.option(
    "--stride", type=int, default=1, metavar="K", help="Each K-th step, counted from the newest."
)
@click.option(
    "--scheme",
    metavar="NAME",
    help="Weights by position: uniform, linear, cosine, minus-sqrt or ema:DECAY. Default for the "
    "steps of a run: uniform.",
)
@tree_option(
    multiple=True, help="Tree of each snapshot. Default: its only EMA, or its only live tree."
)
@click.option(
    "--to",
    multiple=True,
    metavar="FORMAT",
    help="dcp, safetensors or pt. Default: that of the suffix of OUT, or safetensors.",
)
@click.option(
    "--world-size", type=int, default=1, metavar="N", help="Ranks of a DCP target. Default: 1."
)
@click.option(
    "--max-shard-size",
    default="5GB",
    metavar="SIZE",
    help="Largest size of one file of a safetensors directory. Default: 5GB.",
)
@writer
@general
def synthesize_command(snapshots: tuple[str, ...], out: str, **options: Any) -> None:
    """Write an average of another length from snapshots (post-hoc EMA), a merge of the steps of a
    run, or a weighted sum of checkpoints.
    """
    from ema_ckpt.ops.synthesize import synthesize

    formats, numbers = [], []
    for text in options["to"]:
        if text.isdecimal():
            numbers.append(int(text))
        else:
            formats.append(text)
    if options["to_step"] is not None:
        numbers.append(options["to_step"])
    if len(formats) > 1 or len(numbers) > 1:
        raise click.UsageError("--to takes one format, and one number of a step")
    options["to"] = formats[0] if formats else None
    options["to_step"] = numbers[0] if numbers else None
    _run_writer(synthesize, snapshots, out, **options)


def _complete_verb(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in cli.commands if name.startswith(incomplete)]


@cli.command("help", cls=VerbCommand, examples=("ema-ckpt help consolidate",))
@click.argument("verb", required=False, shell_complete=_complete_verb)
@click.pass_context
def help_command(context: click.Context, verb: str | None) -> None:
    """Show the help of a command, or of all."""
    group = context.find_root()
    if verb is None:
        click.echo(group.get_help())
        return
    command = cli.get_command(group, verb)
    if command is not None:
        click.echo(command.get_help(command.context_class(command, group, verb)))


@cli.command(
    "completion",
    cls=VerbCommand,
    examples=(
        "source <(ema-ckpt completion bash)                                # in ~/.bashrc",
        "source <(ema-ckpt completion zsh)                                 # in ~/.zshrc",
        "ema-ckpt completion fish > ~/.config/fish/completions/ema-ckpt.fish",
    ),
)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion_command(shell: str) -> None:
    """Print the script that completes commands, options, paths and names of trees in a shell."""
    from ema_ckpt.cli.completion import script

    click.echo(script(cli, shell))


class _StderrHandler(logging.Handler):
    """Print each record of the library's logger as one line."""

    def emit(self, record: logging.LogRecord) -> None:
        from ema_ckpt.cli.output import clean, fitted
        from ema_ckpt.cli.progress import clear_line

        clear_line()
        print(fitted(clean(record.getMessage()), sys.stderr), file=sys.stderr)


def run(argv: list[str]) -> int:
    """Run a command line.

    Raises:
        UsageError: `usage` for a command line that click rejects.
    """
    if COMPLETION_VARIABLE in os.environ:
        from ema_ckpt.cli.completion import answer

        return answer(cli)
    logger, handler = logging.getLogger("ema_ckpt"), _StderrHandler()
    if not {"-q", "--quiet"} & set(argv):
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        result = cli.main(argv, prog_name="ema-ckpt", standalone_mode=False)
    except SystemExit:  # click's answer to a closed pipe, whatever the mode
        raise BrokenPipeError from None
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return 2
    except click.ClickException as error:
        raise UsageError("usage", explain_usage(error)) from None
    finally:
        logger.removeHandler(handler)
    return result if isinstance(result, int) else 0
