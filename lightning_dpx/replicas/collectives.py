"""Where the replicas of one step meet: collectives between threads, or between turns of one thread.

All participants exchange one value each and continue together. A participant that ends its step, with or without an
error, while others wait for it, breaks the meeting: they get an error that says who is missing, at once. Replicas that
run in line take turns: whoever has to wait hands over to the next, so that one runs at a time and always in the same
order; threads for the waiting ones are made only when a step really meets.
"""

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_dpx.errors import CollectiveError
from lightning_dpx.replicas.context import ReplicaRank, outside_step

# Ctrl-C that comes just before a thread begins to wait is heard when it wakes: so nobody waits longer at a time.
WAIT_SECONDS = 1.0


class Meeting:
    """The meetings of one run of ``world_size`` participants.

    Args:
        world_size: Participants, with ranks 0 to ``world_size - 1``.
        in_turns: One participant runs at a time, the lowest rank that can go on first.
        refusal: Why nobody can meet here, if so.
        start_others: Called once, by the first participant to wait in turns; starts the participants that have not
            begun, each of which calls :meth:`begin`.
        deadline: Seconds that a participant waits for the others; no limit unless given.
    """

    def __init__(
        self,
        world_size: int,
        in_turns: bool = False,
        refusal: str = "",
        start_others: Callable[[], None] = lambda: None,
        deadline: float | None = None,
    ) -> None:
        self.world_size = world_size
        self._in_turns, self._refusal, self._start_others = in_turns, refusal, start_others
        self._deadline = deadline
        self._changed = threading.Condition()
        self._arrived: dict[int, tuple[str, Any]] = {}
        self._optional: dict[int, Callable[[list[Any]], Any]] = {}  # by waiting rank, what need not be done by all
        self._results: dict[int, tuple[Any, BaseException | None]] = {}
        self._ended: set[int] = set()
        self._turn = 0
        self._started = False
        self._abandoned = False

    def exchange(
        self,
        rank: int,
        kind: str,
        value: Any,
        act: Callable[[list[Any]], Any] = list,
        *,
        optional: bool = False,
    ) -> Any:
        """What ``act`` makes of the values of all participants, in rank order; it runs once.

        Args:
            rank: The caller's rank.
            kind: What the caller takes part in; all must agree.
            value: The caller's contribution.
            act: Runs outside any replica's context, on the last one to arrive.
            optional: Once all others have ended, or wait for something else, those that came are enough; the values
                of the others are ``None``.

        Raises:
            CollectiveError: participants disagree, have ended, or do not come before the deadline.
        """
        if self._refusal:
            raise CollectiveError(f"{kind} inside a step is not possible here: {self._refusal}.")
        with self._changed:
            self._arrived[rank] = kind, value
            if optional:
                self._optional[rank] = act
            first, self._started = not self._started, True
        if self._in_turns and first:
            self._start_others()
        with self._changed:
            if not self._complete_optional():
                if len(self._arrived) == self.world_size:
                    self._complete(act)
                else:
                    self._break_if_hopeless()
            self._hand_over()
            if not self._wait(lambda: rank in self._results and self._may_run(rank)):
                here = ", ".join(map(str, sorted(self._arrived)))
                self._break(f"{kind}: only replicas {here} of {self.world_size} came within {self._deadline:g} s")
            result, error = self._results.pop(rank)
        if error is not None:
            raise error
        return result

    def begin(self, rank: int) -> None:
        """Waits for the first turn."""
        if self._in_turns:
            with self._changed:
                self._changed.wait_for(lambda: self._may_run(rank))

    def end(self, rank: int) -> None:
        """The participant has finished its run or failed."""
        if self._in_turns and not self._started:
            self._ended.add(rank)  # nobody else runs, so nobody waits
            return
        with self._changed:
            self._ended.add(rank)
            if not self._complete_optional():
                self._break_if_hopeless()
            self._hand_over()

    def abandon(self) -> None:
        """Nobody waits for the participants: those that wait for each other hear of it."""
        self._abandoned, self._refusal = True, "the step was interrupted"
        # One of them may be in the middle of what all met for, an optimizer's step, say; it tells the others then.
        if self._changed.acquire(timeout=0.1):
            try:
                self._break(self._refusal)
                self._changed.notify_all()
            finally:
                self._changed.release()

    def _complete(self, act: Callable[[list[Any]], Any]) -> None:
        kinds = {rank: kind for rank, (kind, _) in sorted(self._arrived.items())}
        if len(set(kinds.values())) > 1:
            self._break(
                "the replicas do not agree: " + ", ".join(f"{rank} calls {kind}" for rank, kind in kinds.items())
            )
            return
        self._act(act, sorted(self._arrived), [value for _, (_, value) in sorted(self._arrived.items())])

    def _complete_optional(self) -> bool:
        """Whether a meeting that not all must attend was held, because nobody else can come to it any more."""
        if not self._optional or len(self._arrived) + len(self._ended) < self.world_size:
            return False
        speaker = min(self._optional)
        kind = self._arrived[speaker][0]
        present = [rank for rank in sorted(self._optional) if self._arrived[rank][0] == kind]
        act = self._optional[speaker]
        values = [self._arrived[rank][1] if rank in present else None for rank in range(self.world_size)]
        self._act(act, present, values)
        return True

    def _act(self, act: Callable[[list[Any]], Any], present: list[int], values: list[Any]) -> None:
        try:
            with outside_step():
                result, error = act(values), None
        except BaseException as raised:  # noqa: BLE001  every participant must hear of it
            result, error = None, raised
        for rank in present:
            self._results[rank] = result, error
            self._optional.pop(rank, None)
            del self._arrived[rank]

    def _break_if_hopeless(self) -> None:
        if self._arrived and len(self._arrived) + len(self._ended) == self.world_size:
            waiting = ", ".join(f"{rank} ({kind})" for rank, (kind, _) in sorted(self._arrived.items()))
            gone = ", ".join(map(str, sorted(self._ended)))
            self._break(f"replicas {waiting} wait for replicas {gone}, which have ended their step")

    def _break(self, reason: str) -> None:
        for rank in self._arrived:
            self._results[rank] = (
                None,
                CollectiveError(
                    f"A collective inside a step cannot complete: {reason}. All replicas must make the same calls."
                ),
            )
        self._arrived = {}
        self._optional = {}

    def _wait(self, is_ready: Callable[[], bool]) -> bool:
        """Whether it was ready before the deadline."""
        end = math.inf if self._deadline is None else time.monotonic() + self._deadline
        while (left := end - time.monotonic()) > 0:
            if self._changed.wait_for(is_ready, min(left, WAIT_SECONDS)):
                return True
        return is_ready()

    def _may_run(self, rank: int) -> bool:
        return not self._in_turns or self._turn == rank or self._abandoned

    def _hand_over(self) -> None:
        """The turn goes to the lowest rank that neither waits nor has ended."""
        able = [rank for rank in range(self.world_size) if rank not in self._arrived and rank not in self._ended]
        if able:
            self._turn = able[0]
        self._changed.notify_all()


