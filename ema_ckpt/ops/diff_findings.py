"""What a comparison means: the findings, each with what to do. Silence when all is well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ema_ckpt.analysis.compare import PairStats
from ema_ckpt.core.catalog import Catalog, Diagnostic, Object, Tensor
from ema_ckpt.core.names import EMA, LIVE
from ema_ckpt.core.text import counted, shown
from ema_ckpt.ops.diff_pairing import Pairing, Side
from ema_ckpt.reading.box_reader import BoxReader, locate
from ema_ckpt.state_dicts.ema_config import read_ema_config, swap_marks

_UNRELATED_COSINE = 0.5
_UNRELATED_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Compared:
    """Both sides, how they pair, and what each pair gave, by name. `is_pair` tells that b is a's
    live tree.
    """

    a: Side
    b: Side
    pairing: Pairing
    sums: Mapping[str, PairStats]
    is_pair: bool
    findings: tuple[Diagnostic, ...] = ()

    @property
    def catalogs(self) -> tuple[Catalog, Catalog]:
        """The checkpoints of both sides; one twice where both are of it."""
        return self.a.catalog, self.b.catalog

    @property
    def total(self) -> PairStats:
        """All pairs together."""
        return PairStats.total(list(self.sums.values()))


def find(compared: Compared) -> tuple[Diagnostic, ...]:
    """All findings, the gravest first."""
    found: list[Diagnostic] = []
    if compared.a.tree.role == EMA:
        found += _swapped(compared.a)
        found += _unrelated(compared)
    averages = [side for side in (compared.a, compared.b) if side.tree.role == EMA]
    for side in averages:
        found += _stalled(side)
    found += _equal(compared)
    found += _non_finite(compared)
    for side in averages:
        found += _low_precision(side)
    found += _names(compared)
    return tuple(dict.fromkeys(found))  # both sides may be the same tree


def _swapped(side: Side) -> Iterator[Diagnostic]:
    """A mark that the live weights lay in the EMA's place when the checkpoint was saved."""
    for item in swap_marks(side.catalog, side.known):
        if _is_set(side.catalog, item):
            message = (
                f"{side.catalog.resolved} is marked as swapped ({item.name!r}): its EMA tree {side.tree.name!r} holds "
                "the live weights and its live tree the averages; exchange them before use"
            )
            yield Diagnostic("ema-swapped", message)
            return


def _is_set(catalog: Catalog, item: Tensor | Object) -> bool:
    if isinstance(item, Object):
        return item.is_inline and bool(item.inline)  # objects of a DCP are not opened here
    if item.numel != 1:
        return False
    data = bytearray(item.nbytes)
    BoxReader(item.nbytes).read(locate(catalog, item), memoryview(data))
    return any(data)


def _unrelated(compared: Compared) -> Iterator[Diagnostic]:
    pairing = compared.pairing
    named = f"EMA {compared.a.tree.name!r} and {compared.b.tree.name!r} of {compared.b.catalog.resolved}"
    remedy = "is this the EMA of another model, or of another run? Name the right pair with --tree and --against"
    shared = len(pairing.pairs) + len(pairing.mismatched)
    floats = [
        compared.sums[name] for name, t, _ in pairing.pairs if t.dtype.kind not in ("int", "bool")
    ]
    total = PairStats.total(floats) if floats else PairStats()
    both = total.aa > 0 and total.bb > 0
    if len(pairing.mismatched) > _UNRELATED_SHARE * shared:
        what = f"{len(pairing.mismatched)} of {counted(shared, 'common name')} with another shape"
        yield Diagnostic("ema-unrelated", f"{named} do not fit: {what}; {remedy}")
    elif not shared and pairing.only_in_a and pairing.only_in_b:
        yield Diagnostic("ema-unrelated", f"{named} have no name in common; {remedy}")
    elif both and total.ab < _UNRELATED_COSINE * (total.aa * total.bb) ** 0.5:
        cosine = total.ab / (total.aa * total.bb) ** 0.5
        yield Diagnostic(
            "ema-unrelated",
            f"{named} point in different directions (cosine {cosine:.3f}); {remedy}",
        )


def _stalled(side: Side) -> Iterator[Diagnostic]:
    if _updates(side) == 0:
        message = (
            f"EMA {side.tree.name!r} was never updated (num_updates is 0): it is still the weights it began with; "
            "call update() after each optimizer step"
        )
        yield Diagnostic("ema-stalled", message)


def _updates(side: Side) -> int | None:
    return read_ema_config(side.catalog, side.tree, open_objects=False).num_updates


def _equal(compared: Compared) -> Iterator[Diagnostic]:
    a, b, pairing = compared.a, compared.b, compared.pairing
    if not (compared.is_pair and a.tree.role == EMA and b.tree.role == LIVE and pairing.pairs):
        return
    floating = any(t.dtype.kind not in ("int", "bool") and t.numel for _, t, _ in pairing.pairs)
    if (
        floating
        and all(sums.same_bits for sums in compared.sums.values())
        and not pairing.mismatched
    ):
        updates = _updates(a)
        if updates != 0:
            count = (
                "an unknown number of updates" if updates is None else counted(updates, "update")
            )
            message = (
                f"EMA {a.tree.name!r} equals the live weights bit for bit after {count}: it was seeded again "
                "at resume, or decay is 0; restore it from its own state"
            )
            yield Diagnostic("ema-equals-live", message)


def _non_finite(compared: Compared) -> Iterator[Diagnostic]:
    for letter, side in (("a", compared.a), ("b", compared.b)):
        bad = [
            n
            for n, s in compared.sums.items()
            if getattr(s, f"nan_{letter}") or getattr(s, f"inf_{letter}")
        ]
        if bad:
            message = f"{_where(side)} holds NaN or Inf in {shown(bad)}"
            yield Diagnostic("non-finite", f"{message}; go back to a checkpoint before that")


def _low_precision(side: Side) -> Iterator[Diagnostic]:
    low = [n for n, t in side.tree.weights.items() if t.dtype.is_floating and t.dtype.itemsize < 4]
    if low:
        kinds = sorted({side.tree.weights[name].dtype.name for name in low})
        message = (
            f"EMA {side.tree.name!r} is stored in {' and '.join(kinds)}, where most updates round to nothing: "
            f"{shown(low)}; keep the average in float32"
        )
        yield Diagnostic("ema-low-precision", message)


def _names(compared: Compared) -> Iterator[Diagnostic]:
    a, b, pairing = compared.a, compared.b, compared.pairing
    if pairing.only_in_a:
        yield Diagnostic("keys-differ", f"only in {_where(a)}: {_listed(pairing.only_in_a)}")
    if pairing.only_in_b and a.tree.role == EMA:
        message = (
            f"EMA {a.tree.name!r} lacks {counted(len(pairing.only_in_b), 'name')} of {_where(b)}"
        )
        yield Diagnostic(
            "ema-partial",
            f"{message}: {shown(pairing.only_in_b)}; consolidate --fill takes them from there",
        )


def _listed(names: Sequence[str]) -> str:
    return f"{counted(len(names), 'name')}, {shown(names)}"


def _where(side: Side) -> str:
    return f"{side.tree.name or 'the root'!r} of {side.catalog.resolved}"
