"""One backward for replicas that would walk one after the other: autograd's engine is entered once, not K times.

Of the nodes that are ready, the engine takes the one that was made last. So it walks the last replica's graph to its
end, then the one before; a hook on every root tells whose turn it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_dpx.replicas.context import ReplicaRank, as_rank, become_rank

Roots = tuple[list[torch.Tensor], list[torch.Tensor]]  # tensors, and the gradient of each


def joint_backward(ranks: Sequence[ReplicaRank], roots: Sequence[Roots], failed: Callable[[int, Any], None]) -> None:
    """The backward of K replicas in the calling thread.

    Args:
        ranks: K ranks; code that runs in a replica's part finds its own.
        roots: K pairs of the tensors to start from, made in this order, and their gradients.
        failed: Told the place (0 to K - 1) of the replica that raised an error, and the error, which is raised on.
    """
    place = len(ranks) - 1

    def enter(index: int) -> Callable[[Any], None]:
        def hook(_: Any) -> None:
            nonlocal place
            place = index
            become_rank(ranks[index])

        return hook

    handles = [
        tensor.grad_fn.register_prehook(enter(index))
        for index, (tensors, _) in enumerate(roots)
        for tensor in tensors
        if tensor.grad_fn is not None
    ]
    with as_rank(ranks[place]):
        try:
            torch.autograd.backward(
                [tensor for tensors, _ in roots for tensor in tensors],
                [gradient for _, gradients in roots for gradient in gradients],
            )
        except BaseException as error:
            failed(place, error)
            raise
        finally:
            for handle in handles:
                handle.remove()
