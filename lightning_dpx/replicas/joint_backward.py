"""One backward for replicas that would walk one after the other: autograd's engine is entered once, not K times.

Of the nodes that are ready, the engine takes the one that was made last. So it walks the last replica's graph to its
end, then the one before; a hook on every root tells whose turn it is.
"""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lightning_dpx.replicas.collectives import Rendezvous
from lightning_dpx.replicas.context import RendezvousSlot, ReplicaRank, as_rank, become_rank
from lightning_dpx.torch_compat import run_backward

Roots = tuple[list[torch.Tensor], list[torch.Tensor]]  # tensors, and the gradient of each


def joint_backward(roots: Sequence[Roots], failed: Callable[[int, Any], None]) -> None:
    """The backward of K replicas in the calling thread; code that runs in a replica's part finds its rank.

    Args:
        roots: K pairs of the tensors to start from, made in this order, and their gradients.
        failed: Told the place (0 to K - 1) of the replica that raised an error, and the error, which is raised on.
    """
    ranks = _ranks_of(len(roots))
    # The last replica with anything to do begins, so nobody need tell it: a hook is 5 us of a step.
    first = max((index for index, (tensors, _) in enumerate(roots) if tensors), default=len(roots) - 1)
    turns = _Turns(ranks, first)
    handles = []
    all_tensors: list[torch.Tensor] = []
    all_gradients: list[torch.Tensor] = []
    for index, (tensors, gradients) in enumerate(roots):
        all_tensors += tensors
        all_gradients += gradients
        if index < first:
            enter = partial(turns.enter, index)
            # A root that is a leaf has no node to hang a hook on.
            handles += [tensor.grad_fn.register_prehook(enter) for tensor in tensors if tensor.grad_fn is not None]
    with as_rank(ranks[turns.place]):
        try:
            run_backward(all_tensors, all_gradients)
        except BaseException as error:
            failed(turns.place, error)
            raise
        finally:
            for handle in handles:
                handle.remove()


@functools.lru_cache(maxsize=64)  # nobody can meet in it, so it holds nothing of a step and serves for all
def _ranks_of(number: int) -> list[ReplicaRank]:
    refusal = "no step before met in it, so the backward of all replicas is one; ask for execution='threads'"
    slot = RendezvousSlot(Rendezvous(number, refusal=refusal))
    return [ReplicaRank(index, number, slot) for index in range(number)]


class _Turns:
    """Whose turn it is in a joint backward.

    Attributes:
        place: The replica's, from 0 to K - 1.
    """

    __slots__ = ("_ranks", "place")

    def __init__(self, ranks: Sequence[ReplicaRank], first: int) -> None:
        self._ranks = ranks
        self.place = first

    def enter(self, place: int, _gradients: object) -> None:
        """Called before the node of a replica's root."""
        self.place = place
        become_rank(self._ranks[place])
