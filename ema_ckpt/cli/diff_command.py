"""`ema-ckpt diff`."""

from __future__ import annotations

from typing import Any

import click

from ema_ckpt.cli.click_ext import Command, style_of
from ema_ckpt.cli.options import general


@click.command("diff", cls=Command)
@click.argument("path")
@click.argument("other", required=False)
@click.option(
    "--tree",
    metavar="A",
    help="The tree that is compared. Default: the only EMA, or the only live tree.",
)
@click.option(
    "--against",
    metavar="B",
    help="The tree that it is compared with. Default: its live tree, by name.",
)
@click.option(
    "--top", type=int, default=10, metavar="K", help="Tensors that are listed. Default: 10."
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
@click.option("--html", metavar="FILE", help="Also write a self-contained page.")
@click.option("--threads", type=int, metavar="N", help="Workers. Default: usable CPUs, at most 8.")
@click.option("--max-memory", metavar="SIZE", help="Bytes of buffers in flight. Default: 16MiB.")
@general
def diff_command(
    path: str, other: str | None, top: int, exit_code: bool, html: str | None, **given: Any
) -> int:
    """Compare an EMA with its live weights, or two checkpoints, tensor by tensor."""
    from ema_ckpt.cli import output
    from ema_ckpt.ops.diff import compare_trees, result_of

    style = output.Style(**style_of(given))
    with output.progress(style, "comparing") as advance:
        compared = compare_trees(path, other, html=html, progress=advance, **given)
    result = result_of(compared)
    if html is not None:
        from ema_ckpt.ops.diff_html import write_page

        write_page(html, result, compared.catalogs)
    if style.json:
        output.document(result)
    if style.talks:
        from ema_ckpt.cli.diff_tables import print_diff

        print_diff(result, compared, top)
    return int(exit_code and result.differs)
