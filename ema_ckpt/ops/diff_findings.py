"""Findings of `diff`: what the statistics mean and what to do. None if all is well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ema_ckpt.analysis.compare import PairStats
from ema_ckpt.core.catalog import Catalog, Diagnostic, Object, Tensor
from ema_ckpt.core.names import EMA, LIVE
from ema_ckpt.core.text import counted, shown
from ema_ckpt.ops.diff_pairing import Pairing, Side
from ema_ckpt.reading.box_reader import BoxReader, locate
from ema_ckpt.state_dicts.ema_config import swap_marks
from ema_ckpt.state_dicts.ema_health import copied_because, find_stalled, known_config

_UNRELATED_COSINE = 0.5
_UNRELATED_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class ComparedTrees:
    """Two trees and the statistics of their pairs, by name; `is_pair` if b is a's live tree."""

    a: Side
    b: Side
    pairing: Pairing
    stats: Mapping[str, PairStats]
    is_pair: bool

    @property
    def same_bits(self) -> bool:
        """Whether all pairs are equal bit for bit, and no shape differs."""
        equal = all(stats.same_bits for stats in self.stats.values())
        return equal and not self.pairing.mismatched

    @property
    def has_floats(self) -> bool:
        """Whether any pair holds floating-point or complex elements."""
        return any(
            not tensor.dtype.is_discrete and tensor.numel for _, tensor, _ in self.pairing.pairs
        )


def find_all(compared: ComparedTrees) -> tuple[Diagnostic, ...]:
    """Return all findings, the gravest first."""
    findings: list[Diagnostic] = []
    if compared.a.tree.role == EMA:
        findings += [*swapped(compared.a), *unrelated(compared)]
    averages = [side for side in (compared.a, compared.b) if side.tree.role == EMA]
    for side in averages:
        findings += find_stalled(side.catalog, side.tree)
    findings += equal_to_live(compared)
    findings += non_finite(compared)
    for side in averages:
        findings += low_precision(side)
    findings += unpaired_names(compared)
    return tuple(dict.fromkeys(findings))  # both sides may be the same tree


def _where(side: Side) -> str:
    return f"{side.tree.name or 'the root'!r} of {side.catalog.resolved}"


def swapped(side: Side) -> Iterator[Diagnostic]:
    """Look for a mark that live weights and averages were swapped when the checkpoint was saved."""
    for item in swap_marks(side.catalog, side.trees):
        if is_set(side.catalog, item):
            message = (
                f"{side.catalog.resolved} is marked as swapped ({item.name!r}): its EMA tree "
                f"{side.tree.name!r} holds the live weights and its live tree the averages; "
                "exchange them before use"
            )
            yield Diagnostic("ema-swapped", message)
            return


def is_set(catalog: Catalog, item: Tensor | Object) -> bool:
    """Check whether a mark is true; objects of a DCP are not opened."""
    if isinstance(item, Object):
        return item.is_inline and bool(item.inline)
    if item.numel != 1:
        return False
    data = bytearray(item.nbytes)
    BoxReader(item.nbytes).read(locate(catalog, item), memoryview(data))
    return any(data)


def unrelated(compared: ComparedTrees) -> Iterator[Diagnostic]:
    """Find an EMA of another model: other shapes or names, or weights that point elsewhere."""
    a, b, pairing = compared.a, compared.b, compared.pairing
    shared = len(pairing.pairs) + len(pairing.mismatched)
    total = PairStats.total(
        [compared.stats[name] for name, tensor, _ in pairing.pairs if not tensor.dtype.is_discrete]
    )
    norms = (total.aa * total.bb) ** 0.5 if total.aa > 0 and total.bb > 0 else 0.0
    if len(pairing.mismatched) > _UNRELATED_SHARE * shared:
        names = f"{len(pairing.mismatched)} of {counted(shared, 'common name')}"
        why = f"do not fit: {names} with another shape"
    elif not shared and pairing.only_in_a and pairing.only_in_b:
        why = "have no name in common"
    elif norms and total.ab < _UNRELATED_COSINE * norms:
        why = f"point in different directions (cosine {total.ab / norms:.3f})"
    else:
        return
    message = (
        f"EMA {a.tree.name!r} and {b.tree.name!r} of {b.catalog.resolved} {why}; is this the EMA "
        "of another model, or of another run? Name the right pair with --tree and --against"
    )
    yield Diagnostic("ema-unrelated", message)


def equal_to_live(compared: ComparedTrees) -> Iterator[Diagnostic]:
    """Find an EMA that equals its live weights bit for bit."""
    a, b = compared.a, compared.b
    if not compared.is_pair or (a.tree.role, b.tree.role) != (EMA, LIVE):
        return
    if not compared.same_bits or not compared.has_floats:
        return
    updates = known_config(a.catalog, a.tree).num_updates
    if updates != 0:
        count = "an unknown number of updates" if updates is None else counted(updates, "update")
        why = copied_because(a.catalog, a.tree)
        if why is None:
            why = "it was seeded again at resume, or decay is 0; restore it from its own state"
        message = f"EMA {a.tree.name!r} equals the live weights bit for bit after {count}: {why}"
        yield Diagnostic("ema-equals-live", message)


def non_finite(compared: ComparedTrees) -> Iterator[Diagnostic]:
    """Find NaN and infinities on either side."""
    names: dict[str, list[str]] = {"a": [], "b": []}
    for name, stats in compared.stats.items():
        if stats.nan_a or stats.inf_a:
            names["a"].append(name)
        if stats.nan_b or stats.inf_b:
            names["b"].append(name)
    for side, bad in ((compared.a, names["a"]), (compared.b, names["b"])):
        if bad:
            message = f"{_where(side)} holds NaN or Inf in {shown(bad)}"
            yield Diagnostic("non-finite", f"{message}; go back to a checkpoint before that")


def low_precision(side: Side) -> Iterator[Diagnostic]:
    """Find averages stored in less than float32."""
    low: list[str] = []
    dtypes: set[str] = set()
    for name, tensor in side.tree.weights.items():
        if tensor.dtype.is_floating and tensor.dtype.itemsize < 4:
            low.append(name)
            dtypes.add(tensor.dtype.name)
    if low:
        message = (
            f"EMA {side.tree.name!r} is stored in {' and '.join(sorted(dtypes))}, where most "
            f"updates round to nothing: {shown(low)}; keep the average in float32"
        )
        yield Diagnostic("ema-low-precision", message)


def unpaired_names(compared: ComparedTrees) -> Iterator[Diagnostic]:
    """Find names that only one side has."""
    a, b, pairing = compared.a, compared.b, compared.pairing
    if pairing.only_in_a:
        names = f"{counted(len(pairing.only_in_a), 'name')}, {shown(pairing.only_in_a)}"
        yield Diagnostic("keys-differ", f"only in {_where(a)}: {names}")
    if pairing.only_in_b and a.tree.role == EMA:
        lacks = f"lacks {counted(len(pairing.only_in_b), 'name')} of {_where(b)}"
        message = f"EMA {a.tree.name!r} {lacks}: {shown(pairing.only_in_b)}"
        if compared.is_pair:
            message += "; consolidate --fill takes them from there"
        yield Diagnostic("ema-partial", message)
