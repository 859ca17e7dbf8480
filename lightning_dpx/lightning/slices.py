"""A batch to slices: first stage of a step. What is not, or cannot be, cut goes whole to the first replica."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from lightning_dpx.lightning import stepping_hooks
from lightning_dpx.lightning.lightning_api import pl
from lightning_dpx.lightning.loaded_batches import fetches_by_itself, paths_of_loaders, rows_to_weigh_by
from lightning_dpx.lightning.manual.acts_once import held_optimizers
from lightning_dpx.lightning.stepping_hooks import SteppingHooks
from lightning_dpx.lightning.unregistered_tensors import LooseTensors, reason_and_advice
from lightning_dpx.replicas import BatchSlice, UncuttableBatch, check_paths, weights_of

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session


class Slices:
    """Cuts the batches of a session.

    Args:
        session: Whose replicas get the slices.
    """

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._loose_tensors = LooseTensors()
        self._stepping_hooks = SteppingHooks()

    def of(self, name: str, batch: Any) -> list[BatchSlice]:
        """The slices of ``batch``, with what each of them weighs.

        Args:
            name: Of the step that they are for.
            batch: As the loader gave it.
        """
        session = self._session
        slices = self._cut(name, batch) if session.replicas.cuts_batches else None
        if slices is None:
            # Counting walks the whole batch, so it is done only where the number matters.
            num_rows = rows_to_weigh_by(batch) if self._reads_rows else 1
            slices = [session.replicas.whole_slice(batch, num_rows)]
        slices = self.weighted(slices, session.module)
        # Collectives between processes weigh by it while the step runs: see ranks.py.
        session.strategy.ranks.rows_of_step = sum(weights_of(slices).of_loss)
        return slices

    def weighted(self, slices: list[BatchSlice], module: pl.LightningModule) -> list[BatchSlice]:
        """The slices with the weights that the user's ``loss_weight(batch)`` gives them, if there is one."""
        if getattr(type(module), "loss_weight", None) is None:  # asked of the class: a miss costs a module much more
            return slices
        weigh: Any = module.loss_weight
        # A single weight divides out again, unless other processes have theirs.
        if not callable(weigh) or (len(slices) == 1 and not self._session.spans_processes):
            return slices
        return [replace(batch_slice, weight=float(weigh(batch_slice.batch))) for batch_slice in slices]

    def _cut(self, name: str, batch: Any) -> list[BatchSlice] | None:
        """The slices, or ``None`` if the batch must stay whole, which is announced once."""
        session = self._session
        replicas = session.replicas
        whole_batches = session.whole_batches
        if name == "training_step":
            # Looked for in every step, as optimizers and hooks may come in the middle of a fit;
            # where nothing is new both cost next to nothing.
            self._keep_loose_tensors_whole()
            self._keep_stepping_hooks_whole()
        if whole_batches.reason_for(name) is not None or whole_batches.pop_next_whole(name):
            return None
        # The step fetches in its own time, so there is nothing to cut before it.
        if fetches_by_itself(batch):
            whole_batches.announce_batch(
                name,
                f"{name}(self, dataloader_iter) fetches its batches itself.",
                "For all devices to take part, let it take a batch.",
                "dataloader_iter",
            )
            return None
        if replicas.slicer.slicer is None:  # a user's slicer need not look at it
            check_paths(batch, replicas.slicer.batch_dim)
            replicas.slicer.loaders = paths_of_loaders(session.trainer, name)
        try:
            slices = replicas.slices(batch)
        except UncuttableBatch as error:
            whole_batches.announce_batch(name, error.reason, error.advice, error.kind)
            return None
        if whole_batches.stays_whole_at(name, [batch_slice.num_rows for batch_slice in slices]):
            return None
        if session.micro_batches is not None and name == "training_step":
            session.micro_batches.look_at_first(slices)
        return slices

    def _keep_loose_tensors_whole(self) -> None:
        """A gradient of a tensor that is no parameter of the module is that of the first replica's slice only."""
        session = self._session
        optimizers: Sequence[Any] = [*session.strategy.optimizers, *held_optimizers(session.module)]
        # Of all replicas, as optimizers may hold the copies of other owners.
        known = chain.from_iterable(replica.parameters for replica in session.replicas.replicas)
        names = self._loose_tensors.find(optimizers, session.module, known)
        if names:
            session.whole_batches.give_whole("training_step", *reason_and_advice(names))

    def _keep_stepping_hooks_whole(self) -> None:
        """A hook that steps an optimizer would step once for every slice, with the gradient of that slice."""
        session = self._session
        parameter = self._stepping_hooks.find(session.replicas.root.parameters)
        if parameter is not None:
            session.whole_batches.give_whole(
                "training_step", *stepping_hooks.reason_and_advice(parameter, session.module)
            )

    @property
    def _reads_rows(self) -> bool:
        """Whether anything weighs by the rows of a batch that is not cut; Lightning counts for its logs itself."""
        session = self._session
        weighs = session.spans_processes or session.step.has_other_owners or session.replicas.times is not None
        return weighs or not session.module.automatic_optimization or session.memory.is_on
