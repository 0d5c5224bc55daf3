"""The documentation: links resolve, the command reference is current, examples marked `run` run."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

import ema_ckpt
from ema_ckpt.cli.commands import cli
from ema_ckpt.core.names import NAMES, SETTINGS

REPO = Path(__file__).parents[1]
ABOUT_COMMANDS = {"help", "completion"}
VERBS = ("inspect", "consolidate", "reshard", "convert", "diff", "verify", "synthesize")
PAGES = sorted(
    [REPO / "README.md", *(REPO / "docs").rglob("*.md"), *(REPO / "fixtures").glob("*.md")]
)
IDS = [str(page.relative_to(REPO)) for page in PAGES]

FENCE = re.compile(
    r"^(?P<fence>`{3,})(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)[^)]*\)")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose_of(page: Path) -> str:
    """A page without code, in which brackets mean nothing."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text_of(page)))


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def examples_of(page: Path) -> Iterator[tuple[str, str]]:
    """(language, code) of each fenced block marked `run`."""
    for found in FENCE.finditer(text_of(page)):
        language, *marks = found["info"].split()[:2] or [""]
        if marks == ["run"]:
            yield language, found["body"]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_resolve(page: Path) -> None:
    broken = []
    for found in LINK.finditer(prose_of(page)):
        path, _, anchor = found["target"].partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors_of(target)
        ):
            broken.append(found["target"])
    assert not broken


def test_every_page_is_reachable() -> None:
    """From README or index, by following links."""
    pending, seen = [REPO / "README.md", REPO / "docs" / "index.md"], set()
    while pending:
        page = pending.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        pending += [
            (page.parent / m["target"].partition("#")[0]).resolve()
            for m in LINK.finditer(prose_of(page))
        ]
    assert not set(PAGES) - seen


def test_every_page_is_in_the_navigation() -> None:
    """Of the site, and no other."""
    listed = re.findall(r"^ +- .*: (\S+\.md)$", text_of(REPO / ".mkdocs.yml"), re.MULTILINE)
    pages = (REPO / "docs").rglob("*.md")
    assert sorted(listed) == sorted(str(page.relative_to(REPO / "docs")) for page in pages)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_fences_are_closed_and_named(page: Path) -> None:
    fences = re.findall(r"^```.*$", text_of(page), re.MULTILINE)
    assert len(fences) % 2 == 0
    for found in FENCE.finditer(text_of(page)):
        words = found["info"].split()
        assert not words[1:] or words[1:] == ["run"], f"unknown mark in ```{found['info']}"
        assert words[1:] != ["run"] or words[0] in ("bash", "python"), (
            f"cannot run ```{found['info']}"
        )


def test_generated_pages_are_current(tmp_path: Path) -> None:
    for page, maker in (("cli.md", "command_reference"), ("python.md", "python_reference")):
        code = f"import sys; sys.path.insert(0, {str(REPO / 'docs')!r}); import reference as r; print(r.{maker}(), end='')"
        made = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        assert text_of(REPO / "docs" / "reference" / page) == made.stdout, (
            "run: python docs/reference.py"
        )


def test_command_line_and_library_have_the_same_options() -> None:
    """Each verb is a command and a function, and what one can be told the other can."""
    only_commands = {"as_json", "quiet", "debug", "help", "depth", "shards", "top", "exit_code"}
    only_commands |= {"distributed"}
    only_functions = {"progress"}
    assert set(cli.commands) - ABOUT_COMMANDS == {n for n in ema_ckpt.__all__ if n in VERBS}
    for name in VERBS:
        command = cli.commands[name]
        options = {parameter.name for parameter in command.params} - only_commands
        assert options == options_of(getattr(ema_ckpt, name)) - only_functions, name


def options_of(function: Callable[..., object]) -> set[str]:
    """Names of parameters; those of an unpacked typed dict among them."""
    names = set()
    for parameter in inspect.signature(function).parameters.values():
        shared = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
        names |= (
            set(function.__globals__[shared[1]].__annotations__) if shared else {parameter.name}
        )
    return names


