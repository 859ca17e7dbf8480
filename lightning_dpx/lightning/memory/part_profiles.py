"""Profiles of a training step on parts of a device's slice, from which its micro-batches are chosen."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_dpx.lightning.memory.kept_gradients import keeps_gradients
from lightning_dpx.lightning.memory.planning_cache import key_of_run_step
from lightning_dpx.lightning.memory.profiled_steps import KnownProfiles
from lightning_dpx.lightning.memory.profiling import announce_profile, profile_slice
from lightning_dpx.lightning.memory.shadow_slice import Step, first_rows_of
from lightning_dpx.lightning.memory.slice_loss import merges_outputs
from lightning_dpx.memory import Profile, extrapolate
from lightning_dpx.memory.micro_batch_planning import TooFewRowsError, told_as_too_few_rows
from lightning_dpx.memory.profile.data import IsWorth
from lightning_dpx.memory.profile.profiler import NotWorthProfilingError
from lightning_dpx.replicas import BatchSlice

if TYPE_CHECKING:
    from lightning_dpx.lightning.session import Session


class PartProfiles:
    """Steps on some rows of a slice, each profiled once, by this run or an earlier one.

    Args:
        session: Whose.
        batch_slice: The slice of a device.
        run: ``run(module, rows, num_rows)``: the training step of a shadow of a replica.
        profiles: The steps that were profiled so far, of this device and others; what is found is added.
        counts_gradients: As :func:`profile_slice` takes it, of the step on all rows.
        most_rows: As :func:`profile_slice` takes it.

    Attributes:
        rows: Of the slice.
        failed: What was raised on fewer rows, in a line each.
    """

    def __init__(
        self,
        session: "Session",
        batch_slice: BatchSlice,
        run: Step,
        profiles: KnownProfiles,
        *,
        counts_gradients: bool,
        most_rows: int | None = None,
    ) -> None:
        self._most_rows = most_rows
        self._session = session
        self._slice = batch_slice
        self._run = run
        self._profiles = profiles
        self._counts_gradients = counts_gradients
        self._cache = session.strategy.planning.cache
        self.failed: list[str] = []
        self.rows, self._batch_of = first_rows_of(session.replicas, batch_slice)
        # Then backward adds to gradients that are there, in one piece as well as in micro-batches.
        self._finds_gradients = keeps_gradients(session.trainer)

    def of_rows(self, count: int, /, *, accumulates: bool, is_worth: IsWorth | None = None) -> Profile:
        """The step on ``count`` rows, whose gradients are added to earlier ones or not.

        Raises:
            TooFewRowsError: it fails on so few.
            NotWorthProfilingError: ``is_worth`` says no.
        """
        accumulates |= self._finds_gradients
        known = self._profiles.get((count, accumulates))
        if known is not None:  # of another device, whose plan may have another limit
            return known
        part = self._part(count)

        def profiled() -> list[list[Profile]]:
            return [[self._profiled(part, accumulates, is_worth)]]

        # No other process is asked: with several of them nothing is chosen.
        key = self._key(part, accumulates)
        profile = self._cache.profiles([key], profiled, bool, devices=[[part.replica.device]])[0][0]
        self._profiles[count, accumulates] = profile
        return profile

    def in_one_piece(self) -> Profile:
        """The step on all rows."""
        return self.of_rows(self.rows, accumulates=False)

    def on_a_line(self, rows: int, cut_share: float) -> Profile:
        """The step on all rows, on the line through steps on no more than ``rows``: it is not tried itself.

        Args:
            rows: Of the micro-batches of an earlier batch.
            cut_share: What they took together, over that batch in one piece.
        """
        few = rows // 2
        if not 0 < few < rows < self.rows:
            return self.in_one_piece()
        try:
            less = self.of_rows(few, accumulates=True)
            more = self.of_rows(rows, accumulates=True)
        except TooFewRowsError:
            # Nothing was asked of them yet, so nothing is told of it.
            self.failed.pop()
            return self.in_one_piece()
        found = extrapolate(less, more, (few, rows), self.rows)
        # Times of small steps are no line; what cutting costs is known from where both ways were timed.
        in_time = self.rows / rows / cut_share
        seconds = more.step_seconds * in_time
        return replace(found, step_seconds=seconds, forward_seconds=more.forward_seconds * in_time)

    def of_rows_if(self, count: int, is_worth: IsWorth) -> Profile | None:
        """The step of a micro-batch of ``count`` rows, where ``is_worth`` says so of its seconds.

        Raises:
            TooFewRowsError: it fails on so few.
        """
        found = list[Profile]()

        def timed() -> list[list[Profile]]:
            try:
                found.append(self.of_rows(count, accumulates=True, is_worth=is_worth))
                seconds = found[0].step_seconds
            except NotWorthProfilingError as error:
                seconds = error.seconds
            return [[Profile((), (), (), (), 0, step_seconds=seconds)]]

        # Times are kept under a key of their own: no other run is to take one for a profile, and the second run of
        # a job needs nothing else to decide alike.
        part = self._part(count)
        key = self._key(part, True, "seconds")
        time = self._cache.profiles([key], timed, bool, devices=[[part.replica.device]])[0][0]
        if not is_worth(time.step_seconds):
            return None
        return found[0] if found else self.of_rows(count, accumulates=True)

    def _part(self, count: int) -> BatchSlice:
        return BatchSlice(self._slice.replica, count, self._batch_of(count))

    def _key(self, part: BatchSlice, accumulates: bool, *others: Any) -> str:
        if not self._cache.is_on:
            return ""
        device = part.replica.device
        counts = self._counts_gradients and not accumulates
        merges = merges_outputs(self._session.replicas) and part.num_rows == self.rows
        known = (device,), part.num_rows, [part.num_rows], (), accumulates, counts, merges, *others
        return key_of_run_step(self._session.trainer, part.replica.module, part.batch, device, *known)

    def _profiled(self, part: BatchSlice, accumulates: bool, is_worth: IsWorth | None) -> Profile:
        count = part.num_rows
        device = part.replica.device
        announce_profile(min(count, self._most_rows or count), device)
        # If all rows fail as well, it is the step's own error and ends the run.
        told: AbstractContextManager[None] = nullcontext()
        if count != self.rows:
            told = told_as_too_few_rows(f"on {count} of its {self.rows} rows a step")
        try:
            with told:
                return profile_slice(
                    self._session.replicas,
                    part,
                    self._run,
                    device,
                    accumulates=accumulates,
                    counts_gradients=self._counts_gradients,
                    parts=-(-self.rows // count),
                    is_worth=is_worth,
                    most_rows=self._most_rows,
                )
        except TooFewRowsError as error:
            self.failed.append(str(error).partition("\n")[0])
            raise
