"""Tensors that an optimizer changes although they are no parameters of the module.

A temperature ``self.log_alpha = torch.zeros(1, requires_grad=True)``, or layers in a plain list: a replica holds a copy
of them whose gradient is not collected. So a training step whose optimizers change any gets its batches whole.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_dpx.errors import some_of


class LooseTensors:
    """Looks for them whenever the optimizers have other groups than before, which is usually once."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, int]] | None = None
        self._names: list[str] = []

    def find(self, optimizers: Sequence[Optimizer], module: nn.Module, known: Iterable[torch.Tensor]) -> list[str]:
        """Names of the tensors that ``optimizers`` change and that are not among ``known``.

        Args:
            optimizers: The user's.
            module: Whose attributes give them their names.
            known: The parameters of all replicas.
        """
        groups = [(id(optimizer), len(optimizer.param_groups)) for optimizer in optimizers]
        # Asked in every step, so parameters are listed only when an optimizer or a group is new.
        if groups != self._seen:
            self._seen = groups
            parameters = {id(parameter) for parameter in known}
            loose = {id(tensor): tensor for tensor in _changed_by(optimizers) if id(tensor) not in parameters}
            self._names = _names_of(loose, module) if loose else []
        return self._names


def reason_and_advice(names: Sequence[str]) -> tuple[str, str]:
    """Why a step whose optimizers change these tensors gets its batches whole, and what to do about it."""
    return (
        f"Its optimizers change tensors that are no parameters of the module ({some_of(names)}), so that no replica "
        "has them.",
        "Make them nn.Parameter, and keep submodules in nn.ModuleList or nn.ModuleDict.",
    )


def _changed_by(optimizers: Sequence[Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def _names_of(loose: dict[int, torch.Tensor], module: nn.Module) -> list[str]:
    named: dict[int, str] = {}
    for path, child in module.named_modules():
        for key, value in vars(child).items():
            if id(value) in loose:
                # By the attribute that holds it, as the tensor has no name of its own.
                named[id(value)] = ".".join(filter(None, ("self", path, key)))
    return [named.get(key) or _described(tensor) for key, tensor in loose.items()]


def _described(tensor: Any) -> str:
    return f"one of shape {tuple(tensor.shape)}"
