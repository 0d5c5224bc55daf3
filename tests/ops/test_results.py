"""`dataclasses.asdict` of a result is the document of the command, field for field."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ema_ckpt
from tests.stories.commands import Commands

FIXTURES = Path(__file__).parents[2] / "fixtures"
PLAIN = FIXTURES / "safetensors/net-and-ema.safetensors"
QUANTIZED = FIXTURES / "quantized/fp8-blocks"
RULES = '[[rule]]\nfrom = "{name:.*}"\nto = "net.{name}"\n'


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    started = Commands(tmp_path / "marker")
    yield started
    started.close()


def documents(folder: Path) -> dict[str, tuple[Any, list[str]]]:
    """A result of each kind, and the arguments of the command that gives it."""
    rules = folder / "rules.toml"
    rules.write_text(RULES)
    dtypes = FIXTURES / "safetensors/dtypes.safetensors"
    results: dict[str, tuple[Any, list[str]]] = {
        "inspect": (ema_ckpt.inspect(PLAIN), [str(PLAIN)]),
        "inspect quantized": (ema_ckpt.inspect(QUANTIZED), [str(QUANTIZED)]),
        "verify": (ema_ckpt.verify(PLAIN), [str(PLAIN)]),
        "verify quick": (ema_ckpt.verify(PLAIN, quick=True), [str(PLAIN), "--quick"]),
        "diff": (ema_ckpt.diff(PLAIN), [str(PLAIN)]),
        "diff quantized": (ema_ckpt.diff(QUANTIZED, QUANTIZED), [str(QUANTIZED), str(QUANTIZED)]),
    }
    out = str(folder / "out.safetensors")
    options: dict[str, dict[str, Any]] = {
        "consolidate": {},
        "consolidate rules": {"rules": str(rules)},
        "consolidate quantized": {"dequantize": "bf16"},
        "consolidate both": {"dequantize": "bf16", "rules": str(rules)},
    }
    for name, kwargs in options.items():
        source = str(QUANTIZED if "dequantize" in kwargs else dtypes)
        flags = [item for key, value in kwargs.items() for item in (f"--{key}", value)]
        result = ema_ckpt.consolidate(source, out, overwrite=True, **kwargs)
        results[name] = result, [source, out, "--overwrite", *flags]
    result = ema_ckpt.synthesize([PLAIN, PLAIN], out, weights=[0.5, 0.5], overwrite=True)
    flags = [str(PLAIN), str(PLAIN), out, "--weights", "0.5,0.5", "--overwrite"]
    results["synthesize"] = result, flags
    result = ema_ckpt.synthesize(
        [PLAIN, PLAIN], out, weights=[0.5, 0.5], overwrite=True, rules=rules
    )
    results["synthesize rules"] = result, [*flags, "--rules", str(rules)]
    return results


def test_asdict_is_the_document(tmp_path: Path, commands: Commands) -> None:
    fields: set[str] = set()
    for name, (result, args) in documents(tmp_path).items():
        done = commands.run(name.split()[0], *args, "--json")
        document = json.loads(done.stdout)
        found = json.loads(json.dumps(dataclasses.asdict(result)))
        assert list(found) == list(document), name
        found.pop("seconds", None)
        document.pop("seconds", None)
        assert found == document, name
        fields |= set(found)
    assert {"quantized", "rules", "dequantized", "dequantized_a", "snapshots", "quick"} <= fields


@pytest.mark.parametrize("again", [lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy])
def test_results_are_pickled_and_copied(tmp_path: Path, again: Any) -> None:
    for name, (result, _) in documents(tmp_path).items():
        copied = again(result)
        assert copied == result, name
        assert repr(copied) == repr(result)
        assert type(copied) is type(result)
        with pytest.raises(dataclasses.FrozenInstanceError):
            copied.warnings = ()


def test_what_a_result_lacks_is_none() -> None:
    assert ema_ckpt.inspect(PLAIN).quantized is None
    result = ema_ckpt.diff(PLAIN)
    assert (result.same_bits, result.dequantized_a) == (None, None)
    assert "None" not in repr(result)
    assert isinstance(ema_ckpt.inspect(QUANTIZED), type(ema_ckpt.inspect(PLAIN)))
