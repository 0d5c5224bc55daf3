"""Write the generated pages anew, from the code: `python docs/reference.py`. A test keeps them
current.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ForwardRef, is_typeddict

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

import click  # noqa: E402

import ema_ckpt  # noqa: E402
from ema_ckpt.cli.commands import cli  # noqa: E402
from ema_ckpt.cli.help import grouped_options  # noqa: E402

PYTHON_HEAD = """\
# Python reference

Made by `python docs/reference.py`. Every name here is imported from `ema_ckpt`; heavy modules are
loaded when a name is first used. Errors derive from `EmaCkptError` and carry a `code`.
"""


def python_reference() -> str:
    """Signature and docstring of every public name, functions first, then classes, then errors."""
    public = {
        name: getattr(ema_ckpt, name) for name in ema_ckpt.__all__ if not name.startswith("_")
    }
    for value in list(public.values()):
        public |= shared_options(value)
    names = sorted(public, key=lambda name: (rank(public[name]), name.lower()))
    return "\n".join([PYTHON_HEAD, *("\n".join(entry(name, public[name])) for name in names)])


def shared_options(value: object) -> dict[str, object]:
    """Typed dicts that a function unpacks into keyword arguments: options that several functions
    have.
    """
    annotations = [str(annotation) for annotation in getattr(value, "__annotations__", {}).values()]
    names = [
        found[1]
        for annotation in annotations
        if (found := re.fullmatch(r"Unpack\[(\w+)\]", annotation))
    ]
    return {name: value.__globals__[name] for name in names}  # type: ignore[attr-defined]


def rank(value: object) -> int:
    """Where a kind of name stands on the page."""
    if not isinstance(value, type):
        return 0
    return 2 if issubclass(value, BaseException) else 1


def entry(name: str, value: object) -> Iterator[str]:
    """The section of one public name; of a class, its public methods and properties too."""
    yield f"## {name}\n"
    if is_typeddict(value):
        fields = "\n".join(
            f"{field}: {told_type(kind)}" for field, kind in vars(value)["__annotations__"].items()
        )
        yield f"```python\n{fields}\n```\n"
    elif rank(value) < 2:
        yield f"```python\n{signature(name, value)}\n```\n"
    yield prose(value)
    if rank(value) == 1 and not is_typeddict(value):
        for member_name, member in vars(value).items():
            if not member_name.startswith("_") and (
                callable(member) or isinstance(member, property)
            ):
                shown = (
                    member_name if isinstance(member, property) else signature(member_name, member)
                )
                yield f"`.{shown}`\n"
                yield prose(member)


def signature(name: str, value: object) -> str:
    """`name(parameters)`, over several lines if it would be long."""
    found = inspect.signature(value)  # type: ignore[arg-type]
    parts: list[str] = []
    named = False
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not named:
            parts.append("*")
        named = parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        parts.append(told(parameter))
    result = "" if found.return_annotation is found.empty else f" -> {found.return_annotation}"
    flat = f"{name}({', '.join(parts)}){result}"
    return (
        flat
        if len(flat) <= 100
        else "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){result}"])
    )


def told(parameter: inspect.Parameter) -> str:
    """`name: annotation = default`, annotations as they are written in the source."""
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    annotation = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{stars}{parameter.name}{annotation}{default}"


def told_type(kind: object) -> str:
    """An annotation as it is written in the source."""
    return kind.__forward_arg__ if isinstance(kind, ForwardRef) else str(kind)


def prose(value: object) -> str:
    """A docstring as it stands, so that its own layout is kept."""
    text = inspect.getdoc(value) or ""
    head, _, rest = text.partition("\n\n")
    return f"{head}\n" + (f"\n```text\n{rest}\n```\n" if rest else "")


CLI_HEAD = """\
# Command reference

Made by `python docs/reference.py` from the commands themselves. `ema-ckpt help VERB` and
`ema-ckpt VERB --help` print the same in a terminal.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | not as asked: `verify` found damage, `diff --exit-code` found a difference |
| 2 | trouble: wrong usage, unreadable, unsafe, incomplete, target exists, no space |
| 3 | `verify` without `--quick`: the structure is right, some payload carries no checksum |
| 70 | a bug of `ema-ckpt` |
| 129, 130, 143 | stopped by SIGHUP (the terminal was closed), by Ctrl-C, by SIGTERM |
| 141 | what reads the output went away |

