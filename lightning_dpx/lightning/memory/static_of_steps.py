"""What a step of a run needs on each device beside its activations, from what the session knows of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lightning_dpx.devices import is_host
from lightning_dpx.lightning.memory.batch_shapes import bytes_of_tensors
from lightning_dpx.lightning.memory.freed_gradients import FreedGradients
from lightning_dpx.lightning.memory.held_attributes import HeldAttributes
from lightning_dpx.lightning.memory.kept_gradients import keeps_earlier_gradients, keeps_gradients
from lightning_dpx.lightning.memory.profiled_steps import by_device
from lightning_dpx.lightning.memory.reduction_memory import ReductionMemory
from lightning_dpx.lightning.memory.static import StaticMemory, bytes_of_states
from lightning_dpx.memory import BesideActivations
from lightning_dpx.replicas import BatchSlice, Replica
from lightning_dpx.torch_compat import bytes_of

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session


class StaticOfSteps:
    """Counts for steps of one session.

    Args:
        session: Whose steps.
        freed_gradients: Whether gradients are gone when a step begins.
    """

    def __init__(self, session: "Session", freed_gradients: FreedGradients) -> None:
        self._session = session
        self._freed_gradients = freed_gradients
        self._attributes = HeldAttributes()
        self._reductions = ReductionMemory(session.step.sums)

    def of(self, slices: Sequence[BatchSlice]) -> StaticMemory:
        """What a step of ``slices`` needs on every device beside its activations."""
        session = self._session
        replicas = session.replicas
        # A device without a slice sends no gradients, so its share of the reduction is not counted.
        active = {replicas.partition.device_of[batch_slice.replica.index] for batch_slice in slices}
        # An optimizer of torch keeps nothing for what has no gradient.
        idle = self._freed_gradients.idle.ids
        trained = [parameter for parameter in session.step.owner_parameters if id(parameter) not in idle]
        return StaticMemory(
            slices,
            snapshot=self._snapshot_bytes(slices),
            shown=self._shown_bytes(slices),
            states=bytes_of_states(trained, session.strategy.optimizers),
            moving=self._reductions.bytes_by_device(active),
            moves_in_backward=session.step.sums.overlapped is not None,
            accumulates=keeps_gradients(session.trainer) or replicas.cuts_slices,
            keeps_earlier=replicas.cuts_slices and self._keeps_earlier,
            frees_gradients=self._freed_gradients.are_freed,
            attributes=self._attributes.bytes_on_host(replicas),
            idle=idle,
            callbacks=session.trainer.callbacks,  # type: ignore[attr-defined]
        )

    def bytes_left(self) -> int:
        """Bytes on the host that steps have left in attributes of the user's module by now."""
        return self._attributes.bytes_left(self._session.replicas)

    def _snapshot_bytes(self, slices: Sequence[BatchSlice]) -> dict[torch.device, int]:
        """Of buffers before a step of several slices, where nothing counts them yet."""
        root = self._session.replicas.root
        if self._session.training.runs_alone(slices):
            return {}
        return {root.device: self._session.replicas.state.buffers.snapshot_bytes(to_come=not is_host(root.device))}

    def _shown_bytes(self, slices: Sequence[BatchSlice]) -> dict[torch.device, int]:
        """Of the whole batch, which hooks before the backward find on the root device, where they look at it."""
        session = self._session
        root = session.replicas.root.device
        looks = session.batches.writes.is_watched and session.gradient_hooks.before_backward_of_step
        if is_host(root) or not looks:
            return {}
        return {root: sum(bytes_of_tensors(batch_slice.batch) for batch_slice in slices)}

    @property
    def _keeps_earlier(self) -> bool:
        return keeps_earlier_gradients(self._session.trainer, self._session.module)

    def copies_for_micro_batches(self, replica: Replica) -> BesideActivations:
        """What micro-batches of a replica's slice have copies of, in training and in evaluation."""
        return BesideActivations(
            buffers=bytes_of(replica.buffers), attributes=self._attributes.bytes_of_copy(self._session.replicas)
        )

    def beside_micro_batches(
        self, slices: Sequence[BatchSlice], static: StaticMemory, device: torch.device
    ) -> BesideActivations:
        """What a replica's micro-batches need beside their activations, and a step in one piece does not."""
        here = by_device(slices)[device]
        alone = self._session.training.runs_alone(slices)
        beside = replace(self.copies_for_micro_batches(here[0].replica), keeps_buffers=alone)
        # Those of the first micro-batch are there beside the activations of the others.
        if static.frees_gradients:
            return replace(beside, gradients=static.counted_gradients(device))
        if not self._keeps_earlier:
            return beside
        # Slices are not cut yet, so what is counted now says nothing of the
        # gradients that would lie aside.
        cut = replace(static, keeps_earlier=True)
        return replace(beside, gradients=(cut.passing(device) - static.passing(device)) // len(here))
