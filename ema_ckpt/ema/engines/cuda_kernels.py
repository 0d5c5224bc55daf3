"""The Triton kernel that moves all averages of a batch in one launch; imported if it is installed.

Every operation whose rounding matters is written out: ATen's lerp as a fused multiply-add with its
two branches, the compensated update without any (launched with `enable_fp_fusion=False`), so that
the bits are those of `torch._foreach_lerp_` and of the CPU engine on the same device.
"""

# mypy: disable-error-code="import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

# Columns of the table, one row per tensor, int64: addresses of average, parameter and residual (0
# for none), number of elements, number of its first block; then where its elements lie in the
# global tensor (see `noise.Position`): base, first, run, stride, and a number for the tensor.
COLUMNS = 10


@triton.jit
def _lerp(old, value, weight):
    # ATen/native/Lerp.h, as nvcc contracts it.
    difference = value - old
    below = tl.fma(weight, difference, old)
    above = tl.fma(-difference, 1.0 - weight, value)
    return tl.where(tl.abs(weight) < 0.5, below, above)


@triton.jit
def _noise(row, start, offsets, seed, call, block_numel: tl.constexpr):
    """Draw 16 random bits per element from its place in the global tensor, as `random_bits`."""
    base = tl.load(row + 5)
    at = tl.load(row + 6) + start
    run = tl.load(row + 7)
    stride = tl.load(row + 8)
    tensor = tl.load(row + 9)
    outer = at // run
    inner = at % run
    along = inner + offsets
    if inner + block_numel <= run:
        place = base + outer * stride + along
    else:
        place = base + (outer + along // run) * stride + along % run
    low = (place & 0xFFFFFFFF).to(tl.uint32)
    high = ((place >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low * 0
    word, _, _, _ = tl.philox(
        seed,
        low,
        high,
        zero + (call & 0xFFFFFFFF).to(tl.uint32),
        zero + (tensor & 0xFFFFFFFF).to(tl.uint32),
    )
    return word & 0xFFFF


@triton.jit
def _stochastic(new, noise):
    """Round to bfloat16, up with the probability of the cut-off fraction; not inf and NaN."""
    bits = (new.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
    return tl.where(tl.abs(new) < float("inf"), bits.to(tl.float32, bitcast=True), new)


@triton.jit
def _block(  # noqa: PLR0912 - one pass over memory, whatever is asked for
    row, start, numel, flag_at, events_at, seed, call, weight,
    shadow_type: tl.constexpr, param_type: tl.constexpr, block_numel: tl.constexpr,
    compensate: tl.constexpr, skip: tl.constexpr, stochastic: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    shadow = tl.load(row).to(tl.pointer_type(shadow_type))
    param = tl.load(row + 1).to(tl.pointer_type(param_type))
    residual = tl.load(row + 2).to(tl.pointer_type(tl.bfloat16))
    offsets = tl.arange(0, block_numel)
    if whole:  # aligned and without an end inside: loads of 16 bytes
        shadow = tl.multiple_of(shadow, 16)
        param = tl.multiple_of(param, 16)
        residual = tl.multiple_of(residual, 16)
        inside = tl.full([block_numel], 1, tl.int1)
        old = tl.load(shadow + start + offsets)
        value = tl.load(param + start + offsets)
    else:
        inside = start + offsets < numel
        old = tl.load(shadow + start + offsets, mask=inside, other=0.0)
        value = tl.load(param + start + offsets, mask=inside, other=0.0)
    before = old.to(tl.float32)
    value = value.to(tl.float32)
    if compensate:
        if whole:
            kept = tl.load(residual + start + offsets)
        else:
            kept = tl.load(residual + start + offsets, mask=inside, other=0.0)
        carried = kept.to(tl.float32)
        step = (value - before - carried) * weight + carried
        new = before + step
        rest = (step - (new - before)).to(tl.bfloat16)
    else:
        new = _lerp(before, value, weight)
    if skip:
        good = tl.abs(new) < float("inf")
        bad = tl.max(tl.where(good, 0, 1), axis=0)
        if bad != 0:  # noqa: SIM102 - Triton's `and` evaluates both sides
            if tl.atomic_or(flag_at, 1) == 0:
                tl.atomic_add(events_at, 1)
    if stochastic:
        new = _stochastic(new, _noise(row, start, offsets, seed, call, block_numel))
    result = new.to(shadow_type)
    if skip:
        result = tl.where(good, result, old)
    if whole:
        tl.store(shadow + start + offsets, result)
    else:
        tl.store(shadow + start + offsets, result, mask=inside)
    if compensate:
        if skip:
            rest = tl.where(good, rest, kept)
        if whole:
            tl.store(residual + start + offsets, rest)
        else:
            tl.store(residual + start + offsets, rest, mask=inside)


@triton.jit
def move(
    blocks, table, weight_at, flag_at, events_at, call_at, seed,
    shadow_type: tl.constexpr, param_type: tl.constexpr, block_numel: tl.constexpr,
    columns: tl.constexpr, compensate: tl.constexpr, skip: tl.constexpr, stochastic: tl.constexpr,
):  # fmt: skip
    """Move one block of one tensor, whose row is `blocks[program]`; with weight 0 touch nothing."""
    weight = tl.load(weight_at)
    if weight != 0.0:
        row = table + tl.load(blocks + tl.program_id(0)).to(tl.int64) * columns
        numel = tl.load(row + 3)
        start = (tl.program_id(0) - tl.load(row + 4)) * block_numel
        call = tl.load(call_at)
        addresses = tl.load(row) | tl.load(row + 1) | tl.load(row + 2)
        if (addresses & 15) == 0 and start + block_numel <= numel:
            _block(
                row, start, numel, flag_at, events_at, seed, call, weight,
                shadow_type, param_type, block_numel, compensate, skip, stochastic, True,
            )  # fmt: skip
        else:
            _block(
                row, start, numel, flag_at, events_at, seed, call, weight,
                shadow_type, param_type, block_numel, compensate, skip, stochastic, False,
            )  # fmt: skip
