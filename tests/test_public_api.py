"""The public names: exactly those documented, each importable, none of them heavy before it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ema_ckpt

PACKAGE = Path(ema_ckpt.__file__).parent

VERBS = {"consolidate", "convert", "diff", "inspect", "reshard", "synthesize", "verify"}
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
PUBLIC = VERBS | ERRORS | TRAINING | {"Checkpoint", "__version__", "open"}

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
    assert not PUBLIC - set(dir(ema_ckpt))


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
