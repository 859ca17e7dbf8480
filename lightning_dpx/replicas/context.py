"""Who is asking? Inside a step a replica is a rank, and code deep in the user's module may ask for it."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_dpx.errors import CollectiveError


class RendezvousPlace(Protocol):
    """Where the replicas of a run exchange values."""

    def exchange(
        self,
        rank: int,
        kind: str,
        value: Any,
        act: Callable[[list[Any]], Any] = list,
        *,
        optional: bool = False,
    ) -> Any:
        """What ``act`` makes of all values."""

    def abandon(self) -> None:
        """The participants are given up."""


class NoMeeting:
    """The meeting place between runs, where no replica meets another."""

    def exchange(
        self,
        rank: int,
        kind: str,
        value: Any,
        act: Callable[[list[Any]], Any] = list,
        *,
        optional: bool = False,
    ) -> Any:
        """Raises an error, since no other replica comes.

        Raises:
            CollectiveError: the caller is what is left of a run that has ended.
        """
        raise CollectiveError(
            f"{kind} was called in replica {rank} of a step that has ended; its replicas do not meet any more. Call it "
            "while the step runs."
        )

    def abandon(self) -> None:
        """There are no participants to give up."""


NO_MEETING = NoMeeting()


class InterProcess(Protocol):
    """Reaches the replicas of other processes."""

    def __call__(self, kind: str, values: list[Any], *, each: bool, gradients: bool) -> tuple[list[Any], int]:
        """The values of all replicas of all processes, from those of this one; and the place of its first.

        Args:
            kind: What they meet for; all processes must agree.
            values: One per replica that takes part.
            each: Every replica is asked for by its place, so none may be missing.
            gradients: They are gradients of each process's own loss, of which each is a part of the whole.
        """


@dataclass(slots=True)
class RendezvousSlot:
    """Holds the meeting of the current run, for functions that outlive the run in which they were made.

    Attributes:
        meeting: Where the replicas of this process meet, during a run.
        oversubscribed: An accelerator that holds several replicas, if there is one.
        was_used: Whether replicas have ever met here.
        beyond: The way to the other processes, where there are several.
        abandoned: The run was given up; what is left of it must not meet that of another run.
    """

    meeting: RendezvousPlace = NO_MEETING
    oversubscribed: str = ""
    was_used: bool = False
    beyond: InterProcess | None = None
    abandoned: bool = False


@dataclass(slots=True, eq=False)  # not frozen: K are made in every stage of a step
class ReplicaRank:
    """The place of the running replica among those that take part in this step."""

    rank: int
    world_size: int
    rendezvous_slot: RendezvousSlot

    @property
    def is_alone(self) -> bool:
        """Whether there is no other to meet, in this process or another."""
        return self.world_size == 1 and self.rendezvous_slot.beyond is None

    def meet(self, kind: str, value: Any, act: Callable[[list[Any]], Any] = list, *, optional: bool = False) -> Any:
        """Exchanges ``value`` with the other replicas of the step; see ``Rendezvous.exchange``."""
        return self.exchange(kind, value, act, optional=optional)

    def meet_present(self, kind: str, value: Any, act: Callable[[list[Any]], Any]) -> Any:
        """Like :meth:`meet`, but those that do not come, because they have ended or wait elsewhere, are not missed."""

        def act_on_present(values: list[Any]) -> Any:
            # The places of those that do not come hold nothing.
            return act([value for value in values if value is not None])

        return self.exchange(kind, value, act_on_present, optional=True)

    def exchange(self, kind: str, value: Any, act: Callable[[list[Any]], Any], *, optional: bool) -> Any:
        """What all meetings of this replica come to; see ``Rendezvous.exchange``."""
        # No backward is a joint one then: in that a replica could not wait for another.
        self.rendezvous_slot.was_used = True
        return self.rendezvous_slot.meeting.exchange(self.rank, kind, value, act, optional=optional)

    def meet_all(self, kind: str, value: Any, *, each: bool = False, gradients: bool = False) -> tuple[list[Any], int]:
        """Exchanges ``value`` with the replicas of all processes: their values, and the caller's place among them.

        For the arguments see :class:`InterProcess`.
        """
        # Only one replica speaks with the other processes, for all: the exchange calls it once.
        beyond = self.rendezvous_slot.beyond
        if beyond is None:
            return self.meet(kind, value), self.rank
        values, first = self.meet(kind, value, lambda mine: beyond(kind, mine, each=each, gradients=gradients))
        return values, first + self.rank


# A context variable and no thread-local: a lane runs each task in a copy of its caller's.
_CURRENT: ContextVar[ReplicaRank | None] = ContextVar("lightning_dpx_replica", default=None)


def current_rank() -> ReplicaRank | None:
    """The replica that the calling code runs in, or ``None`` outside a step of several replicas."""
    return _CURRENT.get()


class as_rank:  # noqa: N801  a context manager, entered several times a step: no generator
    """The calling code runs in this replica for a while."""

    __slots__ = ("_rank", "_token")

    def __init__(self, rank: ReplicaRank | None) -> None:
        self._rank = rank

    def __enter__(self) -> None:
        self._token = _CURRENT.set(self._rank)

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)


def become_rank(rank: ReplicaRank) -> None:
    """From here on, and until the :class:`as_rank` around it ends, the calling code runs in this replica."""
    _CURRENT.set(rank)


def outside_step() -> Any:
    """The calling code answers for the process for a while."""
    return as_rank(None)
