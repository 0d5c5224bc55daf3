"""Rules on names: wrapper prefixes, roles of trees and parts, globs, renames."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ema_ckpt.core.errors import UsageError

EMA, LIVE, OPTIMIZER, OTHER = "ema", "live", "optimizer", "other"

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pth.tar")
"""Of files that torch.save writes; `.pth.tar` is no tar archive."""

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Components that DDP, `torch.compile`, FSDP1 and activation checkpointing put into names."""

SETTINGS = frozenset(
    "decay num_updates n_averaged optimization_step step steps initted samples_seen config".split()
)
"""Entries of an EMA tree that describe the average and are no weights."""

MOMENTS = frozenset(
    "exp_avg exp_avg_sq max_exp_avg_sq exp_inf momentum_buffer square_avg acc_delta "
    "exp_avg_sq_row exp_avg_sq_col".split()
)
"""State that optimizers keep for a parameter, by which it is known where no name tells it."""

NAMES = {
    EMA: "ema shadow shadow_params state_dict_ema model_ema generator_ema net_ema",
    LIVE: "model generator net state_dict module app.model current_model_state online_model",
    OPTIMIZER: "optimizer optimizers optim opt optimizer_state optimizer_states "
    "optimizer_state_dict",
    OTHER: "lr_scheduler lr_schedulers scheduler train_state trainer_state dataloader rng "
    "rng_state extra extra_state args hyper_parameters callbacks loops scaler grad_scaler",
}
"""Names of trees that tell their role; what else does, `role_of` knows."""
_ROLES = {name: role for role, names in NAMES.items() for name in names.split()}

_PARTS = {
    **dict.fromkeys(("model", "pytorch_model", "actor", "model_and_optim"), LIVE),
    **dict.fromkeys(("ema", "ema_model", "unet_ema"), EMA),
    **dict.fromkeys(("optim", "optimizer"), OPTIMIZER),
    **dict.fromkeys(("extra_state", "dataloader_state"), OTHER),
}
# Directories of accelerate, which are trees once they are in one checkpoint.
_NUMBERED = re.compile(r"(pytorch_model_fsdp|pytorch_ema_model_fsdp|optimizer)(?:_\d+)?")
_NUMBERED_ROLES = {
    "pytorch_model_fsdp": LIVE,
    "pytorch_ema_model_fsdp": EMA,
    "optimizer": OPTIMIZER,
}

Path = tuple[str | int, ...]


def is_wrapped(name: str) -> bool:
    """Whether `name` may hold a wrapper component; a cheap test that is never wrongly false."""
    return "module." in name or "_orig_mod." in name


def canonical(name: str) -> str:
    """Strip wrapper components at any depth; the last component always stays."""
    if not is_wrapped(name):
        return name
    *heads, last = name.split(".")
    kept = [head for head in heads if head not in WRAPPERS]
    return ".".join([*kept, last])


def is_flat_parameter(name: str) -> bool:
    """Whether `name` is that of several parameters of FSDP1 in one flat tensor."""
    return name.endswith("flat_param") and name.rpartition(".")[2] in ("_flat_param", "flat_param")


def role_of(name: str) -> str | None:
    """Role of a tree called `name`, or None if the name is not recognised."""
    if name in _ROLES:
        return _ROLES[name]
    if name.endswith("_optimizer"):
        return OPTIMIZER
    if name.endswith("_ema") or name.startswith("ema_"):
        return EMA
    return _numbered_role(name)


def tree_role(name: str) -> str | None:
    """Role recognised from a tree's full name or its last component (`app.model`)."""
    return role_of(name) or role_of(name.rpartition(".")[2])


def first_components(names: Iterable[str]) -> set[str]:
    """What dotted names begin with: the outermost dictionaries or modules."""
    return {name.partition(".")[0] for name in names}


def part_role(name: str) -> str | None:
    """Role of a checkpoint's part by the name of its directory or file stem; None if it is none."""
    if name.startswith("rng"):
        return OTHER
    return _numbered_role(name) or _PARTS.get(name)


