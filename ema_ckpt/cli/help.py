"""What `--help` shows: options in groups, examples; and the nearest right word of a wrong one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import click

from ema_ckpt.cli.shared_options import Command

OPTION_GROUPS = (
    ("What to take", "tree against match exclude fill"),
    ("Which steps", "last from_step to_step stride"),
    ("How to average", "sigma_rel weights sigma_rels steps scheme"),
    ("What to compare", "quick manifest check values rtol atol"),
    ("Names and layouts", "rules rule_values inverse rename keep_prefixes expand_ties"),
    ("Casting", "dtype keep_dtype dequantize"),
    ("Output", "to world_size max_shard_size basename html"),
    ("Safety", "dry_run overwrite resume strict no_verify no_fsync"),
    ("Speed and memory", "threads max_memory distributed"),
    ("What to print", "depth shards top exit_code as_json quiet debug"),
)
"""Headings of `--help`, and the names of the options below each; click's own go to the last."""

_MAX_FLAGS_WIDTH = 28
_OTHER_WORDS = {
    "average": "synthesize",
    "check": "verify",
    "compare": "diff",
    "export": "consolidate",
    "info": "inspect",
    "list": "inspect",
    "ls": "inspect",
    "merge": "consolidate",
    "show": "inspect",
    "split": "reshard",
    "validate": "verify",
}


class VerbCommand(Command):
    """Verb whose help has its options in groups, and ends with examples."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.examples = tuple(examples)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each group of options under its heading, all in the same columns."""
        groups = []
        width = 0
        for heading, options in grouped_options(self, ctx):
            records = [option.get_help_record(ctx) for option in options]
            rows = list(filter(None, records))
            groups.append((heading, rows))
            width = max(width, *(len(flags) for flags, _ in rows), 0)
        first = min(width, _MAX_FLAGS_WIDTH)
        for heading, rows in groups:
            padded = [(flags.ljust(first), text) for flags, text in rows]
            with formatter.section(heading):
                formatter.write_dl(padded)

    def format_epilog(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        write_examples(formatter, self.examples)


def write_examples(formatter: click.HelpFormatter, examples: Sequence[str]) -> None:
    """Write examples, one a line, never wrapped: they are to be copied."""
    if examples:
        with formatter.section("Examples"):
            for example in examples:
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


def grouped_options(
    command: click.Command, ctx: click.Context
) -> list[tuple[str, list[click.Option]]]:
    """Return headings, with the options below each, in the order of definition."""
    headings: dict[str, str] = {}
    groups: dict[str, list[click.Option]] = {}
    for heading, names in OPTION_GROUPS:
        groups[heading] = []
        headings.update(dict.fromkeys(names.split(), heading))
    last_heading = OPTION_GROUPS[-1][0]
    for param in command.get_params(ctx):
        if isinstance(param, click.Option):
            heading = headings.get(param.name or "", last_heading)
            groups[heading].append(param)
    return [(heading, options) for heading, options in groups.items() if options]


class VerbGroup(click.Group):
    """Group that lists its commands as they were defined, and names the nearest for a wrong one."""

    examples = (
        "ema-ckpt inspect RUN",
        "ema-ckpt consolidate RUN ema.safetensors",
        "ema-ckpt help consolidate",
    )

    def format_epilog(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, and what RUN stands for."""
        write_examples(formatter, self.examples)
        formatter.write_paragraph()
        formatter.write_text(
            "RUN is a checkpoint, or a directory of steps: the newest complete one is read."
        )

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - as click calls it
        """Return names in the order of definition: looking first, writing then."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first sentence of each command's help, wrapped and never cut."""
        rows = [(name, summary(self.commands[name])) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def verbs_take(self, option: str) -> bool:
        """Whether an option is one of a command's."""
        return any(option in _options_of(command) for command in self.commands.values())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name.

        Raises:
            click.UsageError: there is none; the message names the nearest.
        """
        command = super().get_command(ctx, cmd_name)
        if command is None and not ctx.resilient_parsing and not cmd_name.startswith("-"):
            near = _OTHER_WORDS.get(cmd_name) or nearest_word(cmd_name, self.commands)
            names = ", ".join(self.commands)
            hint = f"did you mean {near!r}?" if near else f"there are {names}"
            raise click.UsageError(f"No such command {cmd_name!r}: {hint}", ctx)
        return command


def summary(command: click.Command) -> str:
    """Return the first sentence of a command's help."""
    text = " ".join((command.help or "").split())
    return text.partition(". ")[0].rstrip(".") + "."


def _options_of(command: click.Command | None) -> list[str]:
    params = command.params if command else []
    return list(chain.from_iterable(param.opts for param in params))


def nearest_word(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that looks most like `word`, if one does."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(word.lower(), list(known), n=1)), None)


def explain_usage(error: click.ClickException) -> str:
    """Return the message of an error of click, which names the nearest option and the help."""
    message = " ".join(error.format_message().split()).rstrip(".")
    if isinstance(error, click.NoSuchOption):
        message = f"No such option {error.option_name!r}"
        command = error.ctx.command if error.ctx else None
        near = nearest_word(error.option_name, _options_of(command))
        if isinstance(command, VerbGroup) and command.verbs_take(error.option_name):
            message += ": options of a command follow its name"
        elif near:
            message += f": did you mean {near}?"
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    separator = "" if message.endswith("?") else ";"
    return f"{message}{separator} try `{context.command_path} --help`"
