"""What every command is made of."""

from __future__ import annotations

from typing import Any

import click

from ema_ckpt.cli.arguments import spread


class Command(click.Command):
    """A command whose list options take several values."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Spread such values, then parse as click does."""
        positionals = sum(1 for p in self.params if isinstance(p, click.Argument) and p.required)
        valued = [
            name
            for p in self.params
            if isinstance(p, click.Option) and not p.is_flag and p.name != "fill"
            for name in p.opts
        ]
        return super().parse_args(ctx, spread(args, positionals, valued))


def style_of(given: dict[str, Any]) -> dict[str, bool]:
    """Take the general options out of `given`."""
    given.pop("debug")
    return {"json": given.pop("as_json"), "quiet": given.pop("quiet")}