def _check_differentiable(rank: ReplicaRank) -> None:
    if rank.venue.crowded:
        raise CollectiveError(
            f"Gradients through a collective are not possible here: {rank.venue.crowded} holds several replicas, whose "
            "backwards would wait for each other in its one autograd thread. Give every replica a device of its own."
        )


class _AllGather(torch.autograd.Function):
    """Values (...) of K replicas to (K, ...) on each; gradients are summed over the replicas."""

    @staticmethod
    def forward(ctx: Any, rank: ReplicaRank, value: torch.Tensor) -> torch.Tensor:
        _check_differentiable(rank)
        ctx.rank, ctx.device = rank, value.device
        return _gathered(rank, "all_gather", value, each=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        mine: ReplicaRank = ctx.rank
        parts, place = mine.meet_all("backward of all_gather", grads[0], each=True, gradients=True)
        return None, sum(part[place].to(ctx.device) for part in parts)


def _gathered(
    rank: ReplicaRank, kind: str, value: torch.Tensor, each: bool = False, gradients: bool = False
) -> torch.Tensor:
    parts, _ = rank.meet_all(kind, value, each=each, gradients=gradients)
    if any(part.shape != value.shape for part in parts):
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise CollectiveError(f"{kind} got tensors of shapes {shapes}; all replicas must give the same shape.")
    return torch.stack([part.to(value.device) for part in parts])


class _SumOverReplicas(torch.autograd.Function):
    """Values (...) of K replicas to their sum (...) on each, and the same for their gradients."""

    @staticmethod
    def forward(ctx: Any, rank: ReplicaRank, value: torch.Tensor) -> torch.Tensor:
        _check_differentiable(rank)
        ctx.rank = rank
        return _gathered(rank, "sum", value).sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, _gathered(ctx.rank, "backward of sum", grads[0], gradients=True).sum(0)


def all_gather(rank: ReplicaRank, value: torch.Tensor, sync_grads: bool = False) -> torch.Tensor:
    """(K, ...) on the caller's device, from (...) of every replica; K counts those of all processes.

    Raises:
        CollectiveError: see :meth:`Meeting.exchange`; or the shapes differ.
    """
    if sync_grads:
        gathered: torch.Tensor = _AllGather.apply(rank, value)  # type: ignore[no-untyped-call]
        return gathered
    return _gathered(rank, "all_gather", value.detach(), each=True)


def sum_over_replicas(rank: ReplicaRank, value: torch.Tensor) -> torch.Tensor:
    """The sum of every replica's ``value``, on the caller's device, with gradients."""
    total: torch.Tensor = _SumOverReplicas.apply(rank, value)  # type: ignore[no-untyped-call]
    return total


def reduce(rank: ReplicaRank, value: torch.Tensor, operation: str) -> torch.Tensor:
    """Mean, sum, minimum or maximum over the replicas.

    Raises:
        CollectiveError: an unknown operation, and see :meth:`Meeting.exchange`.
    """
    stacked = _gathered(rank, f"reduce ({operation})", value)
    if operation in ("mean", "avg"):
        return stacked.mean(0, dtype=stacked.dtype if stacked.is_floating_point() else torch.float32)
    if operation == "sum":
        return stacked.sum(0)
    if operation in ("min", "max"):
        return stacked.amin(0) if operation == "min" else stacked.amax(0)
    raise CollectiveError(f"reduce_op={operation!r} is not allowed; choose 'mean', 'sum', 'min' or 'max'.")


def broadcast(rank: ReplicaRank, value: Any, source: int) -> Any:
    """Replica ``source``'s object; its tensors keep their device."""
    values, _ = rank.meet_all(f"broadcast from {source}", value, each=True)
    return values[source]


__all__ = ["Meeting", "all_gather", "broadcast", "reduce", "sum_over_replicas"]
