"""Micro-batches of a loss over the whole batch: what ``training_step_end`` needs is there before any backward.

    slices --forward, no graph--> outputs of all rows --training_step_end--> loss --(Lightning: backward)--> gradients
                                                                                                       of the outputs
           --forward again, the same random numbers--> graph --backward from those gradients--> parameters' gradients
                +-- the next slice, when the graph of this one is gone

The passes are those of ``replicas/two_passes.py``. The second one leaves no trace: nothing is logged, counted or drawn
twice. That it repeats the first is looked at, since a step may depend on what Python cannot see.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_dpx.errors import GatherError
from lightning_dpx.lightning.lightning_api import rank_zero_info, rank_zero_warn
from lightning_dpx.lightning.replica_call import ReplicaCall
from lightning_dpx.python_objects.leave_no_trace import untouched
from lightning_dpx.replicas import BatchSlice, TwoPasses
from lightning_dpx.torch_compat import run_backward, tree_leaves, tree_map_only

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session
    from lightning_dpx.step_backward import Pending

_NAME = "training_step"
_ALIKE = 1e-3  # kernels of accelerators may add up in another order; what draws or counts anew differs by far more
_LOOKS = 3  # steps of which the passes are compared on an accelerator, which has to be waited for


class TwoPassSteps:
    """Runs the micro-batches of steps whose loss needs the outputs of all.

    Args:
        session: Whose.
    """

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._looked = 0
        rank_zero_info(
            "dpx: training_step_end needs the outputs of all rows, so every micro-batch runs forward twice: without a "
            "graph for the outputs, and once more for its backward."
        )

    def first(self, slices: list[BatchSlice], call: ReplicaCall, again: ReplicaCall) -> list[Any]:
        """What the micro-batches return, without their graphs; tensors say as ever whether they need a gradient.

        Args:
            slices: The micro-batches.
            call: The user's step on one of them.
            again: The same for the second pass, which is not logged.

        Raises:
            GatherError: micro-batches return different numbers of tensors.
        """
        session = self._session
        passes = TwoPasses(session.replicas)
        forward = _WithoutGraph(call, session.replicas.partition.device_of)
        outputs = passes.first(slices, forward)

        def second(pending: "Sequence[Pending]") -> None:
            self._second(passes, again, pending)

        # It runs when Lightning's backward has reached the outputs, whose gradients it starts from.
        session.step.wait_for_second_pass(second)
        return outputs

    def _second(self, passes: TwoPasses, call: ReplicaCall, pending: "Sequence[Pending]") -> None:
        session = self._session
        slices = [waiting.batch_slice for waiting in pending]
        waiting_of = {waiting.batch_slice.replica.index: waiting for waiting in pending}
        root = session.replicas.root
        # To compare on the host waits for nothing, so there every step is looked at.
        looks = root.device.type == "cpu" or self._looked < _LOOKS
        differing: list[int] = []

        def forward_and_backward(batch_slice: BatchSlice) -> None:
            waiting = waiting_of[batch_slice.replica.index]
            # It runs in Lightning's backward, which is outside of the context of the forward.
            with session.strategy.precision_plugin.train_step_context():
                tensors = _with_graph(call(batch_slice))
            if looks and not _are_alike(tensors, waiting.tensors):
                differing.append(batch_slice.replica.index)
            _walk(tensors, [leaf.grad for leaf in waiting.leaves])

        # Gradients are what this is for, and random states and buffers are put back by the passes.
        with session.metrics.kept(slices), session.settings.kept(), untouched(root.module, tensors=False):
            passes.second(slices, forward_and_backward)
        self._looked += 1
        if differing:
            self._leave(differing)

    def _leave(self, differing: Sequence[int]) -> None:
        """The step is another one when it runs again, so from here on it runs once, in one piece."""
        self._session.replicas.partition.stop_cutting_slices(training=True)
        rank_zero_warn(
            f"dpx: the second forward of micro-batch {', '.join(map(str, sorted(differing)))} gave other outputs than "
            "the first, so the gradients of this step are those of other outputs than its loss. training_step depends "
            "on something that its first run has changed (an iterator, a file, a clock). From here on its slices run "
            "in one piece, once."
        )


class _WithoutGraph:
    """A step whose outputs have no graph, and are marked where they would have one.

    That is seen by a first micro-batch of each device, which has its graph for as long as it runs.

    Args:
        call: The step.
        device_of: By the index of a replica, the place of its device.
    """

    def __init__(self, call: ReplicaCall, device_of: Sequence[int]) -> None:
        self._call = call
        self._device_of = device_of
        self._flags: dict[int, list[bool]] = {}  # by device

    def __call__(self, batch_slice: BatchSlice) -> Any:
        """What the step returns."""
        place = self._device_of[batch_slice.replica.index]
        if place in self._flags:
            return _marked(self._call(batch_slice), self._flags[place])
        # The first pass runs without gradients, in which no output says that it would have one.
        with torch.enable_grad():
            output = self._call(batch_slice)
        if output is None:
            return None
        # A slice without an output says nothing about the others, so the next one is asked.
        flags = [tensor.requires_grad for tensor in _tensors(output)]
        self._flags[place] = flags
        return _marked(output, flags)


def _tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _with_graph(output: Any) -> list[torch.Tensor]:
    return [tensor for tensor in _tensors(output) if tensor.requires_grad]


def _marked(output: Any, flags: Sequence[bool]) -> Any:
    """Leaves in the place of tensors, those with a flag waiting for their gradients."""
    if output is None:
        return None
    number = len(_tensors(output))
    if number != len(flags):
        raise GatherError(
            f"The micro-batches returned {len(flags)} and {number} tensors; all must return the same number, since "
            "training_step_end gets them merged."
        )
    left = iter(flags)

    def mark(tensor: torch.Tensor) -> torch.Tensor:
        leaf = tensor.detach()
        if next(left):
            return leaf.requires_grad_()
        return leaf

    return tree_map_only(torch.Tensor, mark, output)


def _are_alike(tensors: Sequence[torch.Tensor], first: Sequence[torch.Tensor]) -> bool:
    if len(tensors) != len(first) or any(one.shape != two.shape for one, two in zip(tensors, first, strict=True)):
        return False
    with torch.no_grad():
        pairs = zip(tensors, first, strict=True)
        # A NaN in both passes is no difference between them.
        return all(torch.allclose(one, two, rtol=_ALIKE, atol=_ALIKE, equal_nan=True) for one, two in pairs)


def _walk(tensors: Sequence[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
    # The loss of all rows need not use every output: unused ones have no gradient.
    roots = [(tensor, grad) for tensor, grad in zip(tensors, gradients, strict=True) if grad is not None]
    if not roots:
        return
    run_backward(
        [tensor for tensor, _ in roots],
        [grad.to(tensor.device, tensor.dtype).view_as(tensor) for tensor, grad in roots],
    )
