"""Which values share a scale: block sizes, from the shape of the scales and what is configured."""

from __future__ import annotations

from collections.abc import Sequence

from ema_ckpt.core.errors import SourceError

Ints = tuple[int, ...]


def aligned(scale: Ints, shape: Ints) -> Ints:
    """Shape of the scales with as many dims as the values.

    A single scale counts for all; one for each row may lack the dims of length 1 that follow.

    Raises:
        SourceError: `unsupported` if they do not fit.
    """
    if all(size == 1 for size in scale):
        return (1,) * len(shape)
    if len(scale) < len(shape) and scale == shape[: len(scale)]:
        return (*scale, *(1,) * (len(shape) - len(scale)))
    if len(scale) == len(shape):
        return scale
    raise misfit(scale, shape)


def misfit(scale: Sequence[int], shape: Sequence[int]) -> SourceError:
    """The error for scales that do not fit the values."""
    message = f"scales of shape {list(scale)} do not fit values of shape {list(shape)}"
    return SourceError("unsupported", message)


def block_sizes(
    scale: Ints, shape: Ints, configured: Sequence[int] | None, *, may_be_cut: bool
) -> Ints:
    """Values along each dim that share a scale; `scale` is aligned with `shape`.

    Args:
        configured: sizes on the last dims, as `config.json` has them; they count where a dim has
            several scales.
        may_be_cut: whether the last block of a dim may be shorter than the others.

    Raises:
        SourceError: `unsupported` if sizes do not fit, or follow from nothing.
    """
    given = tuple(configured or ())[-len(shape) :]
    told = [*(None,) * (len(shape) - len(given)), *given]
    sizes = []
    for count, length, known in zip(scale, shape, told, strict=True):
        if count in (1, length):
            sizes.append(max(length, 1) if count == 1 else 1)
            continue
        size = known or _block_size(count, length, scale, shape, may_be_cut=may_be_cut)
        if -(-length // size) != count or (length % size and not may_be_cut):
            raise misfit(scale, shape)
        sizes.append(size)
    return tuple(sizes)


def _block_size(count: int, length: int, scale: Ints, shape: Ints, *, may_be_cut: bool) -> int:
    """Size of `count` blocks of a dim: the only power of two that fits, or equal parts."""
    if not 0 < count < length:
        raise misfit(scale, shape)
    candidates = set()
    if length % count == 0:
        candidates.add(length // count)
    if may_be_cut:
        power = 1 << (-(-length // count) - 1).bit_length()
        if -(-length // power) == count:
            candidates.add(power)
    if len(candidates) == 1:
        return candidates.pop()
    if not candidates:
        raise misfit(scale, shape)
    sizes = " or ".join(map(str, sorted(candidates)))
    message = f"{count} scales for {length} values: blocks of {sizes}; the model's config.json, "
    raise SourceError("unsupported", message + "beside the weights, would say which")
