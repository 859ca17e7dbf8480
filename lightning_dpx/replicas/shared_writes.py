"""Notices that a step wrote a parameter whose memory several replicas share: each of them wrote it once more."""

from collections.abc import Sequence

import torch
from torch import nn

from lightning_dpx.replicas.replica import Replica
from lightning_dpx.replicas.tensor_checksums import checksums
from lightning_dpx.torch_compat import version_counter

_STEPS_WITH_CHECKSUMS = 3  # reading all bits of all parameters is too dear for every step


class SharedWrites:
    """Compares the parameters after a forward with what they were before it, where replicas share their memory.

    A write moves a parameter's version counter. One through ``.data`` leaves no trace there, so in the first steps the
    bits are compared, too.

    Args:
        replicas: All of them, the user's module first.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        root, *others = replicas
        self.are_possible: bool = any(replica.device == root.device for replica in others)
        self._steps_left = _STEPS_WITH_CHECKSUMS
        self._parameters: list[nn.Parameter] = []
        self._versions: list[int] = []
        self._sums: list[int] = []

    def begin(self, parameters: list[nn.Parameter], versions: list[int]) -> None:
        """Before a forward: what the parameters are, and their versions."""
        if not self.are_possible:
            return
        self._parameters = parameters
        self._versions = versions
        self._sums = []  # those of a step of one replica, which nothing compared, are of no use any more
        if self._steps_left:
            self._sums = checksums(parameters)
            self._steps_left -= 1

    def find(self) -> nn.Parameter | None:
        """After it: a parameter that was written since :meth:`begin`."""
        sums = self._sums
        self._sums = []
        now = checksums(self._parameters) if sums else []
        if sums == now and list(map(version_counter, self._parameters)) == self._versions:
            return None
        for index, (parameter, version) in enumerate(zip(self._parameters, self._versions, strict=True)):
            if version_counter(parameter) != version or (sums and sums[index] != now[index]):
                return parameter
        return None


class UnseenWrites:
    """Notices that the user's parameters were written without a trace, by the bits of all of them.

    Attributes:
        by_hooks: Whether there are hooks that may do so, beside owners that would not get what they wrote.
        by_step: Whether the coming step may do so: one that has the whole batch, beside such owners.
    """

    def __init__(self) -> None:
        self.by_hooks: bool = False
        self.by_step: bool = False
        self._sums: list[int] = []

    @property
    def has_begun(self) -> bool:
        """Whether there is something to compare with."""
        return bool(self._sums)

    def begin(self, parameters: Sequence[torch.Tensor]) -> None:
        """The parameters are as they are meant to be."""
        self._sums = checksums(parameters) if self.by_hooks or self.by_step else []

    def are_in(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the parameters have other bits than at :meth:`begin`."""
        return self.has_begun and checksums(parameters) != self._sums
