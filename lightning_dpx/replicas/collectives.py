"""Where the replicas of one step meet: collectives between threads, or between turns of one thread.

All participants exchange one value each and continue together. A participant that ends its step, with or without an
error, while others wait for it, breaks the meeting: they get an error that says who is missing, at once. Replicas that
run in line take turns: one that has to wait hands over to the next, so that one runs at a time and always in the same
order; threads for the waiting ones are made only when a step really meets.
"""

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_dpx.errors import CollectiveError
from lightning_dpx.replicas.context import ReplicaRank, outside_step

# Ctrl-C that comes just before a thread begins to wait is heard when it wakes: so no wait is longer at a time.
WAIT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Arrival:
    """What a participant came for, and what it brings."""

    kind: str
    value: Any
    act: Callable[[list[Any]], Any]
    optional: bool


class Rendezvous:
    """The meetings of one run of ``world_size`` participants.

    Args:
        world_size: Participants, with ranks 0 to ``world_size - 1``.
        in_turns: One participant runs at a time, the lowest rank that can go on first.
        refusal: Why no rendezvous is possible here, if so.
        start_others: Called once, by the first participant to wait in turns; starts the participants that have not
            begun, each of which calls :meth:`begin`.
        deadline: Seconds that a participant waits for the others; no limit unless given.
        on_turn: Called when the turn goes from one participant to another.
    """

    def __init__(
        self,
        world_size: int,
        in_turns: bool = False,
        refusal: str = "",
        start_others: Callable[[], None] = lambda: None,
        deadline: float | None = None,
        on_turn: Callable[[], None] | None = None,
    ) -> None:
        self._on_turn = on_turn
        self.world_size = world_size
        self._in_turns = in_turns
        self._refusal = refusal
        self._start_others = start_others
        self._deadline = deadline
        self._changed = threading.Condition()
        self._arrived: dict[int, _Arrival] = {}
        self._appointed: set[int] = set()  # who goes on without the others; the lowest acts
        self._results: dict[int, tuple[Any, BaseException | None]] = {}
        self._ended: set[int] = set()
        # Rank 0 begins, as it does where replicas run one after the other.
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
            act: Runs outside any replica's context, on one of those that take part.
            optional: Not all need come. Once all others have ended or wait too, those that wait for the same kind go
                on among themselves, the lowest rank first; the values of the others are ``None``.

        Raises:
            CollectiveError: participants disagree, have ended, or do not come before the deadline.
        """
        if self._refusal:
            raise CollectiveError(f"{kind} inside a step is not possible here: {self._refusal}.")
        with self._changed:
            self._arrived[rank] = _Arrival(kind, value, act, optional)
            # Threads for the others are made for a step that really meets, and for no other.
            first = not self._started
            self._started = True
        # Outside of the lock, which each of those that are started here takes to wait for its first turn.
        if self._in_turns and first:
            self._start_others()
        with self._changed:
            self._settle()
            self._hand_over()
            while rank not in self._results or not self._may_run(rank):
                if self._appointed and rank == min(self._appointed) and self._may_run(rank):
                    self._act_for(self._appointed)
                    self._hand_over()
                    continue
                if not self._wait(lambda: self._concerns(rank)):
                    # Past the deadline all who wait are told at once, and this one takes its own
                    # result.
                    here = ", ".join(map(str, sorted(self._arrived)))
                    self._break(f"{kind}: only replicas {here} of {self.world_size} came within {self._deadline:g} s")
                    break
            # Taken out, so that the next meeting of the run does not find it.
            result, error = self._results.pop(rank)
        if error is not None:
            raise error
        return result

    def _concerns(self, rank: int) -> bool:
        """Whether the waiting ``rank`` has something to do."""
        acts = bool(self._appointed) and rank == min(self._appointed)
        return (acts or rank in self._results) and self._may_run(rank)

    def begin(self, rank: int) -> None:
        """Waits for the participant's first turn."""
        if self._in_turns:
            with self._changed:
                self._changed.wait_for(lambda: self._may_run(rank))

    def end(self, rank: int) -> None:
        """The participant has finished its run or failed."""
        if self._in_turns and not self._started:
            self._ended.add(rank)  # no other runs, so none waits
            return
        with self._changed:
            self._ended.add(rank)
            self._settle()
            self._hand_over()

    def abandon(self) -> None:
        """The participants are given up: those in a rendezvous get an error."""
        # Before the lock is taken, which a participant that acts for all holds all the while.
        self._abandoned = True
        self._refusal = "the step was interrupted"
        # One of them may be in the middle of what all met for, an optimizer's step, say; it tells the others then.
        if self._changed.acquire(timeout=0.1):
            try:
                self._break(self._refusal)
                self._changed.notify_all()
            finally:
                self._changed.release()

    def _settle(self) -> None:
        """Once no other can come: those that wait go on, together or in part, or hear that they cannot."""
        # As long as one neither waits nor has ended, it may still come.
        if not self._arrived or len(self._arrived) + len(self._ended) < self.world_size or self._appointed:
            return
        kinds = {rank: arrival.kind for rank, arrival in sorted(self._arrived.items())}
        alike = len(set(kinds.values())) == 1
        # Those that need not wait for all go first; the others may meet once these have gone on.
        content = [rank for rank, arrival in sorted(self._arrived.items()) if arrival.optional]
        if alike and len(self._arrived) == self.world_size:
            self._appointed = set(self._arrived)
        elif content:
            self._appointed = {rank for rank in content if kinds[rank] == kinds[content[0]]}
        elif len(self._arrived) == self.world_size:
            calls = ", ".join(f"{rank} calls {kind}" for rank, kind in kinds.items())
            self._break(f"the replicas do not agree: {calls}", is_disagreement=True)
        else:
            waiting = ", ".join(f"{rank} ({kind})" for rank, kind in kinds.items())
            gone = ", ".join(map(str, sorted(self._ended)))
            reason = f"replicas {waiting} wait for replicas {gone}, which have ended their step"
            self._break(reason, is_disagreement=True)

    def _act_for(self, ranks: set[int]) -> None:
        """Exchanges the values of ``ranks``, in the calling participant's thread and context."""
        arrivals = {rank: self._arrived.pop(rank) for rank in sorted(ranks)}
        values: list[Any] = [None] * self.world_size
        for rank, arrival in arrivals.items():
            values[rank] = arrival.value
        # All mean the same by what they meet for, so the function of any of them would do.
        act = arrivals[min(ranks)].act
        try:
            # Collectives in here are those of the process: in the rank of a replica they would meet
            # again.
            with outside_step():
                result = act(values)
                error = None
        except BaseException as raised:  # noqa: BLE001  every participant must hear of it
            result = None
            error = raised
        self._results.update(dict.fromkeys(ranks, (result, error)))
        self._appointed = set()

    def _break(self, reason: str, *, is_disagreement: bool = False) -> None:
        for rank in self._arrived:
            error = CollectiveError(
                f"A collective inside a step cannot complete: {reason}. All replicas must make the same calls: "
                "decide by a value of the whole batch, as self.all_gather(...) gives, or give one device the whole "
                "batch (devices=1, micro_batches=1)."
            )
            error.is_disagreement = is_disagreement
            self._results[rank] = None, error
        self._arrived = {}
        self._appointed = set()

    def _wait(self, is_ready: Callable[[], bool]) -> bool:
        """Whether it was ready before the deadline."""
        # In pieces: a wait that is not interrupted hears no Ctrl-C.
        end = math.inf if self._deadline is None else time.monotonic() + self._deadline
        while (left := end - time.monotonic()) > 0:
            if self._changed.wait_for(is_ready, min(left, WAIT_SECONDS)):
                return True
        return is_ready()

    def _may_run(self, rank: int) -> bool:
        return not self._in_turns or self._turn == rank or self._abandoned

    def _hand_over(self) -> None:
        """The turn goes to the lowest rank that acts, or that neither waits nor has ended."""
        before = self._turn
        able = [rank for rank in range(self.world_size) if rank not in self._arrived and rank not in self._ended]
        if self._appointed:
            self._turn = min(self._appointed)
        elif able:
            self._turn = able[0]
        if self._on_turn is not None and self._turn != before:
            self._on_turn()
        self._changed.notify_all()


