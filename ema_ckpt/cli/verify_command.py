"""`ema-ckpt verify`."""

from __future__ import annotations

from typing import Any

import click

from ema_ckpt.cli.click_ext import Command, style_of
from ema_ckpt.cli.options import general

_EXIT_CODES = {"sound": 0, "damaged": 1, "unproven": 3}


@click.command("verify", cls=Command)
@click.argument("path")
@click.option(
    "--values",
    is_flag=True,
    help="Also look for NaN, infinities, all-zero tensors, absurd magnitudes.",
)
@click.option(
    "--against",
    metavar="SRC",
    help="The checkpoint this one was made from: compare every tensor's digest.",
)
@click.option("--threads", type=int, metavar="N", help="Workers. Default: usable CPUs, at most 8.")
@general
def verify_command(path: str, **given: Any) -> int:
    """Check structure, sizes and every stored checksum. Exit code 0 sound, 3 unproven, 1
    damaged.
    """
    from ema_ckpt.cli import output
    from ema_ckpt.ops.verify import verify

    style = output.Style(**style_of(given))
    with output.progress(style, "checking") as advance:
        result = verify(path, progress=advance, **given)
    output.verified(result, style)
    return _EXIT_CODES[result.status]
