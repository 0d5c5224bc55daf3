"""Plain values of classes of torch and pathlib: text and tuples that remember their class."""

from __future__ import annotations


class Device(str):
    """A `torch.device`, as `cuda:0`."""

    __slots__ = ()


class Layout(str):
    """A `torch.layout`, as `torch.strided`."""

    __slots__ = ()


class PathText(str):
    """A path of `pathlib`, which `torch.load(weights_only=True)` does not read."""

    __slots__ = ()


TypedText = Device | Layout | PathText


class Size(tuple[object, ...]):
    """A `torch.Size`."""

    __slots__ = ()