def check_differentiable(rank: ReplicaRank) -> None:
    """Whether gradients can meet between the backwards of the replicas.

    Raises:
        CollectiveError: several replicas share the autograd thread of one accelerator.
    """
    if rank.rendezvous_slot.oversubscribed:
        raise CollectiveError(
            f"Gradients through a collective are not possible here: {rank.rendezvous_slot.oversubscribed} holds "
            "several replicas, whose backwards would wait for each other in its one autograd thread. Give every "
            "replica a device of its own."
        )


class UnequalShapesError(CollectiveError):
    """Replicas gave a collective tensors of different shapes, as slices of different sizes do."""


class _AllGather(torch.autograd.Function):
    """Values (...) of K replicas to (K, ...) on each; gradients are summed over the replicas."""

    @staticmethod
    def forward(ctx: Any, rank: ReplicaRank, value: torch.Tensor) -> torch.Tensor:
        check_differentiable(rank)
        ctx.rank = rank
        # The gradient goes back to where the value came from; gathered ones lie elsewhere.
        ctx.device = value.device
        return _gathered(rank, "all_gather", value, each=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        mine: ReplicaRank = ctx.rank
        # Each replica's result holds the values of all, so the gradient of a value is the sum of what all have for it.
        parts, place = mine.meet_all("backward of all_gather", grads[0], each=True, gradients=True)
        return None, sum(part[place].to(ctx.device) for part in parts)


def _gathered(
    rank: ReplicaRank, kind: str, value: torch.Tensor, each: bool = False, gradients: bool = False
) -> torch.Tensor:
    parts, _ = rank.meet_all(kind, value, each=each, gradients=gradients)
    # torch.stack would raise an error that says nothing of replicas.
    if any(part.shape != value.shape for part in parts):
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise UnequalShapesError(
            f"{kind} got tensors of shapes {shapes}; all replicas must give the same shape. Give batches whose rows "
            "the replicas can share evenly (drop_last=True), or leave verify on, which keeps other batches whole."
        )
    return torch.stack([part.to(value.device) for part in parts])


class _SumOverReplicas(torch.autograd.Function):
    """Values (...) of K replicas to their sum (...) on each, and the same for their gradients."""

    @staticmethod
    def forward(ctx: Any, rank: ReplicaRank, value: torch.Tensor) -> torch.Tensor:
        check_differentiable(rank)
        ctx.rank = rank
        return _gathered(rank, "sum", value).sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, _gathered(ctx.rank, "backward of sum", grads[0], gradients=True).sum(0)


def all_gather(rank: ReplicaRank, value: torch.Tensor, sync_grads: bool = False) -> torch.Tensor:
    """(K, ...) on the caller's device, from (...) of every replica; K counts those of all processes.

    Raises:
        CollectiveError: see :meth:`Rendezvous.exchange`; or the shapes differ.
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
        CollectiveError: an unknown operation, and see :meth:`Rendezvous.exchange`.
    """
    stacked = _gathered(rank, f"reduce ({operation})", value)
    if operation in ("mean", "avg"):
        # Integers have no mean of their own kind.
        dtype = stacked.dtype if stacked.is_floating_point() else torch.float32
        return stacked.mean(0, dtype=dtype)
    if operation == "sum":
        return stacked.sum(0)
    if operation in ("min", "max"):
        if operation == "min":
            return stacked.amin(0)
        return stacked.amax(0)
    raise CollectiveError(f"reduce_op={operation!r} is not allowed; choose 'mean', 'sum', 'min' or 'max'.")


def broadcast(rank: ReplicaRank, value: Any, source: int) -> Any:
    """Replica ``source``'s object; its tensors keep their device."""
    values, _ = rank.meet_all(f"broadcast from {source}", value, each=True)
    return values[source]


__all__ = [
    "Rendezvous",
    "UnequalShapesError",
    "all_gather",
    "broadcast",
    "check_differentiable",
    "reduce",
    "sum_over_replicas",
]
