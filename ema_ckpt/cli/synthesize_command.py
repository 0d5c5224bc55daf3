"""`ema-ckpt synthesize`."""

from __future__ import annotations

from typing import Any

import click

from ema_ckpt.cli.click_ext import Command, style_of
from ema_ckpt.cli.options import general, writer


def _numbers(text: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not numbers with commas between them, as in 0.5,0.5"
        ) from None


@click.command("synthesize", cls=Command)
@click.argument("snapshots", nargs=-1, required=True)
@click.argument("out")
@click.option(
    "--sigma-rel", type=float, metavar="S", help="Relative width of the average that is wanted."
)
@click.option(
    "--weights", type=_numbers, metavar="W1,W2,…", help="One for each snapshot, taken as they are."
)
@click.option(
    "--sigma-rels",
    type=_numbers,
    metavar="S1,…",
    help="Widths of the snapshots, if they do not tell.",
)
@click.option(
    "--steps", type=_numbers, metavar="N1,…", help="Steps of the snapshots, if they do not tell."
)
@click.option(
    "--tree", multiple=True, metavar="T", help="The tree of each snapshot. Default: its only EMA."
)
@click.option(
    "--to",
    metavar="dcp|safetensors|pt",
    help="What to write. Default: what the ending of OUT says, or safetensors.",
)
@click.option(
    "--world-size", type=int, default=1, metavar="N", help="Ranks of a DCP target. Default: 1."
)
@click.option(
    "--max-shard-size",
    default="5GB",
    metavar="SIZE",
    help="Bytes of one file of a safetensors directory. Default: 5GB.",
)
@writer
@general
def synthesize_command(snapshots: tuple[str, ...], out: str, **given: Any) -> None:
    """Write an average of another length from snapshots (post-hoc EMA), or a weighted sum of
    checkpoints.
    """
    from ema_ckpt.cli import output
    from ema_ckpt.ops.synthesize import synthesize

    style = output.Style(**style_of(given))
    with output.progress(style) as advance:
        written = synthesize(snapshots, out, progress=advance, **given)
    output.written(written, style)
