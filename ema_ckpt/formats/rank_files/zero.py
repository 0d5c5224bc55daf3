"""ZeRO partitions of DeepSpeed: full-precision weights, flattened and cut over ranks, put back by
recorded shapes.

`zero_pp_rank_R_mp_rank_00_optim_states.pt` holds a rank's flat pieces, `…_model_states.pt` beside
it the names and shapes in order (`param_shapes`), buffers, frozen weights and names that share a
weight. Stages 1 and 2 cut the row of all parameters of a group in equal pieces; stage 3 cuts each
parameter by itself, in `ceil(n / W)` elements a rank (deepspeed/utils/zero_to_fp32.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ema_ckpt.core.box import flat_range_boxes, linear
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.text import counted
from ema_ckpt.formats.pickle.tensors import TensorRef
from ema_ckpt.formats.rank_files.flat import FlatPiece, Leaves, Placed, place_flat

Ints = tuple[int, ...]
TREE = "module"

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_(mp_rank_\d+)_optim_states\.pt")
_STATE = "optimizer_state_dict"


@dataclass(frozen=True, slots=True)
class ZeroWeights:
    """Weights by name, each with its shape and pieces; whole tensors of the model's file; names
    that share a weight.
    """

    placed: Sequence[tuple[str, Ints, Sequence[Placed]]]
    whole: Mapping[str, TensorRef]
    shared: Mapping[str, str]
    left_out: Sequence[str]


def model_file(names: Sequence[str], present: Sequence[str]) -> str | None:
    """The file of names and shapes that belongs to ZeRO's optimizer files `names`; None if they are
    no such files.

    Raises:
        SourceError: `incomplete` if it is missing.
    """
    match = _OPTIMIZER_FILE.fullmatch(names[0])
    if match is None:
        return None
    candidates = (f"{match[2]}_model_states.pt", f"zero_pp_rank_0_{match[2]}_model_states.pt")
    found = next((name for name in candidates if name in present), None)
    if found is None:
        message = (
            f"{names[0]}: the shapes of its flat pieces are in {candidates[0]}, which is missing"
        )
        raise SourceError("incomplete", message, file=candidates[0])
    return found


def read_zero(
    files: Sequence[str], states: Sequence[Leaves], model: Leaves, where: str
) -> ZeroWeights:
    """Place the pieces that the optimizer files `files` hold by the shapes that the model's file
    `where` records.

    Raises:
        SourceError: `incomplete` if ranks or pieces are missing, `unsupported` if no shapes are
            recorded.
    """
    count = _partitions(states[0])
    if count is not None and count != len(files):
        message = (
            f"{files[0]}: written by {counted(count, 'rank')}, found the files of {len(files)}"
        )
        raise SourceError("incomplete", f"{message}; bring all into one directory", file=files[0])
    groups = _groups(model)
    if not groups:
        raise SourceError(
            "unsupported", f"{where}: records no `param_shapes` of the flat pieces", file=where
        )
    flats = [_flats(state, "single_partition_of_fp32_groups") for state in states]
    if all(flats):
        placed = _by_group(files, flats, groups)
    else:
        flats = [_flats(state, "fp32_flat_groups") for state in states]
        if not all(flats):
            message = f"{files[0]}: holds no full-precision weights in flat pieces"
            raise SourceError("unsupported", message, file=files[0])
        placed = _by_parameter(
            files, flats, {name: shape for group in groups for name, shape in group.items()}
        )
    return ZeroWeights(placed, _whole(model, where), _shared(model), sorted(_left_out(model)))


def _partitions(state: Leaves) -> int | None:
    found = state.get((_STATE, "partition_count"))
    counts = found if isinstance(found, list | tuple) else [found]
    numbers = [count for count in counts if type(count) is int]
    return max(numbers, default=None)


def _groups(model: Leaves) -> list[dict[str, Ints]]:
    """Names and shapes, in order, of each parameter group."""
    groups: dict[int, dict[str, Ints]] = {}
    for path, value in model.items():
        if (
            path[0] == "param_shapes"
            and len(path) == 3
            and isinstance(path[1], int)
            and isinstance(value, tuple)
        ):
            groups.setdefault(path[1], {})[str(path[2])] = value
    return [groups[at] for at in sorted(groups)]


def _flats(state: Leaves, key: str) -> list[TensorRef]:
    found = {
        path[2]: value
        for path, value in state.items()
        if path[:2] == (_STATE, key) and len(path) == 3
    }
    refs = [value for _, value in sorted(found.items(), key=lambda item: int(item[0]))]
    return [ref for ref in refs if isinstance(ref, TensorRef) and len(ref.shape) == 1]


def _by_group(
    files: Sequence[str], flats: Sequence[Sequence[TensorRef]], groups: Sequence[Mapping[str, Ints]]
) -> list[tuple[str, Ints, Sequence[Placed]]]:
    placed: list[tuple[str, Ints, Sequence[Placed]]] = []
    for at, group in enumerate(groups):
        if any(len(held) != len(groups) for held in flats):
            message = f"{files[0]}: expected {counted(len(groups), 'flat piece')}, one a group"
            raise SourceError("incomplete", message, file=files[0])
        pieces = [FlatPiece((), tuple(group), group, held[at], (), frozenset()) for held in flats]
        placed += [(name, group[name], boxes) for name, boxes in place_flat(pieces, files)]
    return placed


def _by_parameter(
    files: Sequence[str], flats: Sequence[Sequence[TensorRef]], shapes: Mapping[str, Ints]
) -> list[tuple[str, Ints, Sequence[Placed]]]:
    ends = [_ends(held) for held in flats]
    placed: list[tuple[str, Ints, Sequence[Placed]]] = []
    at = 0
    for name, shape in shapes.items():
        numel, boxes = prod(shape), list[Placed]()
        step = -(-numel // len(files))
        for rank, held in enumerate(flats):
            start, stop = min(rank * step, numel), min((rank + 1) * step, numel)
            which = next((i for i, end in enumerate(ends[rank]) if at + step <= end), None)
            if which is None or (which and at < ends[rank][which - 1]):
                message = f"{files[rank]}: its flat pieces end before {name!r} of {list(shape)}"
                raise SourceError("incomplete", message, tensor=name, file=files[rank])
            shift = at - (ends[rank][which - 1] if which else 0) - start
            boxes += [
                (box, rank, held[which], shift + linear(box.offsets, shape))
                for box in flat_range_boxes(shape, start, stop)
            ]
        placed.append((name, shape, boxes))
        at += step
    return placed


def _ends(held: Sequence[TensorRef]) -> list[int]:
    ends, at = [], 0
    for ref in held:
        at += ref.shape[0]
        ends.append(at)
    return ends


def _whole(model: Leaves, where: str) -> dict[str, TensorRef]:
    """Buffers, and weights that were not trained: the model's file has them whole."""
    listed = model.get(("buffer_names",))
    buffers = set(listed) if isinstance(listed, list | tuple) else set()
    found = {}
    for path, value in model.items():
        name = str(path[-1])
        wanted = path[0] == "frozen_param_fragments" or (path[0] == "module" and name in buffers)
        if wanted and len(path) == 2 and isinstance(value, TensorRef):
            if model.get(("frozen_param_shapes", name), value.shape) != value.shape:
                message = f"{where}: the frozen weight {name!r} is cut over the ranks, a form that is not read"
                raise SourceError(
                    "unsupported", f"{message}; use zero_to_fp32.py", tensor=name, file=where
                )
            found[name] = value
    return found


def _shared(model: Leaves) -> dict[str, str]:
    pairs = {
        str(path[1]): value
        for path, value in model.items()
        if path[0] == "shared_params" and len(path) == 2
    }
    return {name: value for name, value in pairs.items() if isinstance(value, str)}


def _left_out(model: Leaves) -> set[str]:
    used = {
        "param_shapes",
        "buffer_names",
        "frozen_param_fragments",
        "frozen_param_shapes",
        "shared_params",
        "module",
    }
    return {str(path[0]) for path in model} - used
