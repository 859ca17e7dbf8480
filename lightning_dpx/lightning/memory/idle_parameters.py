"""The parameters that a step leads no gradient to, such as a head that it does not use: no memory comes for them."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from lightning_dpx.torch_compat import nodes_of_graph


class IdleParameters:
    """Those of a module that no step has led a gradient to so far; none before a step was looked at."""

    def __init__(self) -> None:
        self._idle: list[nn.Parameter] = []

    @property
    def ids(self) -> frozenset[int]:
        """Their ids."""
        return frozenset(map(id, self._idle))

    def look(
        self, loss: torch.Tensor, reached_from: Sequence[nn.Parameter], parameters: Sequence[nn.Parameter]
    ) -> None:
        """Finds those that a backward of ``loss`` would not reach.

        Args:
            loss: Of a step of a copy of the module.
            reached_from: The parameters of that copy.
            parameters: Of the module itself, in the same order.
        """
        # A constant, as of a step that skips a batch, tells nothing of other batches.
        if loss.grad_fn is None:
            return
        reached = _leaves_of(loss)
        if reached is None or len(reached_from) != len(parameters):
            return
        pairs = zip(reached_from, parameters, strict=True)
        self._idle = [mine for copied, mine in pairs if mine.requires_grad and id(copied) not in reached]

    def some_have_come(self) -> bool:
        """Whether some have a gradient by now, and are idle no more: a step may use what the first one did not."""
        still = [parameter for parameter in self._idle if parameter.grad is None]
        have_come = len(still) < len(self._idle)
        self._idle = still
        return have_come


def _leaves_of(loss: torch.Tensor) -> set[int] | None:
    """The ids of the leaves that a backward of ``loss`` reaches; ``None`` where the graph does not tell."""
    leaves: set[int] = set()
    for node in nodes_of_graph([loss.grad_fn]):
        # A function of Python's may run a backward of its own, as a reentrant checkpoint does.
        if isinstance(node, BackwardCFunction):
            return None
        leaves.add(id(getattr(node, "variable", None)))
    return leaves
