"""SIGTERM at any of several processes: all of them stop at the same step."""

import logging
import math
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import distributed

from lightning_dpx.lightning.lightning_api import MODULE, SIGTERMException, TrainerFn
from lightning_dpx.lightning.lightning_compat import SignalConnector
from lightning_dpx.lightning.processes.connect import gather_objects
from lightning_dpx.reducers import between_processes

if TYPE_CHECKING:
    from lightning_dpx.lightning.lightning_api import pl

log: logging.Logger = logging.getLogger(f"{MODULE}.dpx")  # a child of Lightning's, so it is shown where Lightning's are

EVERY = 4  # batches of an evaluation, between which nothing else is sent


class NoStop:
    """One process: Lightning's own handlers of signals do all."""

    reason = ""

    def begin_evaluation(self) -> None:
        """An evaluation begins."""

    def before_batch(self) -> None:
        """Between two batches of an evaluation."""

    def meet_after_validation(self) -> None:
        """A validation has ended."""

    def end(self) -> None:
        """A run has ended."""


class CoordinatedStop(SignalConnector):
    """Takes the place of the Trainer's own while several processes train.

    Lightning's handler of SIGTERM broadcasts from rank 0 whatever the signal interrupted, and then each process stops
    by itself: a process that did not get the signal loses the others. Here the handler only takes notice; the notice
    travels with the next gradients, and once all have it, all answer ``trainer.received_sigterm`` with yes and
    Lightning ends the run after that step. What the user's own handlers do, and SLURM's, stays.

    Args:
        trainer: Whose signals these are.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        # By inheritance, so that SLURM's requeueing and the user's handlers
        # stay Lightning's business.
        super().__init__(trainer)
        self._requested_here = False
        self._lockstep = False
        self._batches = 0
        self.reason: str = ""

    def register_signal_handlers(self) -> None:
        """As Lightning does, for every run."""
        self._requested_here = False
        self.reason = ""
        super().register_signal_handlers()

    def _sigterm_notifier_fn(self, signum: int, _: FrameType | None) -> None:
        self._requested_here = True  # and no more: it may have interrupted a collective

    def requested_here(self) -> bool:
        """Whether this process was told to stop."""
        return self._requested_here

    def apply(self, ranks: list[int]) -> None:
        """The run ends after this step, on all processes, as each of them calls this with the same ``ranks``."""
        # The notice may come by gradients and by a meeting, and a run is stopped once.
        if not ranks or self.received_sigterm:
            return
        who = f"rank {', '.join(map(str, ranks))} of {distributed.get_world_size()} processes"
        self.reason = f"dpx: SIGTERM told {who} to stop; all stop together."
        # On every rank, as a cluster may show the output of one node only.
        log.warning(f"[rank: {distributed.get_rank()}] {self.reason}")
        self.received_sigterm = True

    def meet(self) -> None:
        """All processes call it at the same place, and know from then on who was told to stop.

        Raises:
            CollectiveError: a process is lost.
        """
        flags = torch.zeros(distributed.get_world_size())
        # A place for each rank, so that one sum tells who it was.
        flags[distributed.get_rank()] = self._requested_here
        between_processes("asking who was told to stop", lambda: distributed.all_reduce(flags))
        self.apply(flags.nonzero().flatten().tolist())

    def meet_after_validation(self) -> None:
        """In a fit, Lightning's training loop ends a run that was told to stop; otherwise as :meth:`end`."""
        if self.trainer.state.fn == TrainerFn.FITTING:
            self.meet()
        else:
            self.end()

    def end(self) -> None:
        """Ends the run if a process was told to stop, where nothing comes later that would.

        Raises:
            SIGTERMException: a process was told to stop.
            CollectiveError: a process is lost.
        """
        self.meet()
        if self.received_sigterm:
            raise SIGTERMException

    def begin_evaluation(self) -> None:
        """Compares the numbers of batches: only where all have as many can they meet in between."""
        trainer = self.trainer
        # A sanity check runs the validation loop, with fewer batches.
        if trainer.sanity_checking:
            counts = trainer.num_sanity_val_batches
        elif trainer.testing:
            counts = trainer.num_test_batches
        else:
            counts = trainer.num_predict_batches if trainer.predicting else trainer.num_val_batches
        totals = gather_objects("counting the batches of the evaluation", sum(counts))
        self._batches = 0
        # An iterable data set may end anywhere, and the others would wait at a meeting for
        # a process that is through.
        self._lockstep = len(set(totals)) == 1 and totals[0] != math.inf

    def before_batch(self) -> None:
        """Meets every few batches, and ends the evaluation if a process was told to stop.

        Raises:
            SIGTERMException: a process was told to stop.
            CollectiveError: a process is lost.
        """
        self._batches += 1
        if self._lockstep and self._batches % EVERY == 0:
            self.end()