def test_the_page_of_trees_has_the_recognised_names() -> None:
    """Of each role, those in the table are the ones that the package knows, patterns aside."""
    page = text_of(REPO / "docs" / "reference" / "trees.md")
    for role, names in NAMES.items():
        row = re.search(rf"^\| `{role}` \| (.*) \|$", page, re.MULTILINE)
        assert row is not None, role
        told = [name for name in re.findall(r"`([^`]+)`", row[1]) if "*" not in name]
        assert sorted(told) == sorted(names.split()), role
    settings = re.search(r"^Settings are (.*)\.$", page, re.MULTILINE)
    assert settings is not None
    assert set(re.findall(r"`([^`]+)`", settings[1])) == SETTINGS


def test_every_code_has_its_row() -> None:
    """Of the codes that the package raises, warns with or finds, each has cause and remedy."""
    page = text_of(REPO / "docs" / "reference" / "errors.md")
    told = set(re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE))
    assert codes_of(REPO / "ema_ckpt") - told == set()


def codes_of(package: Path) -> set[str]:
    """First arguments of errors, diagnostics and problems, where they are literals."""
    makers = {"Diagnostic", "Problem", "Finding", "report", "warn", "replace"}
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = node.args[0]
            word = first.value if isinstance(first, ast.Constant) else None
            if not isinstance(word, str) or not (name in makers or name.endswith("Error")):
                continue
            if re.fullmatch(r"[a-z]+(-[a-z]+)*", word):
                found.add(word)
    return found


def test_each_yes_of_the_comparison_has_its_test() -> None:
    """In our column, the second, and every test that is linked is there."""
    page = text_of(REPO / "docs" / "about" / "comparison.md")
    shown = dict(re.findall(r'^\[(\w+)\]: \.\./\.\./\S+ "(.*)"$', page, re.MULTILINE))
    used = set()
    for row in re.findall(r"^\| .*", page.partition("## Averages")[2], re.MULTILINE):
        ours = row.split(" | ")[1]
        used |= set(re.findall(r"\]\[(\w+)\]", ours))
        assert "yes" not in re.sub(r"\[yes\]\[\w+\]", "", ours), row
    assert used == set(shown)
    assert len(used) > 30
    for path, name in (test.split("::") for test in shown.values()):
        assert f"]: ../../{path} " in page
        assert re.search(rf"^def {name}\(", text_of(REPO / path), re.MULTILINE), (path, name)


def test_everything_has_help() -> None:
    for name, command in cli.commands.items():
        assert command.help, name
        assert not [
            option.name
            for option in command.params
            if isinstance(option, click.Option) and not option.help
        ]


RUNNABLE = [page for page in PAGES if any(examples_of(page))]


@pytest.mark.parametrize("page", RUNNABLE, ids=[str(page.relative_to(REPO)) for page in RUNNABLE])
def test_examples_run(page: Path, fixtures: Path, tmp_path: Path) -> None:
    """All of a page in one directory, in order; python blocks share one namespace, as a reader would type them."""
    for step in ("step_500", "step_1000"):
        shutil.copytree(fixtures / "dcp" / "fsdp2-w4", tmp_path / "runs" / step)
    environment = command_on_path(tmp_path)
    typed = ""
    for language, code in examples_of(page):
        if language == "python":
            typed += code
            command = [sys.executable, "-W", "error", "-c", typed]
        else:
            command = ["bash", "-euo", "pipefail", "-c", code]
        ended = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == 0, f"{code}\n{ended.stdout}{ended.stderr}"


def command_on_path(tmp_path: Path) -> dict[str, str]:
    """An environment in which `ema-ckpt` is this checkout's."""
    binaries = tmp_path / ".bin"
    binaries.mkdir()
    (binaries / "ema-ckpt").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ema_ckpt "$@"\n')
    (binaries / "ema-ckpt").chmod(0o755)
    (binaries / "python").symlink_to(sys.executable)
    return {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPO),
        "NO_COLOR": "1",
    }
