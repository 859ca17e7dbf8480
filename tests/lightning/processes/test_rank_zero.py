"""The rank of ``rank_zero_only`` is that of the running replica inside a step, and comes back after the last user."""

from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_dpx.lightning.processes.rank_zero import StepAwareRank, forget_steps, make_step_aware
from lightning_dpx.replicas.context import RendezvousSlot, ReplicaRank, as_rank


class User:
    """A strategy in a run."""


@rank_zero_only
def once() -> str:
    return "ran"


def test_only_the_first_replica_of_all_is_rank_zero_inside_a_step() -> None:
    user = User()
    before = rank_zero_only.rank
    make_step_aware(user, 0)
    for index, expected in ((0, "ran"), (1, None)):
        with as_rank(ReplicaRank(index, 2, RendezvousSlot())):
            assert once() == expected
    assert once() == "ran"
    forget_steps(user)
    make_step_aware(user, 1, first_replica=2)
    with as_rank(ReplicaRank(0, 2, RendezvousSlot())):
        assert rank_zero_only.rank == 2
        assert once() is None
    assert rank_zero_only.rank == 1
    forget_steps(user)
    assert rank_zero_only.rank is before


def test_it_stays_until_the_last_user_has_gone() -> None:
    before = rank_zero_only.rank
    first, second = User(), User()
    make_step_aware(first, 0)
    make_step_aware(second, 0)
    forget_steps(first)
    assert isinstance(rank_zero_only.rank, StepAwareRank)
    forget_steps(second)
    assert rank_zero_only.rank is before
