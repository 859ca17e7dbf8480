"""Who is asking? Inside a step a replica is a rank, and code deep in the user's module may ask for it."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol


class MeetingPlace(Protocol):
    """Where the replicas of a run exchange values."""

    def exchange(self, rank: int, kind: str, value: Any, act: Callable[[list[Any]], Any] = list) -> Any:
        """What ``act`` makes of all values."""


@dataclass(slots=True)
class Venue:
    """Holds the meeting of the current run, for functions that outlive the run in which they were made.

    Attributes:
        crowded: An accelerator that holds several replicas, if there is one.
        was_used: Whether anybody has ever met here.
    """

    meeting: MeetingPlace | None = None
    crowded: str = ""
    was_used: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaRank:
    """The place of the running replica among those that take part in this step."""

    rank: int
    world_size: int
    venue: Venue

    def meet(self, kind: str, value: Any, act: Callable[[list[Any]], Any] = list) -> Any:
        """Exchanges ``value`` with the other replicas of the step; see ``Meeting.exchange``."""
        assert self.venue.meeting is not None, "a rank exists during a run only"
        self.venue.was_used = True
        return self.venue.meeting.exchange(self.rank, kind, value, act)


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
