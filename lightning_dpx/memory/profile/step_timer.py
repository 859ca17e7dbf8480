"""Steps that are timed, and leave nothing behind."""

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from lightning_dpx.devices import clock_of, free_garbage, is_host, is_out_of_memory, synchronize
from lightning_dpx.memory.profile import timing_effort
from lightning_dpx.memory.tracing.communication import CommunicationWatch, has_other_processes
from lightning_dpx.python_objects.gc_pause import COLLECTOR
from lightning_dpx.python_objects.leave_no_trace import CopyOnWrite

T = TypeVar("T")
Forward = Callable[[], Tensor | None]
Backward = Callable[[Tensor], None]

# One step says little where others are at work on the same processor: their cache misses and interrupts only ever add
# to its time, so the least of several is what counts, and short steps can be afforded more often.
_FEWEST_STEPS = 2
_MOST_STEPS = 12
_SHORT = 0.1  # seconds of steps, after which the fewest are enough
_ENOUGH = 0.15  # seconds, after which even one is, beside the first of all
_SURE = 1.02  # the least time is believed when another one came as close


def is_confirmed(times: Sequence[float]) -> bool:
    """Whether the least of several times is no lucky one: another one came close to it."""
    least = sorted(times)[:2]
    return len(least) > 1 and least[1] <= _SURE * least[0]


class PutsBack(Protocol):
    """Puts back what a step changes."""

    def __call__(self, *, watches: bool) -> AbstractContextManager[CopyOnWrite | None]:
        """A context for the step; where writes to tensors are watched, it gives what has seen them."""


class StepTimer:
    """Times steps of a module.

    Args:
        device: Where they run.
        alone: Around a step: puts back what it changes.

    Attributes:
        watches: Whether the next step is watched, as the first one is: what writes to tensors that are not buffers
            is not timed without, although that takes time itself.
        communicates: Whether the step talks to other processes, which must run it equally often.
        queued: The least seconds of a step so far until the host has handed all of it to the device, and may go on.
    """

    def __init__(self, device: torch.device, alone: "PutsBack") -> None:
        self._device = device
        self._alone = alone
        self._is_in_a_row = False
        self._can_follow_itself = True
        self._has_room = True  # for what several steps leave in cycles
        self.watches: bool = True
        self.communicates: bool = False
        self.queued: float = float("inf")

    def in_a_row(self, measure: Callable[[], T]) -> T:
        """What ``measure`` returns, whose steps follow each other as in training; what they change is put back after.

        To put it back looks at all that a module leads to, after which the next step finds nothing of its own in the
        processor's caches: steps of 10 ms took up to 1.3 times as long then. Where writes are watched, and where a step
        cannot follow itself (at the end of an iterator that it takes from), each step is put back for itself.
        """
        if self.watches or not self._can_follow_itself:
            return measure()
        try:
            with self._alone(watches=False):
                self._is_in_a_row = True
                try:
                    return measure()
                finally:
                    self._is_in_a_row = False
        except Exception as error:  # noqa: BLE001  whatever is wrong with the step itself, it is so again
            self._can_follow_itself = False
            if is_out_of_memory(error):
                # What steps in a row have left in cycles may be all that did not fit.
                traceback.clear_frames(error.__traceback__)
                free_garbage()
                self._has_room = False
        return measure()

    def timed(self, forward: Forward, backward: Backward) -> tuple[float, float]:
        """Seconds of a step, and of its forward; of a step that runs all its backwards itself, both are the same."""
        clock = clock_of(self._device)
        with nullcontext() if self._is_in_a_row else self._alone(watches=self.watches) as writes:
            synchronize(self._device)
            start = clock()
            result = forward()
            returned = clock()
            synchronize(self._device)
            middle = clock()
            if result is not None:
                backward(result)
            # Forward and backward of an accelerator return when their operators are queued.
            self.queued = min(self.queued, returned - start + clock() - middle)
            synchronize(self._device)
            end = clock()
            del result
            # What the step has left in cycles would be there beside all of the next one, and small
            # accelerators have no room for that. The host has, and its caches would lose the model.
            if not (is_host(self._device) and self._has_room):
                COLLECTOR.collect_young()
            # Steps in a row are not watched one by one, and tell nothing of writes.
            if not self._is_in_a_row:
                self.watches = writes is not None and writes.has_seen_any
        return end - start, middle - start

    def least(self, forward: Forward, backward: Backward) -> tuple[float, float]:
        """The least time of several steps, and that of their forward.

        The first one finds nothing in caches, and its writes are watched. It counts like the others: that only ever
        adds to its time, and little to that of a long step.
        """
        with CommunicationWatch() if has_other_processes() else nullcontext() as watch:
            first = self.timed(forward, backward)
        self.communicates = watch is not None and watch.has_seen_any
        return min(first, self.in_a_row(partial(self._least, forward, backward)))

    def _least(self, forward: Forward, backward: Backward) -> tuple[float, float]:
        best = (float("inf"), 0.0)
        times = list[float]()
        # Steps that talk to other processes are timed as often in each of them, whatever they take
        # there.
        usual = _FEWEST_STEPS if self.communicates else _MOST_STEPS
        most = timing_effort.rounds(usual)
        for turn in range(1, most + 1):
            whole, forward_only = self.timed(forward, backward)
            best = min(best, (whole, forward_only))
            times.append(whole)
            is_sure = turn >= _FEWEST_STEPS and sum(times) > _SHORT and is_confirmed(times)
            if not self.communicates and (sum(times) > _ENOUGH or is_sure):
                break
        return best
