"""How the replicas' own backwards run, once that of the merged loss has left gradients in its leaves.

    AfterAllForwards  slices --forward--> graphs ............. leaves' gradients --backward of each graph--> gradients
    WithEachForward   slices --forward, backward of each, one after the other--> gradients ... --scaled, added--> sums
    AfterSecondPass   slices --forward without graphs--> outputs ... leaves' gradients --forward, backward of each-->

The dots are where Lightning zeroes gradients, scales the loss and calls its backward. One of the three belongs to every
step: the second to micro-batches, the third to those whose loss needs the outputs of all.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lightning_dpx.gradient_sums import GradientSums
from lightning_dpx.replicas import BatchSlice, EarlyBackward, ReplicaSet, Roots


@dataclass(slots=True, eq=False)  # not frozen: K are made in every step
class Pending:
    """A replica's tensors that wait for their gradients, which the first backward leaves in ``leaves``."""

    batch_slice: BatchSlice
    tensors: list[torch.Tensor]
    leaves: list[torch.Tensor]
    weight: float = 1.0

    def catch(self, device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
        """A leaf on ``device`` with the numbers of ``tensor``, which waits for the gradient that the leaf gets."""
        # It is no part of the loss's graph, so no gradient will come for it.
        if not tensor.requires_grad:
            return tensor
        # A copy: what the user's function does to it in place must not reach the replica's graph.
        leaf = tensor.detach().to(device, copy=True).requires_grad_()
        self.tensors.append(tensor)
        self.leaves.append(leaf)
        return leaf

    def roots(self, weighted: dict[tuple[int, float], torch.Tensor]) -> Roots:
        """The tensors that this replica's own backward starts from, and their gradients.

        Args:
            weighted: Gradients that are known, by the leaf's id and the weight; gets those that are computed.
        """
        tensors = []
        gradients = []
        for tensor, leaf in zip(self.tensors, self.leaves, strict=True):
            of_leaf = leaf.grad
            if of_leaf is None:
                continue
            # Slices of equal weight share one product: K of them begin with the same leaf of a merged loss.
            key = id(leaf), self.weight
            if key not in weighted:
                weighted[key] = of_leaf if self.weight == 1 else of_leaf * self.weight
            gradient = weighted[key].to(tensor.device)
            tensors.append(tensor)
            # A loss may have shape () on one replica and (1,) on another; the leaf has one of them.
            if gradient.shape != tensor.shape:
                gradient = gradient.view_as(tensor)
            gradients.append(gradient)
        return tensors, gradients


class StepBackward(ABC):
    """The replicas' backwards of one step.

    Attributes:
        has_forwards: Whether it runs forwards once more, for which the buffers must be those of the first ones.
    """

    has_forwards: bool = False

    @abstractmethod
    def run(self, pending: Sequence[Pending], *, last: bool) -> None:
        """Adds the step's gradients to those of the replicas' parameters.

        Args:
            pending: What has waited for its gradients, and of which some have come.
            last: A reduction follows, so gradients may travel already; otherwise they accumulate.
        """

    @abstractmethod
    def abandon(self) -> None:
        """The forward is forgotten, so this does not run: it leaves no trace of the step."""


class AfterAllForwards(StepBackward):
    """One backward of each replica, through the graph of its slice.

    Args:
        replicas: The replicas and their workers.
        sums: How gradients travel while backward runs.
    """

    def __init__(self, replicas: ReplicaSet, sums: GradientSums) -> None:
        self._replicas = replicas
        self._sums = sums

    def run(self, pending: Sequence[Pending], *, last: bool) -> None:
        """See :class:`StepBackward`."""
        slices = [waiting.batch_slice for waiting in pending]
        # While gradients accumulate they stay with the replicas, and travel once for all batches.
        with self._sums.traveling(slices if last else ()):
            # By the id of a leaf, which ``pending`` holds as long as this is used.
            weighted: dict[tuple[int, float], torch.Tensor] = {}
            roots = [waiting.roots(weighted) for waiting in pending]
            self._replicas.backward(slices, roots)

    def abandon(self) -> None:
        """See :class:`StepBackward`; nothing has begun, and graphs go with what holds them."""


class WithEachForward(StepBackward):
    """Every micro-batch has run its backward before the next one's forward began, from an expected gradient.

    Args:
        early: Those backwards.
        sums: What they have sent already is forgotten with the step.
    """

    def __init__(self, early: EarlyBackward, sums: GradientSums) -> None:
        self._early = early
        self._sums = sums

    def run(self, pending: Sequence[Pending], *, last: bool) -> None:
        """See :class:`StepBackward`; the gradients become those of a loss whose gradient is known now."""
        # All wait for the one leaf of the merged loss.
        gradient = pending[0].leaves[0].grad
        if gradient is not None:
            weights = {waiting.batch_slice.replica.index: waiting.weight for waiting in pending}
            self._early.add_gradients(gradient, weights)

    def abandon(self) -> None:
        """See :class:`StepBackward`."""
        self._early.abandon()
        self._sums.forget()


class AfterSecondPass(StepBackward):
    """Every micro-batch runs forward once more, for the graph that its backward walks.

    Args:
        second: Does so, from the gradients of the outputs of the first pass.
    """

    has_forwards: bool = True

    def __init__(self, second: Callable[[Sequence[Pending]], None]) -> None:
        self._second = second

    def run(self, pending: Sequence[Pending], *, last: bool) -> None:
        """See :class:`StepBackward`."""
        self._second(pending)

    def abandon(self) -> None:
        """See :class:`StepBackward`; the first pass has left no graphs and no gradients."""
