"""Commands whose list options take several values, and the options that commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

COMPLETION_VARIABLE = "_EMA_CKPT_COMPLETE"
"""Set by a shell's script when it asks for words, to `bash_complete` and the like."""

_LIST_OPTIONS = ("--match", "--exclude", "--rename", "--keep-dtype", "--rule-values")
_OPTIONAL_VALUE = ("--fill",)


class Command(click.Command):
    """Command whose list options take several values: `--match A B`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat the flag before each value, then parse as click does."""
        required, with_value = 0, []
        for parameter in self.params:
            if isinstance(parameter, click.Argument):
                required += parameter.required
            elif isinstance(parameter, click.Option) and not parameter.is_flag:
                with_value += [flag for flag in parameter.opts if flag not in _OPTIONAL_VALUE]
        return super().parse_args(ctx, spread(args, required, with_value))


def spread(argv: Sequence[str], positionals: int, with_value: Iterable[str]) -> list[str]:
    """Repeat a flag before each of its values (`--match A B` → `--match A --match B`).

    Values beyond the first are recognised only once all positional arguments stand before the flag;
    until then a bare word is a positional argument. In the same way `--fill` takes a word only when
    no positional argument is missing.
    """
    value_flags = set(with_value)
    result: list[str] = []
    seen, list_flag = 0, ""
    words = iter(argv)
    for word in words:
        if word == "--":
            return [*result, word, *words]
        if word == "-" or not word.startswith("-"):
            result += [list_flag, word] if list_flag else [word]
            seen += not list_flag
            continue
        flag = word.partition("=")[0]
        list_flag = flag if flag in _LIST_OPTIONS and seen >= positionals else ""
        if word in _OPTIONAL_VALUE and seen < positionals:
            result.append(f"{word}=")
            continue
        result.append(word)
        if word in value_flags:
            result += islice(words, 1)
    return result


def _decorate(function: Callable[..., Any], options: Sequence[Decorator]) -> Callable[..., Any]:
    for option in reversed(options):
        function = option(function)
    return function


def complete_words(words: str) -> Callable[..., list[str]]:
    """Return what completes an option whose values are those words."""

    def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
        return [word for word in words.split("|") if word.startswith(incomplete)]

    return complete


def complete_tree(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the name of a tree from the metadata of the checkpoint that was named."""
    from ema_ckpt.cli.completion import matching_trees

    return matching_trees(ctx, param, incomplete)


def path_argument(name: str, **settings: Any) -> Decorator:
    """Return an argument that a shell completes as a path."""
    return click.argument(name, type=click.Path(), **settings)


def choice_option(flag: str, words: str, **settings: Any) -> Decorator:
    """Return an option of few values, which are checked where the library checks them."""
    return click.option(flag, metavar=words, shell_complete=complete_words(words), **settings)


def tree_option(flag: str = "--tree", metavar: str = "T", **settings: Any) -> Decorator:
    """Return an option that names a tree."""
    return click.option(flag, metavar=metavar, shell_complete=complete_tree, **settings)


def ruled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of commands that take rules for names and layouts."""
    option = click.option
    rules = "Change names and layouts by the rules of FILE, or of one that is shipped, by its name."
    values = "Numbers that the rules leave open. Repeatable."
    options: list[Decorator] = [
        option("--rules", metavar="FILE", shell_complete=complete_rules, help=rules),
        option("--rule-values", multiple=True, metavar="NAME=N", help=values),
        option("--inverse", is_flag=True, help="Apply the inverse of the rules."),
    ]
    return _decorate(function, options)


def complete_rules(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the name of shipped rules, or a path."""
    from click.shell_completion import CompletionItem

    from ema_ckpt.state_dicts.rules.rule_file import shipped_names

    words = [name for name in shipped_names() if name.startswith(incomplete)]
    paths = click.Path().shell_complete(ctx, param, incomplete)
    return [*map(CompletionItem, words), *paths]


def general(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of every command."""
    option = click.option
    options = [
        option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout."),
        option("-q", "--quiet", is_flag=True, help="Print nothing but errors."),
        option("--debug", is_flag=True, help="Show a traceback with an error."),
    ]
    return _decorate(function, options)


def distributed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option of commands whose work several processes can share."""
    text = "Share the work with the other processes that torchrun started."
    return click.option("--distributed", is_flag=True, expose_value=False, help=text)(function)


def writer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of every command that writes a checkpoint."""
    option = click.option
    match = "Write only matching names; `*` crosses dots. Repeatable."
    threads = "Maximum number of workers. Default: usable CPUs, at most 8."
    dequantize = "Write weights with scales beside them as the values they stand for."
    dtype = "Cast floating-point weights of more than eight bits. Default: keep."
    dtypes = "keep|fp32|bf16|fp16"
    resume = "Keep the partial result if this run fails, and continue one that is there."
    options: list[Decorator] = [
        option("--match", multiple=True, metavar="GLOB", help=match),
        option("--exclude", multiple=True, metavar="GLOB", help="Skip matching names. Repeatable."),
        option(
            "--rename",
            multiple=True,
            metavar="OLD=NEW",
            help="Replace a prefix of names. Repeatable.",
        ),
        choice_option("--dtype", dtypes, default="keep", help=dtype),
        choice_option("--dequantize", "bf16|fp32", help=dequantize),
        option(
            "--keep-dtype",
            multiple=True,
            metavar="GLOB",
            help="Do not cast matching names. Repeatable.",
        ),
        ruled,
        option("--threads", type=int, metavar="N", help=threads),
        option("--max-memory", metavar="SIZE", help="Memory for buffers. Default: 16MiB."),
        option("--dry-run", is_flag=True, help="Make every check and print what would be written."),
        option("--no-verify", is_flag=True, help="Do not compare checksums stored in the source."),
        option("--no-fsync", is_flag=True, help="Skip fsync (faster; not crash-safe)."),
        option("--overwrite", is_flag=True, help="Replace a checkpoint at the target."),
        option("--resume", is_flag=True, help=resume),
        option("--strict", is_flag=True, help="Fail if anything would be left out."),
        option("--expand-ties", is_flag=True, help="Write tied weights under every name."),
        option("--keep-prefixes", is_flag=True, help="Keep wrapper prefixes such as `module.`."),
    ]
    return _decorate(function, options)
