"""What further trainers leave behind, laid out by hand as they do: nothing of it is lost without a word.

Each case says what is read, what is named as left out, or the code with which it is refused. Compared with what the
packages themselves wrote (November 2026, on a CPU with torch 2.13.0): Composer 0.32.1, open_clip 3.3.0,
sentence-transformers 6.2.0, DeepSpeed 0.19.8 (ZeRO 0, 2 and 3 on two ranks, equal to its `zero_to_fp32`), and, without a
case of their own here, OLMo-core 3.0.0 and litgpt 0.5.13. The others are laid out from their source.
"""

from __future__ import annotations

import json
import pickle
import tarfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ema_ckpt
from ema_ckpt.core.errors import EmaCkptError

State = dict[str, torch.Tensor]


def weights(shift: float = 0.0, prefix: str = "") -> State:
    return {
        f"{prefix}layer.weight": torch.arange(12.0).reshape(3, 4) + shift,
        f"{prefix}layer.bias": torch.ones(3) + shift,
    }


def adam() -> dict[str, Any]:
    state = {number: {"step": torch.tensor(3.0), "exp_avg": torch.ones(3)} for number in range(2)}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}


def saved(value: object, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return path


# What is read: a function that lays it out and returns the path to name; the tree that `consolidate` writes,
# the values in it, and what has to be said.

READ: dict[str, tuple[Callable[[Path], Path], str, State, tuple[str, ...]]] = {}


def read(tree: str, values: State, *said: str) -> Callable[[Callable[[Path], Path]], None]:
    def add(write: Callable[[Path], Path]) -> None:
        READ[write.__name__] = (write, tree, values, said)

    return add


@read("state_dict", weights(), "epoch_latest.pt is left out")
def open_clip(root: Path) -> Path:
    for epoch in ("4", "5", "latest"):
        state = {"epoch": 5, "name": "run", "state_dict": weights(prefix="module.")}
        saved({**state, "optimizer": adam()}, root / "checkpoints" / f"epoch_{epoch}.pt")
    return root


@read("model", weights(), "'extra_state.ema'", "'extra_state.ema_fp32_params'")
def fairseq(root: Path) -> Path:
    extra = {"epoch": 1, "ema": weights(0.5), "ema_fp32_params": weights(0.25)}
    state = {"cfg": {"task": {"a": 1}}, "model": weights(), "extra_state": extra}
    return saved({**state, "last_optimizer_state": adam()}, root / "checkpoint_last.pt")


@read("model", weights())
def espnet(root: Path) -> Path:
    state = {
        "model": weights(),
        "reporter": {"epoch": 1},
        "optimizers": [adam()],
        "schedulers": [None],
    }
    return saved(state, root / "checkpoint.pth")


@read("state_dict", weights(), "-EMA.ckpt is left out")
def nemo_with_its_average_in_a_file_beside(root: Path) -> Path:
    for name, shift in (("m-epoch=3.ckpt", 0.0), ("m-epoch=3-EMA.ckpt", 0.5)):
        saved({"state_dict": weights(shift), "optimizer_states": [adam()]}, root / name)
    return root


@read("model_ema", weights(0.5))
def k_diffusion(root: Path) -> Path:
    state = {
        "model": weights(),
        "model_ema": weights(0.5),
        "opt": adam(),
        "epoch": 1,
        "gns_stats": None,
    }
    more = {"ema_sched": {"power": 0.6}, "ema_stats": {"loss": 0.3, "n": torch.tensor(1.0)}}
    return saved({**state, **more}, root / "x_00000010.pth")


@read("module", weights(), "2 files of DeepSpeed's experts", "layer_0_expert_1_mp_rank_00")
def deepspeed_experts(root: Path) -> Path:
    step = root / "global_step3"
    for expert in range(2):
        saved(weights(expert + 2.0), step / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt")
    return saved({"module": weights(), "num_experts": [2]}, step / "mp_rank_00_model_states.pt")


@read("", weights(), "recipe_state is left out", "adapter_model.safetensors is left out")
def torchtune(root: Path) -> Path:
    epoch = root / "epoch_0"
    epoch.mkdir()
    save_file(weights(), epoch / "ft-model-00001-of-00001.safetensors")
    index = {
        "metadata": {},
        "weight_map": dict.fromkeys(weights(), "ft-model-00001-of-00001.safetensors"),
    }
    (epoch / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(weights(2.0), epoch / "adapter_model.safetensors")
    saved({"optimizer": adam(), "epochs_run": 1}, root / "recipe_state" / "recipe_state.pt")
    return root


@read("module", weights(), "zero is left out")
def deepspeed_universal(root: Path) -> Path:
    step = root / "global_step10_universal"
    saved(
        {"module": weights(), "universal_checkpoint_info": {}}, step / "mp_rank_00_model_states.pt"
    )
    for name, tensor in weights(0.125).items():
        saved({"param": tensor}, step / "zero" / name / "fp32.pt")
    saved({"optimizer_state_dict": {"param_groups": []}}, step / "zero" / "optimizer_state.pt")
    return root


def composer(
    root: Path, *, is_active: bool, is_named: bool = False, optimizer: bool = True
) -> Path:
    """As Composer 0.32 saves: while `ema_weights_active`, model and dictionary are exchanged."""
    ema_model = {"named_parameters_dict": weights(0.5), "named_buffers_dict": {}}
    algorithm = {"repr": "EMA", "ema_model": ema_model, "ema_weights_active": is_active}
    sgd = {
        "state": {name: {"momentum_buffer": None} for name in weights()},
        "param_groups": [{"lr": 0.1, "params": list(weights())}],
    }
    algorithms = {"EMA": algorithm} if is_named else [("EMA", algorithm)]
    state: dict[str, Any] = {"model": weights(), "algorithms": algorithms}
    if optimizer:
        state["optimizers"] = {"DecoupledSGDW": sgd}
    return saved({"state": state, "rng": [{"python": 1}]}, root / "ep2-ba4-rank0.pt")


@read("state.model", weights())
def composer_with_the_average_in_the_model(root: Path) -> Path:
    return composer(root, is_active=True)


@read("state.model", weights())
def composer_without_an_optimizer(root: Path) -> Path:
    return composer(root, is_active=True, optimizer=False)


@read("state.model", weights())
def early_composer_with_the_average_in_the_model(root: Path) -> Path:
    return composer(root, is_active=True, is_named=True)


@read("state.algorithms.EMA.ema_model.named_parameters_dict", weights(0.5))
def early_composer_with_the_average_beside_the_model(root: Path) -> Path:
    return composer(root, is_active=False, is_named=True, optimizer=False)


@read("state.algorithms.0.1.ema_model.named_parameters_dict", weights(0.5))
def composer_with_the_average_beside_the_model(root: Path) -> Path:
    return composer(root, is_active=False)


@read("state.model", weights())
def an_optimizer_without_tensors(root: Path) -> Path:
    sgd = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    state = {"model": weights(), "optimizer": sgd, "teacher": weights(0.5)}
    return saved({"state": state}, root / "last.pt")


@read("state.model", weights(), "'state.algorithms.0.1.ema_model'")
def composer_of_an_old_release(root: Path) -> Path:
    average = ("EMA", {"ema_model": {"named_parameters_dict": weights(0.5)}})
    state = {"model": weights(), "optimizers": {"AdamW": adam()}, "algorithms": [average]}
    return saved({"state": state, "rng": [{"python": 1}]}, root / "ep0-ba4-rank0.pt")


@read("state_dict", weights())
def xtuner(root: Path) -> Path:
    state = {
        "meta": {"iter": 500},
        "state_dict": weights(),
        "message_hub": {"log": 1},
        "optimizer": adam(),
    }
    return saved(state, root / "iter_500.pth").parent


@read("module", weights(), "the optimizer's state in ZeRO partitions is not read")
def xtuner_with_deepspeed(root: Path) -> Path:
    step = root / "iter_500.pth"  # a directory
    shapes = OrderedDict((name, tensor.shape) for name, tensor in weights().items())
    saved({"module": weights(), "param_shapes": [shapes]}, step / "mp_rank_00_model_states.pt")
    row = torch.cat([*[tensor.reshape(-1) for tensor in weights().values()], torch.zeros(1)])
    for rank in range(2):
        piece = [row.chunk(2)[rank].clone()]
        state = {"zero_stage": 2, "partition_count": 2, "single_partition_of_fp32_groups": piece}
        saved(
            {"optimizer_state_dict": state},
            step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
    return root


@read("", weights(), "2_Dense is left out")
def sentence_transformers(root: Path) -> Path:
    save_file(weights(), root / "model.safetensors")
    (root / "2_Dense").mkdir()
    save_file(weights(3.0), root / "2_Dense" / "model.safetensors")
    return root


@read("ema_state_dict", weights(0.5))
def trees_with_long_names(root: Path) -> Path:
    state = {
        "model_state_dict": weights(),
        "ema_state_dict": weights(0.5),
        "optimizer_state_dict": adam(),
    }
    return saved(state, root / "last.pt")


@read("ema_state", weights(0.5))
def detectron(root: Path) -> Path:
    state = {
        "model": weights(),
        "optimizer": adam(),
        "scheduler": {},
        "iteration": 9,
        "ema_state": weights(0.5),
    }
    return saved(state, root / "model_0000999.pth")


@read("", {name: tensor.int() for name, tensor in weights().items()})
def gptq(root: Path) -> Path:
    save_file(
        {name: tensor.int() for name, tensor in weights().items()}, root / "model.safetensors"
    )
    return root


@pytest.mark.parametrize("case", READ)
def test_it_is_read_and_what_is_left_out_is_said(tmp_path: Path, case: str) -> None:
    write, tree, values, said = READ[case]
    (tmp_path / "run").mkdir()
    path = write(tmp_path / "run")
    written = ema_ckpt.consolidate(path, tmp_path / "out.pt")
    stored = torch.load(tmp_path / "out.pt", weights_only=True)
    assert (written.tree, stored.keys()) == (tree, values.keys())
    assert all(torch.equal(stored[name], tensor) for name, tensor in values.items())
    told = " ".join(warning.message for warning in written.warnings)
    assert all(part in told for part in said), told
    seen = " ".join(warning.message for warning in ema_ckpt.inspect(path).warnings)
    assert all(part in seen for part in said), seen


# What is refused: a function that lays it out, the code, and what the one line names.

REFUSED: dict[str, tuple[Callable[[Path], Path], str, tuple[str, ...]]] = {}


def refused(code: str, *named: str) -> Callable[[Callable[[Path], Path]], None]:
    def add(write: Callable[[Path], Path]) -> None:
        REFUSED[write.__name__] = (write, code, named)

    return add


@refused("unsupported", "tar archive")
def nemo_archive(root: Path) -> Path:
    saved(weights(), root / "model_weights.ckpt")
    with tarfile.open(root / "model.nemo", "w") as archive:
        archive.add(root / "model_weights.ckpt", "model_weights.ckpt")
    return root / "model.nemo"


class Persistent:
    """As EDM2's networks pickle: a call of a function that runs the source text in its argument."""

    def __reduce__(self) -> tuple[object, ...]:
        return persistent, ({"module_src": "source", "state": {"_parameters": weights()}},)


def persistent(meta: object) -> object:
    return meta


@refused("empty-selection", "'ema'")
def edm2_snapshot(root: Path) -> Path:
    (root / "network-snapshot-0000001-0.100.pkl").write_bytes(
        pickle.dumps({"ema": Persistent(), "dataset_kwargs": {"path": "x"}})
    )
    return root / "network-snapshot-0000001-0.100.pkl"


@refused("not-a-checkpoint", "msgpack")
def flax(root: Path) -> Path:
    (root / "flax_model.msgpack").write_bytes(b"\x81\xa6params\x81\xa1a\xc7\x10\x01" + bytes(64))
    return root / "flax_model.msgpack"


@refused("unsupported", "consolidated.00.pth", "different plain tensor on each rank")
def llama_of_two_ranks(root: Path) -> Path:
    for rank in range(2):
        saved(weights(rank), root / f"consolidated.0{rank}.pth")
    return root


@refused("incomplete", "one rank of 2", "consolidated.*.pth")
def llama_one_of_two(root: Path) -> Path:
    return llama(root) / "consolidated.00.pth"


def llama(root: Path) -> Path:
    for rank in range(2):
        saved(weights(rank), root / f"consolidated.0{rank}.pth")
    return root


@refused("incomplete", "mp_rank_00", "mp_rank_01")
def megatron_one_of_two(root: Path) -> Path:
    for rank in range(2):
        state = {"model": {"language_model": weights(rank)}, "iteration": 100, "optimizer": adam()}
        saved(state, root / "iter_0000100" / f"mp_rank_0{rank}" / "model_optim_rng.pt")
    return root / "iter_0000100" / "mp_rank_00"


@refused("ambiguous-path", "D_1000.pth", "G_1000.pth")
def generator_and_discriminator(root: Path) -> Path:
    for name in ("G", "D"):
        saved(
            {"model": weights(), "iteration": 1000, "optimizer": adam()}, root / f"{name}_1000.pth"
        )
    return root


@refused("ambiguous-path", "model.pt", "train.pt")
def olmo(root: Path) -> Path:
    for name, value in (("model", weights()), ("optim", adam()), ("train", {"epoch": 1})):
        saved(value, root / "step1000-unsharded" / f"{name}.pt")
    return root


@refused("empty-selection", "iteration")
def pipeline_of_deepspeed(root: Path) -> Path:
    saved(weights(), root / "layer_00-model_00-model_states.pt")
    saved(weights(1.0), root / "layer_01-model_00-model_states.pt")
    saved({"module": None, "iteration": 5}, root / "mp_rank_00_model_states.pt")
    return root


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_for_what_it_is(tmp_path: Path, case: str) -> None:
    write, code, named = REFUSED[case]
    (tmp_path / "run").mkdir()
    path = write(tmp_path / "run")
    with pytest.raises(EmaCkptError) as caught:
        ema_ckpt.consolidate(path, tmp_path / "out.pt")
    assert caught.value.code == code
    assert all(part in str(caught.value) for part in named), str(caught.value)
    assert not (tmp_path / "out.pt").exists()


def test_ranks_of_another_sort_are_no_pieces(tmp_path: Path) -> None:
    for rank in (8, 16):
        saved(weights(rank), tmp_path / f"rank_{rank}" / "model.pt")
    ema_ckpt.consolidate(tmp_path / "rank_8", tmp_path / "out.pt")
    assert torch.equal(torch.load(tmp_path / "out.pt")["layer.bias"], torch.ones(3) + 8)
