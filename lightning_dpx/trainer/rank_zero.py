"""``rank_zero_only`` keeps its rank in one number for the whole process; inside a step every replica has its own."""

from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_dpx.replicas import current_rank


class StepAwareRank(int):
    """The rank of the process, that compares as the rank of the running replica inside a step."""

    first_replica = 0  # of this process, among those of all processes

    def __eq__(self, other: object) -> bool:
        rank = current_rank()
        return int(self) == other if rank is None else self.first_replica + rank.rank == other

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __bool__(self) -> bool:
        return self != 0


def make_step_aware(process_rank: int, first_replica: int = 0) -> None:
    """``rank_zero_only`` functions run on the first replica of all only, from now on."""
    rank = StepAwareRank(process_rank)
    rank.first_replica = first_replica
    vars(rank_zero_only)["rank"] = rank
