"""``rank_zero_only`` keeps its rank in one number for the whole process; inside a step every replica has its own."""

from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_dpx.replicas import current_rank


class StepAwareRank(int):
    """The rank of the process, that compares as the rank of the running replica inside a step."""

    def __eq__(self, other: object) -> bool:
        rank = current_rank()
        return int(self) == other if rank is None else rank.rank == other

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __bool__(self) -> bool:
        return self != 0


def make_step_aware() -> None:
    """``rank_zero_only`` functions run on the first replica only from now on; doing it twice changes nothing."""
    rank = getattr(rank_zero_only, "rank", None) or 0
    vars(rank_zero_only)["rank"] = StepAwareRank(rank)
