"""Types as a user's checker sees them: mypy and pyright, on the examples and on the public names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ema_ckpt
from tests.test_docs import FENCE, PAGES, REPO, text_of

pytestmark = pytest.mark.slow

# A page of another package is written as its users write; names and calls of ours are checked.
PACKAGE_PAGE_TYPES = (
    "# mypy: allow-untyped-defs, allow-untyped-calls, check-untyped-defs\n"
    '# mypy: disable-error-code="override,var-annotated,arg-type,assignment,return-value"\n'
    "# pyright: basic, reportMissingImports=false, reportArgumentType=false"
)
# torch and safetensors leave some types open, packages may be missing, and a page imports again in a
# later block. Types of ours that are open are found by `--verifytypes`.
NOT_OURS = (
    "reportUnknownMemberType",
    "reportUnknownVariableType",
    "reportUnknownArgumentType",
    "reportMissingImports",
    "reportMissingTypeStubs",
    "reportDuplicateImport",
)


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """The python blocks of each page, run or not, and the scripts in docs/examples."""
    for page in PAGES:
        blocks = [m["body"] for m in FENCE.finditer(text_of(page)) if m["info"][:6] == "python"]
        if blocks and page.name != "python.md":
            head = [PACKAGE_PAGE_TYPES] if page.name.startswith("with_") else []
            (tmp_path / f"{page.stem}_page.py").write_text("\n".join(head + blocks))
    for script in (REPO / "docs" / "examples").glob("*.py"):
        shutil.copy(script, tmp_path)
    assert (tmp_path / "README_page.py").exists()
    assert len(list(tmp_path.glob("*.py"))) > 8
    return tmp_path


def run_tool(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_examples_pass_mypy(examples: Path) -> None:
    pytest.importorskip("mypy")
    # Packages that are not installed, or carry no types, count as Any here.
    foreign = ["--disable-error-code=import-not-found", "--disable-error-code=import-untyped"]
    options = ["--strict", "--allow-subclassing-any", "--follow-imports=silent", *foreign]
    options += ["--cache-dir", str(examples / "cache")]
    files = [path.name for path in examples.glob("*.py")]
    checked = run_tool("mypy", *options, *files, cwd=examples, MYPYPATH=str(REPO))
    assert checked.returncode == 0, checked.stdout


def test_examples_pass_pyright(examples: Path) -> None:
    pytest.importorskip("pyright")
    settings: dict[str, Any] = {
        "include": ["."],
        "typeCheckingMode": "strict",
        "pythonVersion": "3.11",
        "extraPaths": [str(REPO)],
        **dict.fromkeys(NOT_OURS, False),
    }
    (examples / "pyrightconfig.json").write_text(json.dumps(settings))
    checked = run_tool("pyright", "--pythonpath", sys.executable, cwd=examples)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_public_names_have_whole_types() -> None:
    """In the signatures and attributes of a public name no checker has to guess."""
    pytest.importorskip("pyright")
    options = ["--verifytypes", "ema_ckpt", "--ignoreexternal", "--outputjson"]
    # Here pyright looks for packages in the environment of the `python` that it finds.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    checked = run_tool("pyright", *options, cwd=REPO, PATH=path)
    report = json.loads(checked.stdout)["typeCompleteness"]
    assert Path(report["packageRootDirectory"]) == Path(ema_ckpt.__file__).parent
    assert report["exportedSymbolCounts"]["withUnknownType"] == 0
    found = {entry["name"]: entry for entry in report["symbols"]}
    public = {name: found[f"ema_ckpt.{name}"] for name in ema_ckpt.__all__ if name != "__version__"}
    guessed = {
        name: entry["diagnostics"]
        for name, entry in public.items()
        if entry["isTypeAmbiguous"] or not entry["isTypeKnown"]
    }
    assert not guessed
