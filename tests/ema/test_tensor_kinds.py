"""Which tensors have elements that a checkpoint can bring back, and what is said of the others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ema_ckpt.core.errors import StateError, UsageError
from ema_ckpt.ema.manager import ShardedEMA
from ema_ckpt.ema.model.tensor_kinds import on_host, refuse_unreadable


class Named(Tensor):
    """Torch's own tensor with another name, as fastai's and torchvision's are."""


class Halves(Tensor):
    """Keeps its values in two other tensors, as quantised ones do."""

    def __new__(cls, values: Tensor) -> Halves:
        made: Halves = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)
        made.halves = [values / 2, values / 2]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(sum(args[0].halves))
        return func(*[sum(a.halves) if isinstance(a, cls) else a for a in args], **(kwargs or {}))


def quiet(make: Callable[[], Tensor]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


UNREADABLE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "subclass": (lambda: Halves(torch.ones(3)), r"of the class .*test_tensor_kinds\.Halves"),
    "sparse": (lambda: torch.eye(3).to_sparse(), r"layout torch\.sparse_coo"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), r"layout torch\.sparse_csr"),
    "meta": (lambda: torch.empty(3, device="meta"), "meta device"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        "type quint8",
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "NestedTensor",
    ),
    "bits": (lambda: torch.ones(4, dtype=torch.uint8).view(torch.bits8), "type bits8"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_kinds_without_a_reader_are_refused_by_name(kind: str) -> None:
    make, message = UNREADABLE[kind]
    with pytest.raises(StateError, match=message) as caught:
        refuse_unreadable("a.b", quiet(make))
    assert caught.value.code == "unsupported"
    assert str(caught.value).startswith("'a.b' ")


READABLE: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.ones(3),
    "parameter": lambda: nn.Parameter(torch.ones(3)),
    "buffer": lambda: nn.Buffer(torch.ones(3)),
    "named": lambda: torch.arange(3.0).as_subclass(Named),
    "expanded": lambda: torch.ones(1).expand(4),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
}


@pytest.mark.parametrize("kind", READABLE)
def test_others_are_taken_with_the_values_they_mean(kind: str) -> None:
    tensor = READABLE[kind]()
    refuse_unreadable("a.b", tensor)
    host = on_host(tensor)
    assert type(host) is Tensor
    assert not host.is_conj()
    assert not host.is_neg()
    assert host.tolist() == tensor.detach().tolist()


@pytest.mark.parametrize("kind", ["sparse", "quantised", "subclass"])
def test_a_manager_refuses_what_it_would_average(kind: str) -> None:
    model = nn.Module()
    tensor = quiet(UNREADABLE[kind][0])
    model.register_parameter("odd", nn.Parameter(tensor, requires_grad=False))
    model.register_parameter("even", nn.Parameter(torch.ones(2)))
    assert len(ShardedEMA(model)._averages.shadows) == 1
    if kind != "quantised":  # it is no floating point type, and not averaged
        with pytest.raises(StateError, match=r"'odd' .*no reader"):
            ShardedEMA(model, include="*")


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2).state_dict(), nn.Linear(2, 2).parameters(), None, [nn.Linear(2, 2)]]
)
def test_what_is_no_module_is_refused(model: Any) -> None:
    ema = ShardedEMA(nn.Linear(2, 2))
    for call in (ShardedEMA, ema.rebind, ema.copy_to):
        with pytest.raises(UsageError, match=rf"found {type(model).__name__}: give the module"):
            call(model)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.ones(2, 2, device="meta"), r"on meta, .*on cpu: return it \.to\(param\.device\)"),
        ([1.0], "a list: return a tensor, or None"),
        (torch.ones(3, 2), r"this rank's shard is \(2, 2\)"),
    ],
)
def test_a_source_of_other_tensors_is_refused(given: Any, message: str) -> None:
    model = nn.Linear(2, 2, bias=False)
    with pytest.raises(StateError, match=rf"source gives 'weight' .*{message}"):
        ShardedEMA(model, source=lambda *_: given)
    later = [None]
    ema = ShardedEMA(model, source=lambda *_: later[0])
    later[0] = given
    with pytest.raises(StateError, match=message):
        ema.update()
    assert ema.num_updates == 0
