"""Where slices cannot do what one device does: fewer pieces, down to the whole batch on the first replica.

micro-batches --memory chose them--> none, or other plans --> slices of devices --> the whole batch
              --the user did-------> they stay, with a warning, where memory is planned
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_dpx.lightning.lightning_api import rank_zero_warn
from lightning_dpx.lightning.rehearsal.outcome import Call, PartsAppear, SlicesFail
from lightning_dpx.lightning.rehearsal.verdicts import Verdicts

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session
    from lightning_dpx.lightning.strategy import DPXStrategy


class Fallbacks:
    """Has steps fall back to one device, or fewer slices, where slices do not give what it would.

    Args:
        strategy: Whose batches are cut.
        verdicts: Say what follows.
    """

    def __init__(self, strategy: "DPXStrategy", verdicts: Verdicts) -> None:
        self._strategy = strategy
        self._verdicts = verdicts

    @property
    def _session(self) -> "Session":
        """The run whose batches are cut."""
        return self._strategy.replicated_session

    def left_micro_batches(self, name: str, reason: str) -> bool:
        """Gives up micro-batches that were chosen for memory, if there is a reason to."""
        if not reason:
            return False
        left: bool = self._session.memory.leave_micro_batches(name, reason)
        return left

    def keeps_micro_batches(self, name: str, reason: str) -> bool:
        """Whether the step stays in micro-batches, though slices cannot do what it does by now; warns if so."""
        strategy = self._strategy
        # In one piece the step may not fit, and would end the run here: that is left to the user.
        if not self._session.replicas.cuts_slices or not strategy.plans_memory:
            return False
        rank_zero_warn(
            f"dpx: {name} is no longer what one device does: {reason} With micro_batches=1 it stays in one piece."
        )
        return True

    def with_slices_of_devices(self, call: Call, failure: SlicesFail) -> Call | None:
        """Gives up micro-batches where there are several devices.

        Returns the call as it is cut now; ``None`` if nothing was given up.
        """
        replicas = self._session.replicas
        if not replicas.cuts_slices or len(replicas.devices) == 1:
            return None
        replicas.partition.stop_cutting_slices(training=call.name == "training_step")
        self._verdicts.say(f"dpx: {call.name} has its slices in one piece, not in micro-batches: {failure.reason}")
        sizes = replicas.sizes(call.num_rows)
        active = tuple(index for index, size in enumerate(sizes) if size)
        return replace(call, active=active)

    def give_whole(self, call: Call, failure: SlicesFail) -> None:
        """All batches of this stage go whole."""
        self._session.whole_batches.give_whole(call.name, failure.reason, failure.advice)

    def give_next_whole(self, call: Call, made: PartsAppear) -> None:
        """This batch goes whole, and makes what replicas are made with afterwards."""
        self._session.metric_watch.note_hooks()
        self._session.whole_batches.give_next_whole(call.name, made.reason, made.advice)
