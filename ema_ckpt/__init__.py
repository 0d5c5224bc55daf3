"""Sharded EMA for large-scale training, and a toolkit for the checkpoints it leaves.

    import ema_ckpt

    ema = ema_ckpt.ShardedEMA(model, decay=0.999)  # any model, wrapped or not
    ema.attach(optimizer)  # the average moves after each optimizer.step()
    ema_ckpt.save("run/step_100", model=model, ema=ema, optimizer=optimizer)

    ema_ckpt.consolidate("run", "ema.safetensors")  # the average of the newest step, whole
    with ema_ckpt.open("run") as checkpoint:
        print(checkpoint.trees, checkpoint.state_dict("ema"))

Names are loaded when they are first used: importing the package loads neither torch nor numpy.
torch is an extra: the verbs and `latest` work without it, the training side raises `missing-extra`.
"""

from __future__ import annotations

__version__ = "0.2.0"

# Type checkers know the name; importing typing's takes as long as all else until Ctrl-C is handled.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from ema_ckpt.core.errors import (
        AccessError,
        CollectiveError,
        EmaCkptError,
        SourceError,
        StateError,
        TargetError,
        UnsafeError,
        UsageError,
    )
    from ema_ckpt.discovery.locate import latest
    from ema_ckpt.ema.manager import ShardedEMA
    from ema_ckpt.ema.master_weights import master_weights
    from ema_ckpt.ema.optimizer_offload.optimizer import OffloadedOptimizer, offload_optimizer
    from ema_ckpt.ema.schedules import (
        HalfLife,
        HalfLifeFraction,
        PowerFunction,
        Warmup,
        Window,
    )
    from ema_ckpt.ops.consolidate import consolidate
    from ema_ckpt.ops.convert import convert, reshard
    from ema_ckpt.ops.diff import diff
    from ema_ckpt.ops.inspect import inspect
    from ema_ckpt.ops.open import Checkpoint
    from ema_ckpt.ops.open import open_checkpoint as open  # noqa: A004 - as gzip.open: named by its module
    from ema_ckpt.ops.synthesize import synthesize
    from ema_ckpt.ops.verify import check, verify
    from ema_ckpt.resume.restore import restore
    from ema_ckpt.resume.restore_phases import RestoreReport
    from ema_ckpt.resume.rng import rng_state
    from ema_ckpt.resume.save import save
    from ema_ckpt.state_dicts.rules.rule_file import load_rules
    from ema_ckpt.state_dicts.rules.rules import Rules

_MODULES = {
    "ema_ckpt.ema.schedules": (
        "HalfLife",
        "HalfLifeFraction",
        "PowerFunction",
        "Warmup",
        "Window",
    ),
    "ema_ckpt.ema.manager": ("ShardedEMA",),
    "ema_ckpt.ema.optimizer_offload.optimizer": ("OffloadedOptimizer", "offload_optimizer"),
    "ema_ckpt.ema.master_weights": ("master_weights",),
    "ema_ckpt.core.errors": (
        "AccessError",
        "CollectiveError",
        "EmaCkptError",
        "SourceError",
        "StateError",
        "TargetError",
        "UnsafeError",
        "UsageError",
    ),
    "ema_ckpt.discovery.locate": ("latest",),
    "ema_ckpt.ops.open": ("Checkpoint", "open"),
    "ema_ckpt.ops.consolidate": ("consolidate",),
    "ema_ckpt.ops.convert": ("convert", "reshard"),
    "ema_ckpt.ops.diff": ("diff",),
    "ema_ckpt.ops.inspect": ("inspect",),
    "ema_ckpt.ops.synthesize": ("synthesize",),
    "ema_ckpt.ops.verify": ("check", "verify"),
    "ema_ckpt.resume.restore": ("restore",),
    "ema_ckpt.resume.restore_phases": ("RestoreReport",),
    "ema_ckpt.resume.rng": ("rng_state",),
    "ema_ckpt.resume.save": ("save",),
    "ema_ckpt.state_dicts.rules.rule_file": ("load_rules",),
    "ema_ckpt.state_dicts.rules.rules": ("Rules",),
}
_NEED_TORCH = ("ema_ckpt.ema.", "ema_ckpt.resume.")
_RENAMED = {"open": "open_checkpoint"}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AccessError",
    "Checkpoint",
    "CollectiveError",
    "EmaCkptError",
    "HalfLife",
    "HalfLifeFraction",
    "OffloadedOptimizer",
    "PowerFunction",
    "RestoreReport",
    "Rules",
    "ShardedEMA",
    "SourceError",
    "StateError",
    "TargetError",
    "UnsafeError",
    "UsageError",
    "Warmup",
    "Window",
    "__version__",
    "check",
    "consolidate",
    "convert",
    "diff",
    "inspect",
    "latest",
    "load_rules",
    "master_weights",
    "offload_optimizer",
    "open",
    "reshard",
    "restore",
    "rng_state",
    "save",
    "synthesize",
    "verify",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ema_ckpt' has no attribute {name!r}")
    from importlib import import_module

    if home.startswith(_NEED_TORCH):
        from ema_ckpt.core.torch_import import import_torch

        import_torch(f"ema_ckpt.{name}")
    value = getattr(import_module(home), _RENAMED.get(name, name))
    if callable(value):  # where users import it from; pickles name this place too
        value.__module__, value.__name__, value.__qualname__ = __name__, name, name
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
