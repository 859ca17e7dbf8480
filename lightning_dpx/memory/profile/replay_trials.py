"""What it takes to replay each call of a profiled step as a whole, found out by doing so.

Every call that could not be told from a second one, and that saves several tensors, is made once more before backward
begins: that gives its time and its memory, and shows that all tensors come out the same.
"""

import statistics
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lightning_dpx.devices import HostFullError
from lightning_dpx.memory.execute.distributed_tensors import part_here
from lightning_dpx.memory.execute.saved_tensor_hooks import SMALL
from lightning_dpx.memory.execute.whole_call_replays import WholeCallReplay
from lightning_dpx.memory.profile.noted_call import NotedCall, SavedTensors, allocation_of, tensor_of
from lightning_dpx.memory.tracing.memory_trace import MemoryTrace
from lightning_dpx.torch_compat import with_memory_in

_LARGEST_PART = 0.6  # of the tensors of a step: replaying more of it at once makes room for nothing
_FEWEST_BYTES = SMALL  # of the tensors that calls save and that are too small for a decision of their own
_MOST_TRIES = 3.0  # times the tensors of a step: how much may be tried, the outer calls first


@dataclass(frozen=True, slots=True)
class TimedReplay:
    """What a call gave when it was made again to see how long that takes.

    Attributes:
        found: What it saved.
        seconds: That it took.
    """

    found: Sequence[torch.Tensor]
    seconds: float


@dataclass(frozen=True, slots=True)
class WatchedReplay:
    """What a call gave when it was made again to see what memory that takes.

    Attributes:
        found: What it saved.
        trace: What has watched it.
    """

    found: Sequence[torch.Tensor]
    trace: MemoryTrace


class TriesReplays(Protocol):
    """A cost model, as far as this file knows it."""

    def timed_replay(self, replay: WholeCallReplay) -> TimedReplay:
        """Makes a call again, and measures how long that takes."""

    def watched_replay(self, replay: WholeCallReplay) -> WatchedReplay:
        """Makes a call again, and watches the memory that it takes."""

    def is_same(self, again: torch.Tensor, original: torch.Tensor) -> bool:
        """Whether a tensor that was made again is right."""


