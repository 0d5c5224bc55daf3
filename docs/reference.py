"""Write the generated pages anew, from the code: `python docs/reference.py`. A test keeps them
current.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ForwardRef, is_typeddict

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

import click  # noqa: E402

import ema_ckpt  # noqa: E402
from ema_ckpt.cli.commands import cli  # noqa: E402

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

Made by `python docs/reference.py` from the commands themselves. Exit codes: 0 done · 1 check failed
(`verify`: damaged; `diff --exit-code`: differs) · 2 error · 3 `verify`: structure right, some
payload has no checksum · 130 Ctrl-C · 141 broken pipe · 143 SIGTERM · 70 internal error.
"""


def command_reference(group: click.Group = cli, name: str = "ema-ckpt") -> str:
    """All commands with their arguments, options and help, in the order of `--help`."""
    context = group.make_context(name, [], resilient_parsing=True)
    parts = [CLI_HEAD]
    for command_name in group.list_commands(context):
        command = group.get_command(context, command_name)
        if command is not None and not command.hidden:
            section = command_section(command, click.Context(command, context, command_name))
            parts.append("\n".join(section))
    return "\n".join(parts)


def command_section(command: click.Command, context: click.Context) -> Iterator[str]:
    """Usage, help and options of one command."""
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"## {context.info_name}\n"
    yield f"```text\n{context.command_path} {usage}\n```\n"
    yield f"{(command.help or '').strip()}\n"
    yield "| option | meaning |\n|---|---|"
    for option in command.get_params(context):
        record = option.get_help_record(context) if isinstance(option, click.Option) else None
        if record is not None:
            flags, text = (" ".join(part.split()).replace("|", "\\|") for part in record)
            yield f"| `{flags}` | {text}{default_of(option)} |"
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
