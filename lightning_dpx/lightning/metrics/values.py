"""The value of a metric over the whole batch, for every replica, with the gradients that one device would give."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dpx.errors import GatherError
from lightning_dpx.lightning.metrics.arguments import Arguments
from lightning_dpx.replicas import ReplicaRank, collectives
from lightning_dpx.torch_compat import tree_leaves, tree_map_only


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedValue:
    """What one call of a metric returned for all replicas.

    Attributes:
        values: By rank; the same one for all, unless their arguments do not fit together.
        leaves: By rank, what stands for its arguments that require gradients.
        separate: Why the call was made once per replica; empty if it was not.
    """

    values: Mapping[int, Any]
    leaves: Mapping[int, list[Tensor]]
    separate: str = ""

    def for_replica(self, rank: ReplicaRank, device: torch.device, arguments: Arguments) -> Any:
        """The value on the device of the caller, whose own ``arguments`` get its gradients."""
        # In the order in which they were cut: gradients are handed back by place.
        mine = [leaf for leaf in tree_leaves(arguments) if _has_gradient(leaf)]

        def hand_out(value: Tensor) -> Tensor:
            if self.leaves and value.requires_grad:
                out: Tensor = _FromWhole.apply(rank, self, [value], device, *mine)  # type: ignore[no-untyped-call]
                return out
            return value.detach().to(device, copy=True)  # a step may change in place what it got

        return tree_map_only(Tensor, hand_out, self.values[rank.rank])


def shared_value(
    arguments: Mapping[int, Arguments],
    join: Callable[[dict[int, Arguments]], Arguments],
    call: Callable[[Arguments], Any],
    *,
    differentiable: bool,
) -> SharedValue:
    """Calls a metric once with what all replicas give.

    Args:
        arguments: By rank.
        join: Makes one call of them.
        call: The metric's own method.
        differentiable: Whether gradients may flow through the value; otherwise histories are cut.
    """
    leaves: dict[int, list[Tensor]] = {}
    cuts: dict[int, Arguments] = {}
    # Where no gradients flow, leaves that need none keep the metric from making a graph.
    with_gradients = differentiable and torch.is_grad_enabled()
    for rank, given in arguments.items():
        cutter = _Cutter(with_gradients=with_gradients)
        # The metric sees leaves: its graph must end here, and not run into those of the replicas.
        cuts[rank] = tree_map_only(Tensor, cutter.cut, given)
        leaves[rank] = cutter.leaves
    separate = ""
    try:
        joined = join(cuts)
    except GatherError as error:
        separate = str(error)
        values = {rank: call(given) for rank, given in cuts.items()}
    else:
        values = dict.fromkeys(cuts, call(joined))
    return SharedValue(values=values, leaves=leaves, separate=separate)


class _Cutter:
    """Cuts histories off, and notes what stands for tensors that have one."""

    def __init__(self, *, with_gradients: bool) -> None:
        self._with_gradients = with_gradients
        self.leaves: list[Tensor] = []

    def cut(self, tensor: Tensor) -> Tensor:
        """The values, detached from their history."""
        leaf = tensor.detach()
        if tensor.requires_grad:
            self.leaves.append(leaf.requires_grad_(self._with_gradients))
        return leaf


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


class _FromWhole(torch.autograd.Function):
    """Gradients of all replicas meet at the value, and each gets those of its own arguments."""

    @staticmethod
    def forward(
        ctx: Any, rank: ReplicaRank, whole: SharedValue, box: list[Tensor], device: torch.device, *mine: Tensor
    ) -> Tensor:
        (value,) = box  # as an input of its own, autograd would visit its graph for every replica, and free it
        ctx.rank = rank
        ctx.whole = whole
        ctx.value = value
        ctx.devices = [tensor.device for tensor in mine]
        return value.detach().to(device, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rank: ReplicaRank = ctx.rank
        collectives.check_differentiable(rank)
        value: Tensor = ctx.value
        leaves = [leaf for own in ctx.whole.leaves.values() for leaf in own]

        def act(parts: list[Tensor]) -> dict[int, Tensor | None]:
            # One value has K copies in K losses, so their gradients add up at the value.
            total = torch.stack([part.to(value.device) for part in parts]).sum(0)
            # The graph stays: several values of one call, as of a collection, share it.
            found = torch.autograd.grad(value, leaves, total, retain_graph=True, allow_unused=True)
            return {id(leaf): gradient for leaf, gradient in zip(leaves, found, strict=True)}

        gradients = rank.meet_present("backward of a metric's value", grads[0], act)
        mine = [gradients[id(leaf)] for leaf in ctx.whole.leaves[rank.rank]]
        moved = [None if one is None else one.to(device) for one, device in zip(mine, ctx.devices, strict=True)]
        return None, None, None, None, *moved