class ReplayTrials:
    """Makes the calls of a step again, while all that they saved is still there to be compared with.

    Args:
        calls: All that were noted, in the order in which they begin.
        saved: What autograd saves in the step.
        costs: Makes them again, and measures.
    """

    def __init__(self, calls: Sequence[NotedCall], saved: SavedTensors, costs: TriesReplays) -> None:
        self._calls = calls
        self._saved = saved
        self._costs = costs

    def run(self) -> set[int]:
        """Makes calls again, outer ones first; returns the numbers of those that give the same.

        All of a kind are tried or none: a plan is to treat equal layers alike.
        """
        right = set[int]()
        left = _MOST_TRIES * len(self._saved.held)
        most = _LARGEST_PART * len(self._saved.held)
        kinds: dict[tuple[Any, ...], list[int]] = {}
        for number, noted in enumerate(self._calls):
            if noted.end >= 0 and noted.given and noted.count <= most and self._saves_enough(noted):
                kinds.setdefault(self._kind(noted), []).append(number)
        # A call saves at least as much as those within it, so the most tensors are those of outer
        # calls.
        for numbers in sorted(kinds.values(), key=lambda numbers: -self._calls[numbers[0]].count):
            tensors = sum(self._calls[number].count for number in numbers)
            if tensors > left:  # a smaller kind may still be tried
                continue
            left -= tensors
            right.update(self._right_of(numbers))
        return right

    def _right_of(self, numbers: Sequence[int]) -> list[int]:
        """Those of a kind that give the same when they are made again.

        Each is tried, also within a call that was right: one of them alone may depend on what that call does round it
        unseen, such as a context variable.
        """
        right = list[int]()
        for number in numbers:
            like = self._calls[right[0]] if right else None
            if self._is_faithful(self._calls[number], like):
                right.append(number)
        # One of them may have been hit by whatever else the machine did at that moment; equal layers
        # are to have equal prices.
        typical = statistics.median_low([self._calls[number].seconds for number in right]) if right else 0.0
        for number in right:
            self._calls[number].seconds = typical
        return right

    def _is_faithful(self, noted: NotedCall, like: NotedCall | None) -> bool:
        try:
            return self._is_right(noted, like)
        # That says nothing of the call: whatever is alive then, the profile needs fewer rows.
        except HostFullError:
            raise
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # they hold on to what did not fit
            return False
        except Exception:  # noqa: BLE001  a call of a module runs whatever its author wrote
            return False

    def _saves_enough(self, noted: NotedCall) -> bool:
        """Whether a replay of the call would give memory free that a plan can count on."""
        return self._saved.has_value(noted) or self._saved.small_bytes_within(noted) >= _FEWEST_BYTES

    def _kind(self, noted: NotedCall) -> tuple[Any, ...]:
        """Equal for calls that save tensors of the same sizes for modules of one class."""
        sizes = tuple(held.num_elements for held in self._saved.within(noted))
        met = tuple((one.operator, one.number - noted.first) for one in noted.met)
        return type(noted.call.module), len(noted.call.arguments.tensors), noted.call.draws.drew, sizes, met

    def _is_right(self, noted: NotedCall, like: NotedCall | None) -> bool:
        """Makes the call again; ``like`` is one of its kind that was watched already."""
        # Copies and references of what the call was given may be gone by now, as a value goes with its graph.
        given = _given_to(noted)
        if given is None:
            return False
        sizes = [held.num_elements for held in self._saved.within(noted)]

        def replay() -> WholeCallReplay:
            return WholeCallReplay.noted(noted.call, given, sizes, noted.random, noted.met)

        # Calls of one kind take the same memory: the first of them is watched, and the others are
        # only timed and compared.
        if like is None:
            watched = self._costs.watched_replay(replay())
            self._watch(noted, watched)
            # Both times: what gives other numbers every second time would be right the next.
            if not self._are_right(noted, watched.found):
                return False
            # Or all of it would be there a third time, beside the step's own and that of the next replay.
            del watched
        else:
            noted.most = like.most
            noted.again = {key: (size, list(at)) for key, (size, at) in like.again.items()}
        trial = self._costs.timed_replay(replay())
        noted.seconds = trial.seconds
        return self._are_right(noted, trial.found)

    def _are_right(self, noted: NotedCall, found: Sequence[torch.Tensor | None]) -> bool:
        """Whether these are what the call saved, as far as anybody reads it.

        Of bytes, some may be what a library keeps and never writes.
        """
        for again, held in zip(found, self._saved.within(noted), strict=True):
            original = held.tensor()
            if original is None or again is None or held.is_idle or again.dtype == torch.uint8:
                continue
            again = part_here(again)
            original = part_here(original)
            if (
                again.shape != original.shape
                or again.dtype != original.dtype
                or not self._costs.is_same(again, original)
            ):
                return False
        return True

    def _watch(self, noted: NotedCall, trial: WatchedReplay) -> None:
        """Notes what a call takes that was watched while it was made again."""
        trace = trial.trace
        noted.most = max(trace.curve, default=0)
        for at, tensor in enumerate(trial.found):
            for part in () if tensor is None else with_memory_in(tensor):
                allocation = allocation_of(part, trace)
                if allocation is not None:
                    noted.again.setdefault(id(allocation), (allocation.num_bytes, []))[1].append(at)


def _given_to(noted: NotedCall) -> list[torch.Tensor] | None:
    """The tensors that a call was given; nothing where one of them is gone.

    Raises:
        NotRecomputable: one was written to since.
    """
    for argument in noted.call.arguments.tensors:
        argument.tensor()  # what is kept here is a copy, and shows no writes
    given: list[torch.Tensor] = []
    for held in noted.given:
        tensor = tensor_of(held)
        if tensor is None:
            return None
        given.append(tensor)
    return given
