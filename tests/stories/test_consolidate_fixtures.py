"""Every committed checkpoint, consolidated to every format and read back by the tools that people use.

The truth (`fixtures/expected.json`) was taken from the tensors in memory when they were saved; the readers
are `safetensors`, `torch.load` and `transformers`.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import ema_ckpt

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())

# Read by name, or refused by name: what happens to these is told in the table of fixtures/README.md.
REFUSED = {
    *("odd/safetensors-serialization-w2", "odd/zstd-w2", "odd/legacy.pt"),
    *("odd/lazy-bits", "odd/lazy-bits.pt"),
}
SETTINGS = {"decay", "num_updates", "samples_seen", "config"}
TORCH_ONLY = {"complex32", "complex128", "float4_e2m1fn_x2"}
FLAT_TREES = {"safetensors/net-and-ema.safetensors": ("net", "net_ema")}
TIES = {"torch/tied.pt": {"head.weight": "embed.weight"}}
# Names that a foreign file only records as tied; they are written out where that is asked for.
RECORDED = {"safetensors/tied-save-model.safetensors": {"head.weight": "embed.weight"}}


@dataclass(frozen=True)
class Case:
    """One tree of one fixture: `tensors` is {name inside the tree: (shape, dtype, sha256)}."""

    fixture: str
    tree: str
    tensors: dict[str, tuple[list[int], str, str]]

    def __str__(self) -> str:
        return f"{self.fixture}:{self.tree}"


def _facts(entry: dict) -> tuple[list[int], str, str]:
    return entry["shape"], entry["dtype"], entry["sha256"]


def _trees(fixture: str, entry: dict) -> dict[str, dict[str, tuple[list[int], str, str]]]:
    """The trees of a fixture by the nesting recorded when it was saved."""
    trees: dict[str, dict] = {}
    for name, facts in entry["tensors"].items():
        path = facts["path"]
        if fixture in FLAT_TREES:
            path = name.split(".", 1)
        tree = str(path[0]) if len(path) > 1 else ""
        trees.setdefault(tree, {})[".".join(map(str, path[1:] if len(path) > 1 else path))] = (
            _facts(facts)
        )
    return trees


def _inside(tree: str, tensors: dict) -> dict:
    """An average is written under the plain names of its weights: without its settings, or else all that float."""
    if not tree.endswith("ema"):
        return tensors
    if any(name.startswith("weights.") for name in tensors):
        return {
            name.removeprefix("weights."): facts
            for name, facts in tensors.items()
            if name not in SETTINGS
        }
    return {name: facts for name, facts in tensors.items() if "float" in facts[1]}


def _cases() -> Iterator[Case]:
    for fixture, entry in EXPECTED.items():
        if fixture in REFUSED:
            continue
        for tree, tensors in _trees(fixture, entry).items():
            if tree != "optimizer":
                yield Case(fixture, tree, _inside(tree, tensors))


CASES = list(_cases())


def _digest(tensor: torch.Tensor) -> str:
    plain = tensor.detach().contiguous()
    return hashlib.sha256(
        ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size())
    ).hexdigest()


def _seen(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[list[int], str, str]]:
    return {
        k: (list(t.shape), str(t.dtype).removeprefix("torch."), _digest(t))
        for k, t in tensors.items()
    }


def _fits_safetensors(case: Case) -> bool:
    return not TORCH_ONLY & {dtype for _, dtype, _ in case.tensors.values()}


@pytest.mark.parametrize("case", [c for c in CASES if _fits_safetensors(c)], ids=str)
def test_one_safetensors_file_holds_the_truth(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    written = ema_ckpt.consolidate(FIXTURES / case.fixture, out, tree=case.tree)
    ties = TIES.get(case.fixture) or RECORDED.get(case.fixture, {})
    assert _seen(load_file(out)) == {k: v for k, v in case.tensors.items() if k not in ties}
    with safe_open(out, "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert {alias: file.metadata()[alias] for alias in ties} == ties
    assert written.ties == ties
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_torch_file_holds_the_truth(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    ema_ckpt.consolidate(FIXTURES / case.fixture, out, tree=case.tree)
    loaded = torch.load(out, weights_only=True, mmap=True)
    assert _seen(loaded) == case.tensors
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("case", [c for c in CASES if _fits_safetensors(c)], ids=str)
def test_a_hugging_face_directory_holds_the_truth(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ema_ckpt.consolidate(
        FIXTURES / case.fixture, out, tree=case.tree, max_shard_size=200, expand_ties=True
    )
    index_file = out / "model.safetensors.index.json"
    shards = sorted(out.glob("*.safetensors"))
    loaded = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    again = {name: case.tensors[kept] for name, kept in RECORDED.get(case.fixture, {}).items()}
    assert _seen(loaded) == {**case.tensors, **again}
    if not index_file.exists():
        assert [shard.name for shard in shards] == ["model.safetensors"]
        return
    index = json.loads(index_file.read_text())
    holds = {name: shard.name for shard in shards for name in load_file(shard)}
    assert index["weight_map"] == holds
    assert index["metadata"]["total_size"] == sum(
        t.numel() * t.element_size() for t in loaded.values()
    )


@pytest.mark.parametrize("case", [c for c in CASES if not _fits_safetensors(c)], ids=str)
def test_a_dtype_that_safetensors_lacks_is_refused_by_name(case: Case, tmp_path: Path) -> None:
    with pytest.raises(ema_ckpt.EmaCkptError) as caught:
        ema_ckpt.consolidate(FIXTURES / case.fixture, tmp_path / "out.safetensors", tree=case.tree)
    assert caught.value.code == "unsupported"
    assert any(repr(name) in str(caught.value) for name in case.tensors)
    assert not list(tmp_path.iterdir())


def test_every_kind_of_checkpoint_is_among_the_cases() -> None:
    seen = {case.fixture.partition("/")[0] for case in CASES}
    assert seen == {"dcp", "hf", "nasty", "odd", "rank-files", "safetensors", "tiny-lm", "torch"}
    assert {EXPECTED[c.fixture]["world_size"] for c in CASES if c.fixture.startswith("dcp/")} == {
        1,
        2,
        4,
        8,
    }


# ---------------------------------------------------------------- transformers


def _quietly(directory: Path) -> torch.nn.Module:
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)


def _loss(model: torch.nn.Module) -> float:
    """Mean loss of a text that the model was not shown, one character a token."""
    alphabet = json.loads((FIXTURES / "tiny-lm-config" / "alphabet.json").read_text())
    text = "The function returns a list of all the names that are defined in "[:64]
    ids = torch.tensor([[alphabet.index(c) for c in text]])
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize("max_shard_size", ["5GB", "100kB"])
def test_transformers_loads_the_average_of_the_trained_model(
    max_shard_size: str, tmp_path: Path
) -> None:
    out = tmp_path / "model"
    written = ema_ckpt.consolidate(FIXTURES / "tiny-lm", out, max_shard_size=max_shard_size)
    assert written.tree == "ema"
    shards = [file.path for file in written.files if file.path.endswith(".safetensors")]
    assert (len(shards) > 1) == (max_shard_size != "5GB")
    (out / "config.json").write_text((FIXTURES / "tiny-lm-config" / "config.json").read_text())
    model = _quietly(out)
    wanted = next(c.tensors for c in CASES if str(c) == "tiny-lm:ema")
    assert _seen(dict(model.state_dict())) == wanted
    assert _loss(model) < 2.2  # 4.6 is what an untrained one has: log(95)


@pytest.mark.parametrize("name", ["one-file", "sharded"])
def test_transformers_loads_its_own_checkpoint_written_anew(name: str, tmp_path: Path) -> None:
    out = tmp_path / "model"
    ema_ckpt.consolidate(FIXTURES / "hf" / name, out)
    (out / "config.json").write_text((FIXTURES / "hf" / name / "config.json").read_text())
    wanted = next(c.tensors for c in CASES if str(c) == f"hf/{name}:")
    assert _seen(dict(_quietly(out).state_dict())) == wanted


def test_a_torch_file_loads_strictly_into_the_model(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    ema_ckpt.consolidate(FIXTURES / "tiny-lm", tmp_path / "ema.pt")
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(FIXTURES / "tiny-lm-config"))
    model.load_state_dict(
        torch.load(tmp_path / "ema.pt", weights_only=True, mmap=True), strict=True
    )
    assert _loss(model) < 2.2
