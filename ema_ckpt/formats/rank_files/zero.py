"""Place DeepSpeed's ZeRO partitions: full-precision weights, flattened and cut over ranks.

`zero_pp_rank_R_mp_rank_00_optim_states.pt` holds a rank's flat pieces, `…_model_states.pt` beside
it the names and shapes in order (`param_shapes`), buffers, frozen weights and names that share a
weight; what is frozen in stage 1, or in no optimizer, only its `module` has. Stages 1 and 2 cut the
row of all parameters of a group in equal pieces, after each parameter the padding that
`param_alignment_paddings` says (from 0.19 on); stage 3 cuts each parameter by itself, in
`ceil(n / W)` elements a rank (deepspeed/utils/zero_to_fp32.py).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from ema_ckpt.core.box import are_sizes
from ema_ckpt.core.errors import SourceError
from ema_ckpt.core.names import canonical
from ema_ckpt.core.text import counted
from ema_ckpt.formats.pickle.tensors import TensorRef
from ema_ckpt.formats.rank_files.flat import FlatBox, FlatPiece, Leaves, place_flat, range_boxes

Ints = tuple[int, ...]
Pieces = Sequence[Sequence[TensorRef]]  # the flat pieces of each rank
Groups = list[dict[str, Ints]]
PlacedWeight = tuple[str, Ints, Sequence[FlatBox]]
TREE = "module"

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_(mp_rank_\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt")
_STATE = "optimizer_state_dict"
_PLACEHOLDER: Ints = (0,)  # the shape in stage 3 of what is cut over the ranks
_MODEL_KEYS = frozenset(
    "module param_shapes buffer_names shared_params frozen_param_fragments "
    "frozen_param_shapes".split()
)


@dataclass(frozen=True, slots=True)
class ZeroWeights:
    """Weights of a ZeRO checkpoint.

    `placed` are cut over the ranks, `whole` lie in the model's file; `shared` maps further names
    of a weight to its own; `left_out` are the keys of the model's file that are not read, `unread`
    the names in its `module`.
    """

    placed: Sequence[PlacedWeight]
    whole: Mapping[str, TensorRef]
    shared: Mapping[str, str]
    left_out: Sequence[str]
    unread: Sequence[str]


def model_file(names: Sequence[str], present: Sequence[str]) -> str | None:
    """Return the file of names and shapes beside ZeRO's optimizer files; None for other files.

    Raises:
        SourceError: `incomplete` if it is missing.
    """
    match = _OPTIMIZER_FILE.fullmatch(names[0])
    if match is None:
        return None
    candidates = (f"{match[2]}_model_states.pt", f"zero_pp_rank_0_{match[2]}_model_states.pt")
    for name in candidates:
        if name in present:
            return name
    problem = f"the shapes of its flat pieces are in {candidates[0]}, which is missing"
    raise SourceError("incomplete", f"{names[0]}: {problem}", file=candidates[0])


def other_model_files(model: str, world_size: int) -> list[str]:
    """Name the files of buffers and shapes of ranks from 1 on, which stage 3 writes besides."""
    first = "zero_pp_rank_0_"
    if not model.startswith(first):
        return []
    return [model.replace("rank_0_", f"rank_{rank}_", 1) for rank in range(1, world_size)]


def lone_model(file: str, model: Leaves) -> str:
    """Say what is lost where a model's file is read without ZeRO's optimizer files; "" if nothing.

    Raises:
        SourceError: `incomplete` if the weights are in those alone, as stage 3 keeps them.
    """
    if _MODEL_FILE.fullmatch(file) is None:
        return ""
    recorded = {}
    for path, shape in model.items():
        if path[0] in ("param_shapes", "frozen_param_shapes") and isinstance(shape, tuple):
            recorded[path[-1]] = shape
    for name, shape in recorded.items():
        held = model.get((TREE, name))
        if isinstance(held, TensorRef) and held.shape != shape:
            problem = f"{name!r} of {list(shape)} is cut over the ranks (ZeRO stage 3), and"
            message = f"{file}: {problem} the files with its pieces, …_optim_states.pt, are missing"
            raise SourceError("incomplete", message, tensor=f"{TREE}.{name}", file=file)
    if not recorded or model.get(("optimizer",)) is not None:
        return ""
    reason = "ZeRO's …_optim_states.pt, which hold the weights in full precision, are not read"
    return f"{file}: {reason}; those that the model computes with are taken"


def read_zero(
    files: Sequence[str], states: Sequence[Leaves], model: Leaves, where: str
) -> ZeroWeights:
    """Place the pieces of the optimizer files `files` by the shapes of the model's file `where`.

    Raises:
        SourceError: `incomplete` if ranks or pieces are missing, `unsupported` if no shapes are
            recorded.
    """
    for file, state in zip(files, states, strict=True):
        world_size = _world_size(state)
        if world_size is not None and world_size != len(files):
            problem = f"written by {counted(world_size, 'rank')}, found the files of {len(files)}"
            remedy = "bring all of one save, and no other, into one directory"
            raise SourceError("incomplete", f"{file}: {problem}; {remedy}", file=file)
        _refuse_experts(file, state, len(files))
    groups, whole, shared = _read_model(model)
    if not groups:
        message = f"{where}: records no `param_shapes` of the flat pieces"
        raise SourceError("unsupported", message, file=where)
    pieces = [_flat_pieces(state, "single_partition_of_fp32_groups") for state in states]
    if all(pieces):
        placed = _place_groups(files, pieces, groups, _paddings(files[0], states[0], groups), where)
    else:
        pieces = [_flat_pieces(state, "fp32_flat_groups") for state in states]
        if not all(pieces):
            message = f"{files[0]}: holds no full-precision weights in flat pieces"
            raise SourceError("unsupported", message, file=files[0])
        placed = _place_parameters(files, pieces, groups, where)
    _refuse_cut(model, whole, where)
    beside, unread = _read_beside(model, {name for name, *_ in placed} | whole.keys(), shared)
    whole |= beside
    shared = _by_read_names(shared, [*(name for name, *_ in placed), *whole])
    left_out = {str(path[0]) for path in model} - _MODEL_KEYS
    return ZeroWeights(placed, whole, shared, sorted(left_out), unread)


def _world_size(state: Leaves) -> int | None:
    return max(_partition_counts(state), default=None)


def _partition_counts(state: Leaves) -> list[int]:
    """Read over how many ranks each group is cut, or all are, as far as it is recorded."""
    recorded = state.get((_STATE, "partition_count"))
    counts = recorded if isinstance(recorded, list | tuple) else [recorded]
    return [one for one in counts if type(one) is int and one < 2**63]


def _refuse_experts(file: str, state: Leaves, world_size: int) -> None:
    """Refuse experts of which each rank has some: of one name are others on each."""
    for number, count in enumerate(_partition_counts(state)):
        if count < world_size:
            problem = f"group {number} is cut over {count} of {counted(world_size, 'rank')}"
            message = f"{file}: {problem}, as experts are that the ranks share out; not read"
            remedy = "name the model_states file of each expert, or load it with DeepSpeed"
            raise SourceError("unsupported", f"{message}: {remedy}", file=file)


def _read_model(model: Leaves) -> tuple[Groups, dict[str, TensorRef], dict[str, str]]:
    """Read each group's names and shapes in order, whole weights, and names that share a weight."""
    listed = model.get(("buffer_names",))
    buffers = set(listed) if isinstance(listed, list | tuple) else set()
    groups: dict[int, dict[str, Ints]] = {}
    whole: dict[str, TensorRef] = {}
    shared: dict[str, str] = {}
    for path, value in model.items():
        match path, value:
            case ("param_shapes", int() as number, name), tuple():
                if not are_sizes(value):
                    raise SourceError("unreadable", f"param_shapes has no shape of {name!r}")
                groups.setdefault(number, {})[str(name)] = value
            case ("shared_params", name), str():
                shared[str(name)] = value
            case ("frozen_param_fragments", name), TensorRef():
                whole[str(name)] = value
            case ("module", name), TensorRef() if str(name) in buffers:
                whole[str(name)] = value
    return [groups[number] for number in sorted(groups)], whole, shared


