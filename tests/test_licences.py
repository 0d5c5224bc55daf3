"""The page of licences names every package that an installation brings, as its metadata does."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PAGE = (Path(__file__).parents[1] / "docs" / "about" / "licences.md").read_text(encoding="utf-8")
# Packages of builds of torch for CUDA, of which the page has one sentence.
CUDA = re.compile(r"nvidia-.*|triton|cuda-.*")
# What older metadata calls a licence; "BSD" does not say how many clauses.
CLASSIFIERS = {
    "Apache Software License": {"Apache-2.0"},
    "BSD License": {"BSD-2-Clause", "BSD-3-Clause"},
    "MIT License": {"MIT"},
    "Python Software Foundation License": {"PSF-2.0"},
}


def table() -> dict[str, str]:
    return dict(re.findall(r"^\| ([a-z][\w-]*) \| (\S+) \| `", PAGE, re.MULTILINE))


def installed(name: str, extra: str = "") -> set[str]:
    """The package and all that it needs here, but for what is not installed."""
    found: set[str] = set()
    pending = [(name, extra)]
    while pending:
        package, wanted = pending.pop()
        for line in importlib.metadata.requires(package) or ():
            needed = Requirement(line)
            key = canonicalize_name(needed.name)
            if needed.marker and not needed.marker.evaluate({"extra": wanted}):
                continue
            if key not in found and not CUDA.fullmatch(key):
                found.add(key)
                pending.append((key, ""))
    return found


def licences_of(package: str) -> set[str]:
    """Those that its metadata names, as SPDX identifiers."""
    metadata = importlib.metadata.metadata(package)
    expression = metadata.get("License-Expression")
    if expression:
        return set(re.findall(r"[\w.+-]+", expression)) - {"AND", "OR", "WITH"}
    found: set[str] = set()
    for classifier in metadata.get_all("Classifier") or ():
        if classifier.startswith("License :: OSI Approved"):
            found |= CLASSIFIERS[classifier.rpartition(" :: ")[2]]
    assert found, f"{package}: its metadata names no licence that this test knows"
    return found


def test_every_package_has_its_licence() -> None:
    """Another Python or torch may need fewer; none is needed that the page does not name."""
    listed, needed = table(), installed("ema-ckpt", "train")
    assert {"click", "numpy", "torch"} <= needed
    assert not needed - set(listed)
    for package in needed:
        assert listed[package] in licences_of(package), package


def test_every_licence_is_among_the_compatible_ones() -> None:
    listed = PAGE.partition("compatible with Apache-2.0:")[2].partition(". Builds")[0]
    compatible = set(re.findall(r"`([^`]+)`", listed))
    assert len(compatible) > 5
    for package in installed("ema-ckpt", "train"):
        assert licences_of(package) <= compatible, package
