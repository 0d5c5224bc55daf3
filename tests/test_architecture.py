"""The architecture, as tables that the code is held to: layers, places for dangerous calls, sizes, start-up."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
PACKAGE = REPO / "ema_ckpt"

# The folders of the package, in the order of their layers. A folder imports itself and folders of lower layers,
# nothing else: not those beside it. docs/explanation/architecture.md shows the same table.
FOLDERS = (
    (0, "runtime"),
    (1, "core"),
    (2, "storage"),
    (2, "comm"),
    (3, "formats"),
    (3, "state_dicts"),
    (3, "ema"),
    (4, "reading"),
    (4, "discovery"),
    (5, "writing"),
    (5, "analysis"),
    (6, "ops"),
    (6, "resume"),
    (7, "cli"),
)
LAYERS = {folder: layer for layer, folder in FOLDERS}

# The training side may import torch at the top of a module; the checkpoint side, whose start-up is measured, may not.
TORCH_AT_TOP = ("ema", "resume", "comm.rendezvous", "comm.collective", "comm.channel")
# Modules that consist of arrays; what uses them imports them where it needs them.
NUMPY_AT_TOP = (
    "formats.dcp.item_columns",
    "formats.dcp.metadata_batches",
    "formats.dcp.metadata_columns",
    "formats.pickle.cursors",
)

# Where a call that is forbidden elsewhere belongs.
ALLOWED = {
    "print": ("cli",),
    "exit": ("cli", "__main__", "runtime.fork_pool"),
    "pickle": ("formats.pickle.machine",),
}

MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """`formats.dcp` for ema_ckpt/formats/dcp.py; a package's own file bears the package's name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def belongs(module: str, place: str) -> bool:
    return module == place or module.startswith(place + ".")