def _refuse_cut(model: Leaves, whole: Mapping[str, TensorRef], where: str) -> None:
    for name, ref in whole.items():
        if model.get(("frozen_param_shapes", name), ref.shape) != ref.shape:
            problem = f"the frozen weight {name!r} is cut over the ranks, a form that is not read"
            message = f"{where}: {problem}; use zero_to_fp32.py"
            raise SourceError("unsupported", message, tensor=name, file=where)


def _read_beside(
    model: Leaves, known: Collection[str], shared: Mapping[str, str]
) -> tuple[dict[str, TensorRef], list[str]]:
    """Read what only the module has: weights that are frozen, in stage 1, or in no optimizer.

    Wrappers of activation checkpointing take their prefix out of the names in a state dict, and
    not out of those of parameters, by which all else is called.

    Returns:
        them, and the names of what is not read: in stage 3 nothing is left of such a weight.
    """
    beside: dict[str, TensorRef] = {}
    unread = []
    inside = {".".join(map(str, path[1:])): path for path in model if path[0] == TREE and path[1:]}
    owners = {canonical(name): canonical(owner) for name, owner in shared.items()}
    read = {*map(canonical, known)}
    had = read.union(map(canonical, inside))
    for name, path in inside.items():
        plain, value = canonical(name), model[path]
        if plain in read or owners.get(plain) in had:
            continue
        if len(path) == 2 and isinstance(value, TensorRef) and value.shape != _PLACEHOLDER:
            beside[name] = value
        else:
            unread.append(name)
    return beside, unread