What each error code means: [Error codes](errors.md). Sizes are written `5GB` (1000³ bytes) or
`16MiB` (1024² bytes). PATH and RUN may be a checkpoint, the directory above it, or an fsspec URL;
what is written may go to a URL as well ([Object stores](../how_to/object_stores.md)).
"""
WRITERS = ("consolidate", "reshard", "convert", "synthesize")


def command_reference(group: click.Group = cli, name: str = "ema-ckpt") -> str:
    """All commands with arguments, options and help; options that several have are told once."""
    context = group.make_context(name, [], resilient_parsing=True)
    verbs = [command for command in group.commands.values() if command.name not in ABOUT]
    writers = [group.commands[writer] for writer in WRITERS]
    of_all = shared_names(verbs)
    of_writers = shared_names(writers)
    parts = [CLI_HEAD]
    for command_name, command in group.commands.items():
        told = of_writers if command_name in WRITERS else of_all
        inner = click.Context(command, context, command_name)
        parts.append(
            "\n".join(command_section(command, inner, told if command in verbs else set()))
        )
    inner = click.Context(writers[0], context, WRITERS[0])
    parts.append(
        "\n".join(shared_section("Options of all writing commands", inner, of_writers - of_all))
    )
    parts.append("\n".join(shared_section("Options of all commands", inner, of_all)))
    return "\n".join(parts)


ABOUT = ("help", "completion")


def shared_names(commands: list[click.Command]) -> set[str | None]:
    """Names of the options that all of these commands have with the same help."""
    found = [
        {
            (option.name, option.help)
            for option in command.params
            if isinstance(option, click.Option)
        }
        for command in commands
    ]
    return {name for name, _ in set.intersection(*found)}


def command_section(
    command: click.Command, context: click.Context, told: set[str | None]
) -> Iterator[str]:
    """Usage, help, examples, and the options that are not in `told`."""
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"## {context.info_name}\n"
    yield f"```text\n{context.command_path} {usage}\n```\n"
    yield f"{' '.join((command.help or '').split())}\n"
    examples = getattr(command, "examples", ())
    if examples:
        yield "```bash\n" + "\n".join(examples) + "\n```\n"
    yield from option_table(command, context, lambda name: name not in told)
    if context.info_name in WRITERS:
        yield "And the [options of all writing commands](#options-of-all-writing-commands).\n"


def shared_section(title: str, context: click.Context, names: set[str | None]) -> Iterator[str]:
    """The options of several commands, under a heading of their own."""
    yield f"## {title}\n"
    if title.startswith("Options of all writing"):
        yield f"{', '.join(f'`{name}`' for name in WRITERS)} have them.\n"
    yield from option_table(context.command, context, lambda name: name in names)


def option_table(
    command: click.Command, context: click.Context, is_told: Callable[[str | None], bool]
) -> Iterator[str]:
    """Options in the groups of `--help`."""
    rows = []
    names = {option.name for option in command.params if is_told(option.name)}
    for heading, options in grouped_options(command, context):
        shown = [option for option in options if option.name in names]
        for index, option in enumerate(shown):
            record = option.get_help_record(context) or ("", "")
            flags, text = (" ".join(part.split()).replace("|", "\\|") for part in record)
            group = "" if index else heading
            rows.append(f"| {group} | `{flags}` | {text}{default_of(option)} |")
    if rows:
        yield "\n".join(["| | option | meaning |", "|---|---|---|", *rows])
        yield ""


def default_of(option: click.Parameter) -> str:
    """The default, if it is a value and the help text does not name it."""
    is_value = isinstance(option.default, str | int | float)
    if not is_value or isinstance(option.default, bool):
        return ""
    help_text = getattr(option, "help", None) or ""
    return "" if "Default" in help_text else f" Default: {option.default}."


if __name__ == "__main__":
    (DOCS / "reference" / "cli.md").write_text(command_reference(), encoding="utf-8")
    (DOCS / "reference" / "python.md").write_text(python_reference(), encoding="utf-8")
