"""What rules mean, in torch's own operations on whole tensors: the oracle of the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Columns = list[dict[int | None, torch.Tensor]]


def apply_step(step: Mapping[str, Any], columns: Columns, targets: int) -> Columns:
    """One step as a file of rules writes it."""
    if "stack" in step:
        dim = step.get("dim", 0)
        return [
            {None: torch.stack([column[i] for i in range(len(column))], dim)} for column in columns
        ]
    if "unstack" in step:
        dim = step.get("dim", 0)
        return [dict(enumerate(torch.unbind(column[None], dim))) for column in columns]
    if "concatenate" in step:
        return [
            {
                m: joined(
                    [column[m] for column in columns], step["concatenate"], step.get("groups", 1)
                )
                for m in columns[0]
            }
        ]
    if "split" in step:
        sizes = step.get("sizes", [1] * step.get("parts", targets))
        parts: Columns = [{} for _ in sizes]
        for member, tensor in columns[0].items():
            for part, piece in zip(
                parts, cut(tensor, step["split"], sizes, step.get("groups", 1)), strict=True
            ):
                part[member] = piece
        return parts
    if "order" in step:
        return [columns[place] for place in step["order"]]
    return [
        {member: changed(step, tensor) for member, tensor in column.items()} for column in columns
    ]


def joined(tensors: Sequence[torch.Tensor], dim: int, groups: int) -> torch.Tensor:
    rounds = []
    chunked = [torch.tensor_split(tensor, groups, dim) for tensor in tensors]
    for group in range(groups):
        rounds += [chunks[group] for chunks in chunked]
    return torch.cat(rounds, dim)


def cut(tensor: torch.Tensor, dim: int, sizes: Sequence[int], groups: int) -> list[torch.Tensor]:
    collected: list[list[torch.Tensor]] = [[] for _ in sizes]
    for group in torch.tensor_split(tensor, groups, dim):
        unit = group.shape[dim] // sum(sizes)
        for part, piece in zip(
            collected, torch.split(group, [unit * size for size in sizes], dim), strict=True
        ):
            part.append(piece)
    return [torch.cat(part, dim) for part in collected]


def changed(step: Mapping[str, Any], tensor: torch.Tensor) -> torch.Tensor:
    if "transpose" in step:
        return tensor.transpose(*step["transpose"])
    if "permute" in step:
        return tensor.permute(*step["permute"])
    if "unflatten" in step:
        return tensor.unflatten(step["unflatten"], step["sizes"])
    return tensor.flatten(*step["flatten"])
