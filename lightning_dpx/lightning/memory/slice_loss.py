"""The scalar that a profiled step runs a backward of, and what is wrong where there is none."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lightning_dpx.errors import PlanError
from lightning_dpx.lightning.logging import StepLog
from lightning_dpx.memory import sum_of
from lightning_dpx.memory.profile.held_output import HeldOutput
from lightning_dpx.memory.profile.profiled_step import Run
from lightning_dpx.replicas import BatchSlice, Replica, ReplicaSet, first_loss
from lightning_dpx.replicas.containers import members_of
from lightning_dpx.torch_compat import tree_leaves, tree_map_only


class NoLossError(PlanError):
    """A profiled training step returned no loss, which a training step may do: the next one may return one."""

    lacks = "returned no loss"
    advice = "A step that runs a backward of its own is planned with self.automatic_optimization = False."


class NoBackwardError(NoLossError):
    """A profiled step by hand ran no backward: the next one may, or a hook after the step."""

    lacks = "ran no backward"
    advice = "What a hook runs a backward of, such as on_train_batch_end, is in no plan: run it in training_step."


def loss_to_plan_from(output: Any) -> torch.Tensor:
    """The loss of a profiled training step.

    Raises:
        NoLossError: there is none.
    """
    loss: torch.Tensor | None = first_loss(output)
    if loss is None:
        raise NoLossError("The first training step returned no loss, so there is nothing to plan from.")
    return loss


def end_of_step(shadow: Any, output: Any) -> torch.Tensor | None:
    """The loss to run a backward of; ``None`` for a step by hand, which has run its own."""
    if shadow.automatic_optimization:
        return loss_to_plan_from(output)
    return None


def merges_outputs(replicas: ReplicaSet) -> bool:
    """Whether what the slices of a batch return is merged before any of them runs its backward."""
    return len(replicas.devices) > 1 and replicas.cuts_batches and not replicas.cuts_slices


def _as_it_is(saved: torch.Tensor) -> torch.Tensor:
    return saved


def _parts_of(output: Any) -> list[Any] | None:
    """What outputs of slices are merged by: the items of a container, or what a plain object holds."""
    try:
        members = members_of(output)
    except Exception:  # noqa: BLE001  an object of the user's that cannot be looked at; it is held, and not merged
        return None
    if members is None:
        return None
    return [value for _, value in members]


class SliceLoss:
    """The scalar that a profile runs a backward of, also with a ``training_step_end``.

    On all rows that is its loss. A slice ends with outputs, whose gradients come from the loss of all: the outputs of
    all rows are there by then, with their gradients and, on the first device, what that loss takes. It is tried on the
    outputs of one slice in the place of all others; they count as held, and are not part of what is planned.

    Args:
        replicas: All of them.
        shadow: The shadow module that runs the step.
        parts: Of so many such slices a replica's rows will consist.
    """

    def __init__(self, replicas: ReplicaSet, shadow: Any, parts: int = 1) -> None:
        self._shadow = shadow
        self._finish: Callable[[Any], Any] | None = None
        if shadow.automatic_optimization:
            self._finish = getattr(shadow, "training_step_end", None)
        # A batch that is not cut has its loss from the one output that there is.
        self._num_slices = parts * (len(replicas.replicas) if replicas.cuts_batches else 1)
        # Micro-batches have their backwards before anything is merged.
        self._is_merged = merges_outputs(replicas) and parts == 1
        self._dim = replicas.output_dim
        # The loss of all rows is computed on the first device alone; the others hold
        # outputs and their gradients.
        self._has_loss = torch.device(shadow.device) == replicas.root.device
        self._held: list[torch.Tensor] = []

    def run_of(self, step: Callable[[], Any]) -> Run:
        """A run of ``step`` that returns the scalar to run a backward of."""
        if self._finish is not None and self._num_slices > 1:
            return lambda: self._sum_for_all(step())
        return HeldOutput(
            lambda: self._finished(step()),
            partial(end_of_step, self._shadow),
            is_merged=self._is_merged,
            parts_of=_parts_of,
        )

    def _sum_for_all(self, output: Any) -> torch.Tensor | None:
        """The sum of the outputs of a slice, beside which those of all slices are held.

        Raises:
            NoLossError: there is no loss.
        """
        # A profile runs the step several times, and what one run held must not count in the next.
        self._held.clear()
        finish = self._finish
        if finish is None or output is None:
            return end_of_step(self._shadow, output)
        # A backward of the slice needs a scalar: with the sum of its outputs
        # each of them gets a gradient.
        total = sum_of(output)
        # Hooks of the profile would take what this loss saves for a part of the
        # step; the innermost ones win.
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            self._hold_all(output)
        return total

    def _hold_all(self, output: Any) -> None:
        """Allocates outputs of all rows and their gradients, until the step is profiled again."""
        merged = tree_map_only(torch.Tensor, self._of_all_rows, output)
        leaves = [leaf for leaf in tree_leaves(merged) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if self._has_loss:
            loss = loss_to_plan_from(self._finished(merged))
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
            for gradient in gradients:
                if gradient is not None:
                    self._held += [gradient, gradient.clone()]  # the slices get theirs in parts
        else:
            self._held += [torch.zeros_like(leaf) for leaf in leaves]
        self._held += leaves

    def _finished(self, output: Any) -> Any:
        """What ``training_step_end`` returns for an output, if there is one; what it logs goes nowhere."""
        finish = self._finish
        if finish is None or output is None:
            return output
        batch_slice = BatchSlice(Replica(0, self._shadow.device, self._shadow), 1, None)
        # The real log waits for the step that counts.
        with StepLog(batch_slice).recording(self._shadow):
            return finish(output)

    def _of_all_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        # Gradients of the loss end at the outputs, from where each replica goes on by itself.
        rows = tensor.detach()
        if rows.dim() > self._dim:
            # The outputs of the other slices are taken to be as large as this one's.
            parts = [rows.clone() for _ in range(self._num_slices)]
            self._held += parts
            rows = torch.cat(parts, self._dim)
        return rows.requires_grad_(tensor.requires_grad)
