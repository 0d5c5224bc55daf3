"""The commands: parse, call the verb, render, exit code. Nothing is decided here."""

from __future__ import annotations

import logging
import sys
from typing import Any

import click

from ema_ckpt import __version__
from ema_ckpt.cli.click_ext import Command, style_of
from ema_ckpt.cli.diff_command import diff_command
from ema_ckpt.cli.options import general, writer
from ema_ckpt.cli.synthesize_command import synthesize_command
from ema_ckpt.cli.text import clean
from ema_ckpt.cli.verify_command import verify_command
from ema_ckpt.core.errors import UsageError

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=_CONTEXT)
@click.version_option(__version__, prog_name="ema-ckpt")
def cli() -> None:
    """Inspect, consolidate and convert sharded checkpoints by moving byte ranges. Executes nothing
    in them.
    """


@cli.command("inspect", cls=Command)
@click.argument("path")
@click.option("--tree", metavar="T", help="Only this tree, or what is below this dotted path.")
@click.option("--match", multiple=True, metavar="GLOB", help="Only names that fit. Repeatable.")
@click.option(
    "--depth", type=int, metavar="N", help="Levels of the module tree that are shown. Default: 2."
)
@click.option("--shards", is_flag=True, help="Show which file holds which rows.")
@general
def inspect_command(
    path: str,
    tree: str | None,
    match: tuple[str, ...],
    depth: int | None,
    shards: bool,
    **general: Any,
) -> None:
    """Show trees, tensors, shards, EMA settings. Reads metadata, and of data files only the
    settings of EMA trees.
    """
    from ema_ckpt.cli import output
    from ema_ckpt.ops.inspect import inspect

    output.inspected(
        inspect(path, tree, match), output.Style(**style_of(general)), tree, depth, shards
    )


@cli.command("consolidate", cls=Command)
@click.argument("path")
@click.argument("out")
@click.option(
    "--tree", metavar="T", help="The tree to take. Default: the only EMA, or the only live tree."
)
@click.option(
    "--max-shard-size",
    default="5GB",
    metavar="SIZE",
    help="Bytes of one file of a directory. Default: 5GB.",
)
@click.option(
    "--basename",
    default="model",
    metavar="NAME",
    help="How the files of a directory begin. Default: model.",
)
@click.option(
    "--fill",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[TREE]",
    help="Take weights the EMA lacks from the live tree, or TREE.",
)
@writer
@general
def consolidate_command(path: str, out: str, fill: str | None, **given: Any) -> None:
    """Write one tree whole: OUT.safetensors, a torch file (OUT.pt), or else a Hugging Face
    directory.
    """
    from ema_ckpt.cli import output
    from ema_ckpt.ops.consolidate import consolidate

    style = output.Style(**style_of(given))
    with output.progress(style) as advance:
        written = consolidate(
            path, out, fill=fill is not None and (fill or True), progress=advance, **given
        )
    output.written(written, style)


@cli.command("reshard", cls=Command)
@click.argument("path")
@click.argument("out")
@click.option("--world-size", type=int, required=True, metavar="N", help="Ranks to write for.")
@click.option("--tree", multiple=True, metavar="T", help="Only this tree. Repeatable.")
@writer
@general
def reshard_command(path: str, out: str, **given: Any) -> None:
    """Write a checkpoint as FSDP2 on N ranks would: all trees, one process, no model, no GPU."""
    from ema_ckpt.cli import output
    from ema_ckpt.ops.convert import reshard

    style = output.Style(**style_of(given))
    with output.progress(style) as advance:
        written = reshard(path, out, progress=advance, **given)
    output.written(written, style)


@cli.command("convert", cls=Command)
@click.argument("src")
@click.argument("dst")
@click.option(
    "--to",
    metavar="dcp|safetensors|pt",
    help="What to write. Default: what the ending of DST says, or DCP.",
)
@click.option(
    "--world-size",
    type=int,
    metavar="N",
    help="Ranks of a DCP target. Default: those of a source saved by several ranks, else 1.",
)
@click.option("--tree", multiple=True, metavar="T", help="Only this tree. Repeatable.")
@click.option(
    "--max-shard-size",
    default="5GB",
    metavar="SIZE",
    help="Bytes of one file of a safetensors directory. Default: 5GB.",
)
@writer
@general
def convert_command(src: str, dst: str, **given: Any) -> None:
    """Write a checkpoint in another format, all trees under their full names and nesting."""
    from ema_ckpt.cli import output
    from ema_ckpt.ops.convert import convert

    style = output.Style(**style_of(given))
    with output.progress(style) as advance:
        written = convert(src, dst, progress=advance, **given)
    output.written(written, style)


cli.add_command(diff_command)
cli.add_command(verify_command)
cli.add_command(synthesize_command)


class _ToStderr(logging.Handler):
    """Print what the library logs, one line a record."""

    def emit(self, record: logging.LogRecord) -> None:
        print(clean(record.getMessage()), file=sys.stderr)


def run(argv: list[str]) -> int:
    """Run a command line.

    Raises:
        UsageError: `usage` for what click refuses.
    """
    logger, handler = logging.getLogger("ema_ckpt"), _ToStderr()
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
        context = getattr(error, "ctx", None)
        hint = f"; try `{context.command_path} --help`" if context is not None else ""
        raise UsageError("usage", f"{error.format_message().rstrip('.')}{hint}") from None
    finally:
        logger.removeHandler(handler)
    return result if isinstance(result, int) else 0