def _by_read_names(shared: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Map further names of weights to those that are read, which may differ in wrapper prefixes."""
    read = {canonical(name): name for name in names}
    further = {name: owner for name, owner in shared.items() if canonical(name) not in read}
    return {name: read.get(canonical(owner), owner) for name, owner in further.items()}


def _flat_pieces(state: Leaves, key: str) -> list[TensorRef]:
    numbered: dict[int, TensorRef] = {}
    for path, value in state.items():
        if path[:-1] != (_STATE, key):
            continue
        if isinstance(value, TensorRef) and len(value.shape) == 1:
            numbered[int(path[2])] = value
    return [numbered[number] for number in sorted(numbered)]


def _paddings(file: str, state: Leaves, groups: Groups) -> list[dict[str, int]]:
    """Read how many elements of padding follow each parameter of each group, zeros left out."""
    recorded = state.get((_STATE, "param_alignment_paddings"))
    if recorded is None:
        return [{} for _ in groups]
    lists = recorded if isinstance(recorded, list | tuple) else ()
    if len(lists) != len(groups) or not all(
        isinstance(listed, list | tuple) and len(listed) == len(group) and are_sizes(listed)
        for listed, group in zip(lists, groups, strict=True)
    ):
        problem = "`param_alignment_paddings` has no number for each parameter"
        raise SourceError("unreadable", f"{file}: {problem}", file=file)
    return [
        {name: number for name, number in zip(group, listed, strict=True) if number}
        for group, listed in zip(groups, lists, strict=True)
    ]


def _check_used(file: str, used: int, found: int, where: str) -> None:
    if used != found:
        problem = f"its flat pieces have {found} elements, the shapes in {where} take {used}"
        message = f"{file}: {problem}: they are of different saves"
        raise SourceError("index-mismatch", message, file=file)


def _place_groups(
    files: Sequence[str],
    pieces: Pieces,
    groups: Groups,
    paddings: Sequence[Mapping[str, int]],
    where: str,
) -> list[PlacedWeight]:
    if any(len(of_rank) != len(groups) for of_rank in pieces):
        message = f"{files[0]}: expected {counted(len(groups), 'flat piece')}, one a group"
        raise SourceError("incomplete", message, file=files[0])
    placed: list[PlacedWeight] = []
    for number, group in enumerate(groups):
        gaps = paddings[number]
        flat = [
            FlatPiece((), tuple(group), group, of_rank[number], gaps=gaps) for of_rank in pieces
        ]
        align = 2 * len(files)  # to a multiple of which DeepSpeed pads, or did not yet
        used = sum(map(prod, group.values())) + sum(gaps.values())
        found = sum(of_rank[number].shape[0] for of_rank in pieces)
        if -(-used // align) < -(-found // align):
            _check_used(files[0], used, found, where)
        placed += [(name, group[name], boxes) for name, boxes in place_flat(flat, files)]
    return placed


def _place_parameters(
    files: Sequence[str], pieces: Pieces, groups: Groups, where: str
) -> list[PlacedWeight]:
    shapes: dict[str, Ints] = {}
    for group in groups:
        shapes |= group
    ends = [list(accumulate(ref.shape[0] for ref in of_rank)) for of_rank in pieces]
    placed: list[PlacedWeight] = []
    begin = 0  # of a parameter's part, in the row of a rank's pieces
    for name, shape in shapes.items():
        numel, boxes = prod(shape), list[FlatBox]()
        step = -(-numel // len(files))
        for rank, of_rank in enumerate(pieces):
            start, stop = min(rank * step, numel), min((rank + 1) * step, numel)
            number = bisect_left(ends[rank], begin + step)
            piece_begin = ends[rank][number - 1] if number else 0
            if number == len(of_rank) or begin < piece_begin:
                problem = f"its flat pieces end before {name!r} of {list(shape)}"
                message = f"{files[rank]}: {problem}"
                raise SourceError("incomplete", message, tensor=name, file=files[rank])
            data = of_rank[number]
            boxes += range_boxes(shape, start, stop, rank, data, begin - piece_begin)
        placed.append((name, shape, boxes))
        begin += step
    for file, piece_ends in zip(files, ends, strict=True):
        _check_used(file, begin, piece_ends[-1], where)
    return placed
