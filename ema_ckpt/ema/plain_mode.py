"""The mode in which averages are moved, made and read."""

from __future__ import annotations

import torch


class PlainMode:
    """A block outside inference mode and without autograd.

    As `torch.inference_mode(False), torch.no_grad()`, in a third of their 15 µs, which updates of
    small tensors feel.
    """

    __slots__ = ("_grad", "_outside")

    def __enter__(self) -> None:
        self._outside = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._outside is not None:
            self._outside.__enter__()
        self._grad = torch.is_grad_enabled()
        torch.set_grad_enabled(False)

    def __exit__(self, *exception: object) -> None:
        torch.set_grad_enabled(self._grad)
        if self._outside is not None:
            self._outside.__exit__(*exception)
