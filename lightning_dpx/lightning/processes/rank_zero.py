"""``rank_zero_only`` keeps its rank in one number for the whole process; inside a step every replica has its own."""

import weakref

from lightning_dpx.lightning.lightning_api import rank_zero_only
from lightning_dpx.replicas import current_rank


class StepAwareRank(int):
    """The rank of the process, that compares as the rank of the running replica inside a step."""

    first_replica = 0  # of this process, among those of all processes
    replaced: object = None  # what was there before

    def __eq__(self, other: object) -> bool:
        rank = current_rank()
        return int(self) == other if rank is None else self.first_replica + rank.rank == other

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __bool__(self) -> bool:
        return self != 0


_USERS: "weakref.WeakSet[object]" = weakref.WeakSet()  # that are in a run
_MISSING = object()


def make_step_aware(user: object, process_rank: int, first_replica: int = 0) -> None:
    """``rank_zero_only`` functions run on the first replica of all only, until :func:`forget_steps`.

    Args:
        user: Who needs it.
        process_rank: The rank outside of steps.
        first_replica: Of this process, among those of all processes.
    """
    found = vars(rank_zero_only).get("rank", _MISSING)
    rank = StepAwareRank(process_rank)
    rank.first_replica = first_replica
    rank.replaced = found.replaced if isinstance(found, StepAwareRank) else found
    vars(rank_zero_only)["rank"] = rank
    _USERS.add(user)


def forget_steps(user: object) -> None:
    """``user`` needs it no longer; after the last one the rank is what it was before the first."""
    _USERS.discard(user)
    rank = vars(rank_zero_only).get("rank")
    if _USERS or not isinstance(rank, StepAwareRank):
        return
    if rank.replaced is _MISSING:
        del vars(rank_zero_only)["rank"]
    else:
        vars(rank_zero_only)["rank"] = rank.replaced
