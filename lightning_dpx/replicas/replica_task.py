"""A replica's part of a stage, as a worker runs it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from lightning_dpx.devices import device_context
from lightning_dpx.replicas.batch_slice import BatchSlice
from lightning_dpx.replicas.context import ReplicaRank, as_rank
from lightning_dpx.replicas.error_notes import annotate
from lightning_dpx.replicas.executor import Task, TaskResult

# One object for the tasks of all steps, as it holds nothing.
_NOTHING = nullcontext()


class Watch(Protocol):
    """Times a replica's part of a stage."""

    def start(self) -> None:
        """The replica's part begins."""

    def stop(self) -> None:
        """The replica's part has ended."""


@dataclass(slots=True, eq=False)
class ReplicaTask(Task):
    """A replica's part of a stage, run in the replica's rank; its errors say which module raised them.

    Its ``call`` gets the slice.

    Attributes:
        rank: The replica's place among those that take part.
        batch_slice: Its part of the batch.
        watches: What times it.
        searched: Whether to look for the first NaN of its forward, as under ``detect_anomaly``.
        default_device: Puts the replica's device in the place of a default device, where the user has set one.
    """

    rank: ReplicaRank = field(kw_only=True)
    batch_slice: BatchSlice = field(kw_only=True)
    watches: Sequence[Watch] = field(kw_only=True)
    searched: bool = field(kw_only=True)
    default_device: AbstractContextManager[object] = field(default=_NOTHING, kw_only=True)

    def attempt(self) -> TaskResult:
        """See :meth:`Task.attempt`; all of it in one frame, of which a user's traceback has one for each replica."""
        replica = self.batch_slice.replica
        module = replica.module
        try:
            with device_context(self.device), self.default_device, as_rank(self.rank):
                try:
                    if self.before is not None:
                        self.before()
                    for watch in self.watches:
                        watch.start()
                    # It hooks the forward of every submodule, so only anomaly mode pays for it.
                    watching = replica.first_nan.watching(module) if self.searched else _NOTHING
                    with watching:
                        value = self.call(self.batch_slice)
                    for watch in self.watches:
                        watch.stop()
                    return TaskResult(value=value)
                except BaseException as error:
                    annotate(error, module, self.device, replica.first_nan)
                    raise
        except BaseException as error:  # noqa: BLE001  SystemExit and KeyboardInterrupt must reach the caller too
            return TaskResult(error=error)
