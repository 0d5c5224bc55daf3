"""Completion in shells: the script that a shell loads, and words that depend on a checkpoint."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

from ema_ckpt.cli.shared_options import COMPLETION_VARIABLE as VARIABLE

_PATHS = ("path", "other", "src", "snapshots")


def script(cli: click.Group, shell: str) -> str:
    """Return the script that makes `shell` complete `ema-ckpt`."""
    kind = get_completion_class(shell)
    if kind is None:  # a later click may know fewer
        raise click.UsageError(f"this click does not know {shell}")
    return kind(cli, {}, "ema-ckpt", VARIABLE).source()


def answer(cli: click.Group) -> int:
    """Print the words that a shell asks for; return the exit code."""
    return shell_complete(cli, {}, "ema-ckpt", VARIABLE, os.environ[VARIABLE])


def matching_trees(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the trees of the checkpoint that the command line names, with their roles.

    `--against` takes those of the second checkpoint, if there are two.
    """
    paths = list(_paths(ctx.params, ctx.args))
    if not paths:
        return []
    trees = _trees_of(paths[-1] if param.name == "against" else paths[0])
    return [CompletionItem(t, help=role) for t, role in trees if t and t.startswith(incomplete)]


def _paths(params: Mapping[str, object], args: list[str]) -> Iterator[str]:
    """Yield the sources that were named; while an option lacks its value, all are in `args`."""
    for name in _PATHS:
        value = params.get(name)
        if isinstance(value, str):
            yield value
        elif isinstance(value, tuple):
            yield from value
    yield from args


def _trees_of(path: str) -> list[tuple[str, str]]:
    """Return names and roles of the trees of a local checkpoint; none if it cannot be read."""
    from ema_ckpt.core.errors import EmaCkptError
    from ema_ckpt.discovery.opening import opened
    from ema_ckpt.state_dicts.tree import list_trees
    from ema_ckpt.storage.files import is_url

    if is_url(path):  # a key press does not wait for a network
        return []
    with contextlib.suppress(EmaCkptError, OSError), opened(os.path.expanduser(path)) as catalog:
        return [(tree.name, tree.role) for tree in list_trees(catalog)]
    return []