def part_roles(names: Iterable[str]) -> dict[str, str]:
    """Roles of those of `names`, which stand side by side, that are parts of one checkpoint.

    A name may be a part by itself (`model`), or by another: `X` beside `X_ema` is live and an
    average whatever X is, and `weights` beside an optimizer or an average is live.
    """
    present = list(dict.fromkeys(names))
    roles = {}
    for name in present:
        role = part_role(name)
        if role is not None:
            roles[name] = role
    for name in present:
        live = name.removesuffix("_ema")
        is_averaged = live != name and live in present
        if is_averaged and roles.get(live) not in (OPTIMIZER, OTHER):
            roles |= {live: LIVE, name: EMA}
    if "weights" in present and {OPTIMIZER, EMA} & set(roles.values()):
        roles["weights"] = LIVE
    return roles


def _numbered_role(name: str) -> str | None:
    match = _NUMBERED.fullmatch(name)
    return None if match is None else _NUMBERED_ROLES[match[1]]


def live_partners(name: str) -> tuple[str, ...]:
    """Names of trees that may hold the live weights of the EMA tree `name`, best first.

    `generator_ema` belongs to `generator`, `app.ema` to `app.model`, `pytorch_ema_model_fsdp_0` to
    `pytorch_model_fsdp_0`.
    """
    head, dot, last = name.rpartition(".")
    if last.endswith("_ema"):
        bare = last.removesuffix("_ema")
    elif last.startswith("ema_"):
        bare = last.removeprefix("ema_")
    else:
        bare = last.replace("_ema_", "_") if "_ema_" in last else "model"
    partners = [f"{head}{dot}{bare}", f"{head}{dot}model"]
    outer, _, parent = head.rpartition(".")
    if role_of(parent) == EMA:
        partners.append(f"{outer}.model" if outer else "model")
    return tuple(dict.fromkeys(partners))


def glob_matcher(glob: str) -> Callable[[str], bool]:
    """Compile a glob for whole names, case-sensitive as `fnmatch.fnmatchcase`; `*` crosses dots."""
    wildcard = re.search(r"[*?\[]", glob)
    if wildcard is None:
        return glob.__eq__
    if glob[wildcard.start() :] == "*":
        prefix = glob[:-1]
        return lambda name: name.startswith(prefix)
    import fnmatch

    match = re.compile(fnmatch.translate(glob)).match
    return lambda name: match(name) is not None


def parse_rename(text: str) -> tuple[str, str]:
    """Split `OLD=NEW` at the first `=`: two plain string prefixes, either of which may be empty.

    Raises:
        UsageError: `usage` if there is no `=`.
    """
    old, equals, new = text.partition("=")
    if not equals:
        raise UsageError("usage", f"--rename {text!r}: expected OLD=NEW, found no '='")
    return old, new


def rename_path(path: Path, old: str, new: str) -> Path:
    """Apply a rename of the dotted name's prefix `old` to `new` to the path behind the name.

    Elements behind the prefix stay as they are. Elements that it covers wholly give way to the
    dotted components of `new`; where it ends inside an element, the nesting keeps its depth as far
    as the new name has dots.
    """
    head = f"{path[0]}."
    if len(path) > 1 and old.startswith(head) and new.startswith(head):
        return (path[0], *rename_path(path[1:], old[len(head) :], new[len(head) :]))
    count, end = _covered(path, old, new)
    kept = path[count:]
    rest = ".".join(map(str, path))[len(old) :]
    changed = new + rest[: max(end - 1 - len(old), 0)]
    if kept:
        changed = changed.removesuffix(".")
    depth = -1 if kept and end == len(old) else max(count - 1, 0)
    moved = (*changed.split(".", depth), *kept) if changed else kept
    name = new + rest
    if not moved or ".".join(map(str, moved)) != name:
        # A rename that leaves an empty component (`.weight`) has no nesting to keep.
        return (name,)
    return moved


def _covered(path: Path, old: str, new: str) -> tuple[int, int]:
    """How many elements the prefix `old` touches, and the length of their dotted name with dot."""
    # With `new` empty or ending in a dot, an element that begins where `old` ends stays.
    limit = len(old) - 1 if new[-1:] in ("", ".") else len(old)
    count, end = 0, 0
    for element in path:
        if end > limit:
            break
        end += len(str(element)) + 1
        count += 1
    return count, end