def folder_of(module: str) -> str:
    return module.partition(".")[0]


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a module imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and belongs(node.module or "", "ema_ckpt"):
            yield from (
                (node.lineno, origin(node.module or "", alias.name)) for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")


def origin(package: str, name: str) -> str:
    """Where `from package import name` takes it from: the module of that name, or the package itself."""
    path = REPO.joinpath(*package.split("."), name)
    if path.with_suffix(".py").exists() or path.is_dir():
        return f"{package}.{name}"
    return "version" if name == "__version__" else package


def at_top(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Imports that run when the module is imported: those outside functions and TYPE_CHECKING."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(node)
        pending.extend(ast.iter_child_nodes(node))


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "path", paths, ids=[str(path.relative_to(REPO)) for path in paths]
    )


def test_every_folder_has_its_layer_and_says_what_it_is_for() -> None:
    folders = {
        path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    assert folders == set(LAYERS)
    assert len(folders) <= 14
    for path in PACKAGE.rglob("__init__.py"):
        assert ast.get_docstring(tree_of(path)), path


def test_the_root_of_the_package_is_empty() -> None:
    assert sorted(path.name for path in PACKAGE.iterdir() if path.is_file()) == [
        "__init__.py",
        "__main__.py",
        "py.typed",
    ]


@each([path for path in MODULES if path.parent != PACKAGE])
def test_imports_point_downwards(path: Path) -> None:
    module = name_of(path)
    folder = folder_of(module)
    wrong = []
    for line, target in imported(tree_of(path)):
        if target.startswith("."):
            wrong.append(f"line {line}: relative import")
        elif target == "ema_ckpt":
            wrong.append(f"line {line}: imports from the package instead of the defining module")
        elif target.startswith("ema_ckpt."):
            other = folder_of(target.removeprefix("ema_ckpt."))
            if other != folder and LAYERS[other] >= LAYERS[folder]:
                wrong.append(
                    f"line {line}: {folder} imports {target}, which is not in a folder below it"
                )
    assert not wrong


def test_the_table_is_the_documented_one() -> None:
    text = (REPO / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    for layer, folder in FOLDERS:
        assert f"| {layer} | `{folder}` |" in text


@each(MODULES)
def test_torch_is_imported_late(path: Path) -> None:
    module = name_of(path)
    if not any(belongs(module, place) for place in TORCH_AT_TOP):
        heavy = [
            (line, name)
            for line, name in at_top(tree_of(path))
            if name.split(".")[0] in ("torch", "triton")
        ]
        assert not heavy


def forbidden(module: str, node: ast.AST) -> str | None:
    """What is wrong with a node, if it is a call or statement that belongs elsewhere."""
    if isinstance(node, ast.Assert):
        return "assert"
    if not isinstance(node, ast.Call):
        return None
    call = ast.unparse(node.func)
    if call in ("eval", "exec", "compile", "__import__", "os.system", "input"):
        return call
    if call == "torch.load":
        flags = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        return (
            None if flags.get("weights_only") == "True" else "torch.load without weights_only=True"
        )
    kinds = {
        "print": call == "print" or call.startswith(("sys.stdout.", "sys.stderr.")),
        "exit": call in ("exit", "quit", "sys.exit", "os._exit", "os.abort"),
        "pickle": call.startswith(
            ("pickle.load", "pickle.Unpickler", "_pickle.", "marshal.load", "shelve.")
        ),
    }
    for kind, found in kinds.items():
        if found and not any(belongs(module, place) for place in ALLOWED[kind]):
            return call
    return None


@each(MODULES)
def test_dangerous_calls_stay_in_their_place(path: Path) -> None:
    module = name_of(path)
    found = [
        (node.lineno, what) for node in ast.walk(tree_of(path)) if (what := forbidden(module, node))
    ]
    assert not found


def test_the_table_of_dangerous_calls_bites() -> None:
    code = (
        "assert x\nprint(1)\nsys.exit()\nexit()\npickle.load(f)\npickle.loads(b)\npickle.Unpickler(f)\n"
        "eval(s)\nexec(s)\ntorch.load(f)\ntorch.load(f, weights_only=False)"
    )
    tree = ast.parse(code)
    assert len({node.lineno for node in ast.walk(tree) if forbidden("ops.verify", node)}) == len(
        code.splitlines()
    )
    assert not any(
        forbidden("cli.main", node) for node in ast.walk(ast.parse("print(1)\nsys.exit(1)"))
    )
    assert not any(
        forbidden("x", node) for node in ast.walk(ast.parse("torch.load(f, weights_only=True)"))
    )


def test_a_safetensors_header_is_taken_apart_once() -> None:
    places = []
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
                "unpack",
                "unpack_from",
            ):
                first = node.args[0] if node.args else None
                if isinstance(first, ast.Constant) and first.value == "<Q":
                    places.append(f"{name_of(path)}:{node.lineno}")
    assert len(places) <= 1, places


@each(MODULES)
def test_modules_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 500


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from its `def` to its end, without the docstring."""
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def test_functions_are_short() -> None:
    lengths = {}
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lengths[f"{name_of(path)}.{node.name}"] = code_lines(node)
    ordered = sorted(lengths.values())
    assert ordered[len(ordered) // 2] <= 15
    long = {name: lines for name, lines in lengths.items() if lines > 40}
    assert len(long) <= 0.03 * len(lengths), long
    assert max(ordered) <= 70, long


# Functions above the limit of complexity: none may be added, none may grow.
ABOVE_LIMIT = {
    "ema.engines.cuda_kernels._block": 13,  # a Triton kernel
}


def complexity(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Cyclomatic complexity, comprehensions counted; functions defined inside count for themselves."""
    branches = (ast.If, ast.For, ast.While, ast.AsyncFor, ast.ExceptHandler, ast.IfExp)
    count, pending = 1, list[ast.AST](function.body)
    while pending:
        node = pending.pop()
        count += isinstance(node, (*branches, ast.match_case))
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        count += 1 + len(node.ifs) if isinstance(node, ast.comprehension) else 0
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            pending += ast.iter_child_nodes(node)
    return count


def test_functions_are_simple() -> None:
    wrong = {}
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name, found = f"{name_of(path)}.{node.name}", complexity(node)
                if found > ABOVE_LIMIT.get(name, 12):
                    wrong[name] = found
    assert not wrong


def test_no_module_is_a_drawer() -> None:
    drawers = {"utils", "util", "common", "helpers", "helper", "misc", "tools"}
    places = [
        path
        for top in ("ema_ckpt", "tests", "fixtures", "docs")
        for path in (REPO / top).rglob("*.py")
    ]
    assert not [
        path for path in places if path.stem.strip("_") in drawers or path.parent.name in drawers
    ]


def public(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Public functions and classes of a body; of an overloaded function only its implementation."""
    for node in body:
        named = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if named and not any("overload" in ast.unparse(mark) for mark in node.decorator_list):
            yield node


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in tree.body if isinstance(node, ast.ClassDef))


# Methods of the package's protocols: documented there, and not again in each class that has them.
PROTOCOL_METHODS = {
    method.name
    for path in MODULES
    for node in classes(tree_of(path))
    if any(ast.unparse(base).startswith("Protocol") for base in node.bases)
    for method in public(node.body)
    if ast.get_docstring(method) is not None
}


def undocumented(tree: ast.Module) -> Iterator[str]:
    if ast.get_docstring(tree) is None:
        yield "the module"
    for node in public(tree.body):
        members = public(node.body) if isinstance(node, ast.ClassDef) else []
        members = [member for member in members if member.name not in PROTOCOL_METHODS]
        yield from (
            f"{node.name}.{member.name}" for member in members if ast.get_docstring(member) is None
        )
        if ast.get_docstring(node) is None:
            yield node.name


@each([path for path in MODULES if path.stat().st_size])
def test_public_names_have_docstrings(path: Path) -> None:
    assert not list(undocumented(tree_of(path)))


@pytest.mark.parametrize(
    "module", ["ema_ckpt", "ema_ckpt.cli", "ema_ckpt.cli.main", "ema_ckpt.cli.commands"]
)
def test_start_up_is_light(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torch', 'numpy', 'rich', 'fsspec') if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_checkpoint_side_needs_no_torch() -> None:
    """Every module below the verbs, and the verbs, import on a machine where torch and numpy cannot be had."""
    names = [
        n
        for path in MODULES
        if not any(belongs(n := name_of(path), p) for p in (*TORCH_AT_TOP, *NUMPY_AT_TOP))
    ]
    sides = [name for name in names if name not in ("__init__", "__main__")]
    code = (
        "import importlib, sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = None\n"
        f"for name in {sides!r}: importlib.import_module('ema_ckpt.' + name)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
