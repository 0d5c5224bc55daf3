"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _apply(function: Callable[..., Any], options: Sequence[Decorator]) -> Callable[..., Any]:
    for option in reversed(options):
        function = option(function)
    return function


def general(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every command."""
    return _apply(
        function,
        [
            click.option(
                "--json", "as_json", is_flag=True, help="Print one JSON document on stdout."
            ),
            click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors."),
            click.option("--debug", is_flag=True, help="Show a traceback with an error."),
        ],
    )


def writer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every command that writes a checkpoint."""
    many: dict[str, Any] = {"multiple": True, "metavar": "GLOB"}
    return _apply(
        function,
        [
            click.option(
                "--match", **many, help="Only names that fit; `*` crosses dots. Repeatable."
            ),
            click.option("--exclude", **many, help="Not the names that fit. Repeatable."),
            click.option(
                "--rename",
                multiple=True,
                metavar="OLD=NEW",
                help="Replace a prefix of names. Repeatable.",
            ),
            click.option(
                "--dtype",
                default="keep",
                metavar="keep|fp32|bf16|fp16",
                help="Cast floating-point weights. Default: keep.",
            ),
            click.option(
                "--keep-dtype", **many, help="Do not cast the names that fit. Repeatable."
            ),
            click.option(
                "--threads",
                type=int,
                metavar="N",
                help="Workers, as far as they find work. Default: usable CPUs, at most 8.",
            ),
            click.option(
                "--max-memory", metavar="SIZE", help="Bytes of buffers in flight. Default: 16MiB."
            ),
            click.option(
                "--dry-run", is_flag=True, help="Make every check and print what would be written."
            ),
            click.option(
                "--no-verify", is_flag=True, help="Do not compare checksums stored in the source."
            ),
            click.option("--no-fsync", is_flag=True, help="Do not wait for the disk."),
            click.option("--overwrite", is_flag=True, help="Replace a checkpoint at the target."),
            click.option(
                "--resume",
                is_flag=True,
                help="Keep the partial result if this run fails, and go on with one that is there.",
            ),
            click.option("--strict", is_flag=True, help="Fail if anything would be left out."),
            click.option(
                "--expand-ties", is_flag=True, help="Write tied weights under every name."
            ),
            click.option(
                "--keep-prefixes", is_flag=True, help="Keep wrapper prefixes such as `module.`."
            ),
        ],
    )
