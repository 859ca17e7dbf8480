"""Who is asking? Inside a step a replica is a rank, and code deep in the user's module may ask for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaRank:
    """The place of the running replica among those that take part in this step."""

    rank: int
    world_size: int


_CURRENT: ContextVar[ReplicaRank | None] = ContextVar("lightning_dpx_replica", default=None)


def current_rank() -> ReplicaRank | None:
    """The replica that the calling code runs in, or ``None`` outside a step of several replicas."""
    return _CURRENT.get()


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """The calling code runs in replica ``rank`` for a while."""
    token = _CURRENT.set(ReplicaRank(rank, world_size))
    try:
        yield
    finally:
        _CURRENT.reset(token)
