"""The public names: exactly those documented, each importable, none of them heavy before it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ema_ckpt

PACKAGE = Path(ema_ckpt.__file__).parent

VERBS = {"check", "consolidate", "convert", "diff", "inspect", "reshard", "synthesize", "verify"}
ERRORS = {
    "EmaCkptError",
    "UsageError",
    "AccessError",
    "SourceError",
    "UnsafeError",
    "TargetError",
    "CollectiveError",
    "StateError",
}
TRAINING = {
    "HalfLife", "HalfLifeFraction", "OffloadedOptimizer", "PowerFunction", "RestoreReport", "ShardedEMA",
    "Warmup", "Window", "latest", "master_weights", "offload_optimizer", "restore", "rng_state", "save",
}  # fmt: skip
PUBLIC = VERBS | ERRORS | TRAINING | {"Checkpoint", "Rules", "__version__", "load_rules", "open"}

MODULES = sorted(
    ".".join(("ema_ckpt", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    )
    for path in PACKAGE.rglob("*.py")
    if path.name != "__main__.py"
)


def test_public_names_are_the_documented_ones() -> None:
    assert set(ema_ckpt.__all__) == PUBLIC
    assert len(ema_ckpt.__all__) == len(PUBLIC)
    assert set(dir(ema_ckpt)) == PUBLIC


def test_help_begins_with_an_example_that_parses() -> None:
    """And its names are there."""
    import ast
    import textwrap

    summary, _, rest = (ema_ckpt.__doc__ or "").partition("\n\n")
    assert "\n" not in summary
    text = textwrap.dedent(rest.partition("\nNames")[0])
    assert text.startswith("import ema_ckpt\n")
    names = {n.attr for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Attribute)}
    assert {"ShardedEMA", "save", "consolidate", "open"} <= names


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_public_names_say_where_they_are_imported_from(name: str) -> None:
    value = getattr(ema_ckpt, name)
    assert (value.__module__, value.__qualname__) == ("ema_ckpt", name)


def test_public_values_are_pickled(tmp_path: Path) -> None:
    """Under the public module, so that files of the package may move."""
    import pickle

    import torch

    model = torch.nn.Linear(2, 2)
    ema = ema_ckpt.ShardedEMA(model, ema_ckpt.HalfLife(10))
    ema_ckpt.save(tmp_path / "step_1", model=model, ema=ema)
    report = ema_ckpt.restore(tmp_path / "step_1", model=model, ema=ema)
    kinds = [
        ema_ckpt.HalfLife(3),
        ema_ckpt.Warmup(0.9),
        ema_ckpt.PowerFunction(0.1),
        report,
        ema.decay,
    ]
    for value in [*kinds, ema_ckpt.Window(4), ema_ckpt.HalfLifeFraction(0.1)]:
        stored = pickle.dumps(value)
        assert pickle.loads(stored) == value
        assert b"ema_ckpt.ema" not in stored
        assert b"ema_ckpt.resume" not in stored


def test_representations_are_short(tmp_path: Path, fixtures: Path) -> None:
    import torch

    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(50)])
    ema = ema_ckpt.ShardedEMA(model, 0.9)
    rng = ema_ckpt.rng_state()
    ema_ckpt.save(tmp_path / "step_1", model=model, ema=ema, extra={"rng": rng})
    report = ema_ckpt.restore(tmp_path / "step_1", model=model, ema=ema, extra={"rng": rng})
    assert (
        repr(report)
        == f"<RestoreReport of {str(tmp_path / 'step_1')!r}: {len(report.loaded)} loaded>"
    )
    assert repr(rng) == "<RngState of rank_0>"
    with ema_ckpt.open(fixtures / "tiny-lm") as checkpoint:
        assert repr(checkpoint) == (
            f"<Checkpoint {str(fixtures / 'tiny-lm')!r}: dcp, 107 tensors, "
            "trees 'model' (live), 'ema' (ema), 'optimizer' (optimizer)>"
        )
    results = [
        ema_ckpt.inspect(fixtures / "tiny-lm"),
        ema_ckpt.diff(fixtures / "tiny-lm"),
        ema_ckpt.verify(fixtures / "tiny-lm"),
        ema_ckpt.consolidate(fixtures / "tiny-lm", tmp_path / "ema.pt", dry_run=True),
    ]
    for result in results:
        assert len(repr(result)) < 700, repr(result)
    assert "tensors=<107 items>" in repr(results[0])
    optimizer = torch.optim.AdamW(model.parameters())
    assert repr(ema_ckpt.offload_optimizer(optimizer)) == (
        "<OffloadedOptimizer: AdamW, state of 0 parameters in host memory>"
    )


def test_the_manager_shows_what_is_for_users() -> None:
    import torch

    model = torch.nn.Linear(2, 2)
    manager = ema_ckpt.ShardedEMA(model, 0.9)
    shown = {name for name in dir(manager) if name[0] != "_"}
    assert {name for name in vars(manager) if name[0] != "_"} == {"model"}  # nothing is hidden only
    assert shown == {
        "advance", "attach", "copy_to", "current_decay", "decay", "detach", "full_state_dict",
        "load_state_dict", "model", "nbytes", "nonfinite_events", "num_updates", "rebind", "reset",
        "samples_seen", "state_dict", "swap", "update", "use_distributed_checkpointing", "wait",
    }  # fmt: skip
    assert ema_ckpt.ShardedEMA(model, 0.9).decay == 0.9
    schedule = ema_ckpt.Warmup(0.99)
    assert ema_ckpt.ShardedEMA(model, schedule).decay == schedule
    handle = ema_ckpt.offload_optimizer(torch.optim.AdamW(model.parameters()))
    assert {name for name in dir(handle) if name[0] != "_"} == {"detach", "wait"}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_name_resolves(name: str) -> None:
    found = getattr(ema_ckpt, name)
    assert found is not None
    if name in ERRORS:
        assert issubclass(found, ema_ckpt.EmaCkptError)
    elif name in VERBS:
        assert callable(found)
        assert found.__name__ == name
        assert found.__doc__


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ema_ckpt.no_such_name


@pytest.mark.parametrize("name", sorted(PUBLIC & (VERBS | {"open"})))
def test_submodules_do_not_hide_public_names(name: str) -> None:
    """Importing `ema_ckpt.ops.inspect` and the like must not put a module in the place of a function."""
    code = (
        "import ema_ckpt, importlib, pkgutil\n"
        "import ema_ckpt.ops\n"
        "for m in pkgutil.iter_modules(ema_ckpt.ops.__path__): importlib.import_module('ema_ckpt.ops.' + m.name)\n"
        f"print(type(ema_ckpt.{name}).__name__)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() in ("function", "type")


def test_only_the_package_lists_its_names() -> None:
    """Everything below `ema_ckpt` is internal; what begins with `_` is also private to its module."""
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert [path for path, text in texts.items() if "__all__ = " in text] == [
        PACKAGE / "__init__.py"
    ]


def test_errors_carry_their_code_through_pickling() -> None:
    """They travel between ranks."""
    import pickle

    for name in sorted(ERRORS):
        kind = getattr(ema_ckpt, name)
        error = kind("missing-file", "gone", tensor="w", file="f")
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), back.code, str(back), back.tensor, back.file) == (
            kind,
            "missing-file",
            "gone",
            "w",
            "f",
        )


def test_version_is_the_installed_one() -> None:
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{ema_ckpt.__version__}"' in text
