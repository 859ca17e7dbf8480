"""Values of the first replica's parameters, on their way to replicas on other devices: small ones travel together.

    parameters --join--> bundle --one copy per device--> bundle there --split--> the replica's parameters

A copy between devices costs the host about 10 us whatever its size, so 200 small parameters of eight replicas took
15 ms of a step one by one. A bundle is small, too, because for a moment it takes memory on both sides.
"""

import operator
from collections.abc import Sequence

import torch
from torch import nn

from lightning_dpx.devices import copy_values, is_host
from lightning_dpx.torch_compat import flatten_dense, unflatten_dense

SMALL = 1 << 14  # elements of a parameter that travels with others; the copy of a larger one costs more than its start
BUNDLE = 1 << 18  # elements of a bundle: 1 MiB of float32
_DEVICE = operator.attrgetter("device")  # mapped over every parameter of every step, not looped
_DTYPE = operator.attrgetter("dtype")


class ParameterCopies:
    """What travels together from the parameters of one replica to those of another.

    Args:
        sources: N parameters.
        targets: Their N counterparts; those that are the same object need no copy.
    """

    def __init__(self, sources: Sequence[nn.Parameter], targets: Sequence[nn.Parameter]) -> None:
        self._bundles: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._single: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        # A bundle is one flat tensor, of one dtype, on its way from one device to one other.
        groups: dict[tuple[torch.dtype, torch.device, torch.device], list[int]] = {}
        for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
            if source is target:
                continue
            if _is_bundled(source) and _is_bundled(target):
                groups.setdefault((source.dtype, source.device, target.device), []).append(index)
            else:
                self._single[0].append(source)
                self._single[1].append(target)
        for indices in groups.values():
            for bundle in _bundles(indices, sources):
                pair = [sources[index] for index in bundle], [targets[index] for index in bundle]
                self._bundles.append(pair)  # type: ignore[arg-type]

        self._sources = sources
        self._targets = targets
        self._kinds = [*_kinds(sources), *_kinds(targets)]

    def is_for(self, sources: Sequence[nn.Parameter], targets: Sequence[nn.Parameter]) -> bool:
        """Whether these are the parameters that it was made for, of the dtypes and on the devices that they had."""
        # A replica keeps its list of parameters as long as they are the same objects.
        if sources is not self._sources or targets is not self._targets:
            return False
        return [*_kinds(sources), *_kinds(targets)] == self._kinds

    @torch.no_grad()
    def copy(self) -> None:
        """The targets get the values of the sources."""
        for sources, targets in self._bundles:
            device = targets[0].device
            # The split below would read on the host before a copy that nobody waits for has arrived.
            arrived = flatten_dense(sources).to(device, non_blocking=not is_host(device))
            copy_values(targets, list(unflatten_dense(arrived, targets)))
        sources, targets = self._single
        if sources:
            copy_values(targets, sources)


def _kinds(parameters: Sequence[nn.Parameter]) -> list[object]:
    return [*map(_DEVICE, parameters), *map(_DTYPE, parameters)]


def _is_bundled(parameter: nn.Parameter) -> bool:
    """Whether its elements are all that there is to it, and few."""
    is_plain = type(parameter) is nn.Parameter and parameter.layout == torch.strided
    return is_plain and 0 < parameter.numel() <= SMALL


def _bundles(indices: Sequence[int], sources: Sequence[nn.Parameter]) -> list[list[int]]:
    bundles: list[list[int]] = [[]]
    size = 0
    for index in indices:
        elements = sources[index].numel()
        if bundles[-1] and size + elements > BUNDLE:
            bundles.append([])
            size = 0
        bundles[-1].append(index)
        size += elements
    return bundles
