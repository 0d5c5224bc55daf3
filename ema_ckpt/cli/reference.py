"""The command reference as Markdown, from the commands themselves: `python -m
ema_ckpt.cli.reference` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from ema_ckpt.cli.commands import cli

_HEAD = """\
# Command reference

Made by `python docs/reference.py` from the commands themselves. Exit codes: 0 done · 1 not as asked (`verify`:
damaged; `diff --exit-code`: differs) · 2 trouble · 3 `verify`: structure right, some payload has no checksum ·
130 Ctrl-C · 141 broken pipe · 143 SIGTERM · 70 a bug of ours.
"""


def reference(group: click.Group = cli, name: str = "ema-ckpt") -> str:
    """All commands of `group` with their arguments, options and help, in the order of `--help`."""
    context = group.make_context(name, [], resilient_parsing=True)
    parts = [_HEAD]
    for command_name in group.list_commands(context):
        command = group.get_command(context, command_name)
        if command is not None and not command.hidden:
            parts.append(
                "\n".join(_command(command, click.Context(command, context, command_name)))
            )
    return "\n".join(parts)


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"## {context.info_name}\n"
    yield f"```text\n{context.command_path} {usage}\n```\n"
    yield f"{(command.help or '').strip()}\n"
    yield "| option | meaning |\n|---|---|"
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is not None:
            yield f"| `{_cell(record[0])}` | {_cell(record[1])}{_default(parameter)} |"
    yield ""


def _default(parameter: click.Parameter) -> str:
    """The default, where it is a value and the help does not speak of it."""
    help_text = getattr(parameter, "help", None) or ""
    shown = isinstance(parameter.default, str | int | float) and not isinstance(
        parameter.default, bool
    )
    return f" Default: {parameter.default}." if shown and "Default" not in help_text else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
