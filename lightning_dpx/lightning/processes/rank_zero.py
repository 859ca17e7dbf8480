"""``rank_zero_only`` keeps its rank in one number for the whole process; inside a step every replica has its own."""

import weakref

from lightning_dpx.lightning.lightning_api import rank_zero_only
from lightning_dpx.replicas import current_rank


class StepAwareRank(int):
    """The rank of the process, that compares as the rank of the running replica inside a step."""

    first_replica = 0  # of this process, among those of all processes
    replaced: object = None  # what was there before

    def __eq__(self, other: object) -> bool:
        # The decorator asks whether rank == 0, of whatever thread runs, so
        # the answer can depend on it.
        rank = current_rank()
        if rank is None:
            return int(self) == other
        return self.first_replica + rank.rank == other

    def __hash__(self) -> int:
        # A class that defines __eq__ alone would lose its hash, and with it its place as a key.
        return int.__hash__(self)

    def __bool__(self) -> bool:
        return self != 0


_USERS: "weakref.WeakSet[object]" = weakref.WeakSet()  # that are in a run
_MISSING = object()


def make_step_aware(user: object, process_rank: int, first_replica: int = 0) -> None:
    """Lets ``rank_zero_only`` functions run on the first replica of all only, inside a step.

    Args:
        user: Who needs it.
        process_rank: The rank outside of steps.
        first_replica: Of this process, among those of all processes.
    """
    # Another strategy of ours may be in a run: what was there before the first one is handed on.
    found = vars(rank_zero_only).get("rank", _MISSING)
    rank = StepAwareRank(process_rank)
    rank.first_replica = first_replica
    rank.replaced = found.replaced if isinstance(found, StepAwareRank) else found
    vars(rank_zero_only)["rank"] = rank
    _USERS.add(user)


def forget_steps(user: object) -> None:
    """Puts the rank back that was there before, once the last user has gone."""
    _USERS.discard(user)
    rank = vars(rank_zero_only).get("rank")
    # Other code may have set a rank meanwhile, such as a strategy of Lightning; it stays.
    if _USERS or not isinstance(rank, StepAwareRank):
        return
    if rank.replaced is _MISSING:
        del vars(rank_zero_only)["rank"]
    else:
        vars(rank_zero_only)["rank"] = rank.replaced
