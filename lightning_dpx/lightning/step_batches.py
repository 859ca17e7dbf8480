"""The way of a batch through a step: shown to hooks as the loader gave it, moved slice by slice, and shown again."""

from typing import TYPE_CHECKING, Any

from lightning_dpx.devices import is_host
from lightning_dpx.lightning.batch_writes.batch_writes import BatchWrites, unlike_one_batch
from lightning_dpx.lightning.batch_writes.looking_hooks import is_looked_at_before
from lightning_dpx.lightning.evaluation import loader_index
from lightning_dpx.lightning.lightning_compat import transfer_batch
from lightning_dpx.lightning.transfers import Transfer
from lightning_dpx.replicas import BatchSlice

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session

_MISSING = object()


class StepBatches:
    """The batches of a session's steps.

    Args:
        session: Whose replicas get them.

    Attributes:
        writes: What steps write into their batches, where hooks look at that.
    """

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._module = session.module
        self.writes: BatchWrites = BatchWrites()
        strategy = session.strategy
        self._shows_on_device: bool = not is_host(strategy.root_device) and not strategy.plans_memory
        self._looked_at_before: dict[tuple[Any, int], bool] = {}
        self._in_place: Any = _MISSING  # a batch that hooks and the one replica share

    def show(self, batch: Any) -> Any:
        """The batch as hooks of the user's get it: as the loader gave it, each replica moves its own slice."""
        self._in_place = _MISSING
        if self._session.replicas.partition.is_one_slice and self._stays(batch):
            # The step gets the object that hooks get, as on one device: there is nothing to watch.
            self.writes.forget()
            self._in_place = batch
            return batch
        # Such a hook may give it to the module, or keep it for the step: on one device it finds it there. A plan counts
        # the rows of the slice that is at work, and not those of all.
        if self._shows_on_device and self._is_looked_at_before():
            batch = transfer_batch(self._module, batch, self._session.strategy.root_device)
        if self.writes.is_for(self._module):
            return self.writes.show(batch)
        return batch

    def _is_looked_at_before(self) -> bool:
        """Whether a hook of the user's gets the batch before its step."""
        trainer: Any = self._module.trainer
        # Once a stage: to ask which hooks there are takes as long as a short step's own bookkeeping.
        kind = trainer.state.stage, len(trainer.callbacks)
        if kind not in self._looked_at_before:
            self._looked_at_before[kind] = is_looked_at_before(self._module)
        return self._looked_at_before[kind]

    def _stays(self, batch: Any) -> bool:
        """Whether the one replica that takes every batch gets this object."""
        # The index of the loader matters to hooks only, and where there is one nothing stays.
        transfer = Transfer(self._module.trainer, self._module, 0)
        return transfer.leaves(batch, self._session.replicas.root.device)

    def is_in_place(self, batch: Any) -> bool:
        """Whether the one replica that takes every batch gets ``batch`` itself, which hooks have got, too."""
        return batch is self._in_place

    def for_replica(self, batch_slice: BatchSlice, dataloader_idx: int = 0) -> Any:
        """The batch that the step of a replica gets, on its device."""
        # The object is on its device already, and no hook would make another of it.
        if self.is_in_place(batch_slice.batch):
            return batch_slice.batch
        return self.to_replica(batch_slice, Transfer(self._module.trainer, self._module, dataloader_idx))

    def to_replica(self, batch_slice: BatchSlice, transfer: Transfer) -> Any:
        """The slice where its replica lives; what the step writes into it is noticed where hooks look."""
        batch = transfer.to_replica(batch_slice)
        if self.writes.is_watched:
            self.writes.note(batch_slice, batch, is_as_loaded=transfer.is_plain)
        return batch

    def end_step(self, name: str, args: tuple[Any, ...], *, backward_follows: bool = False) -> None:
        """A step has run: hooks find in the batch what it wrote there.

        Args:
            name: Of the step.
            args: Of the step.
            backward_follows: Whether activations are there until its end, when :meth:`move` is called.
        """
        self._session.verification.refuse_unchecked()
        if not self.writes.is_watched:
            return
        # Several training loaders give one combined batch; only evaluation tells its loaders apart.
        rules = self._session.verification.rules(name, 0 if name == "training_step" else loader_index(args))
        problem = self.writes.finish(rules, self._session.strategy.root_device, self._session.replicas.output_dim)
        if problem is not None:
            self._session.whole_batches.give_whole(name, *unlike_one_batch(problem))
        # No hook gets the batch until then, and all of its rows would be there beside the activations.
        if not backward_follows:
            self.move()

    def move(self) -> None:
        """Hooks find the batch on the device of the module."""
        if self.writes.is_watched:
            self.writes.move_to(self._session.strategy.root_device)
