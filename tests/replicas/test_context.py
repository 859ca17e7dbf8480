"""Code deep in a module finds the replica that it runs in, and nothing outside a step."""

from typing import Any

import pytest

from lightning_dpx.errors import CollectiveError
from lightning_dpx.replicas.context import (
    RendezvousSlot,
    ReplicaRank,
    as_rank,
    become_rank,
    current_rank,
    outside_step,
)


class Meeting:
    """Where only the caller comes."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str, Any, bool]] = []

    def exchange(self, rank: int, kind: str, value: Any, act: Any = list, *, optional: bool = False) -> Any:
        self.seen.append((rank, kind, value, optional))
        return act([None, value])

    def abandon(self) -> None:
        raise NotImplementedError


def rank(**slot: Any) -> ReplicaRank:
    return ReplicaRank(1, 2, RendezvousSlot(**slot))


def test_the_innermost_rank_is_the_current_one_and_the_outer_one_comes_back() -> None:
    outer = rank()
    inner = rank()
    assert current_rank() is None
    with as_rank(outer):
        with as_rank(inner):
            assert current_rank() is inner
        with outside_step():
            assert current_rank() is None
        become_rank(inner)
        assert current_rank() is inner
    assert current_rank() is None


def test_a_rank_meets_where_its_slot_says_and_remembers_that_it_did() -> None:
    meeting = Meeting()
    mine = rank(meeting=meeting)
    assert mine.meet("sum", 5) == [None, 5]
    assert mine.meet_present("step", 7, list) == [7], "those that do not come are left out"
    assert meeting.seen == [(1, "sum", 5, False), (1, "step", 7, True)]
    assert mine.rendezvous_slot.was_used


def test_with_other_processes_the_values_of_all_come_and_the_place_counts_theirs() -> None:
    def beyond(kind: str, values: list[Any], *, each: bool, gradients: bool) -> tuple[list[Any], int]:
        return ["theirs", *values], 1

    mine = rank(meeting=Meeting(), beyond=beyond)
    assert mine.meet_all("gather", "mine") == (["theirs", None, "mine"], 2)
    assert rank(meeting=Meeting()).meet_all("gather", "mine") == ([None, "mine"], 1)


def test_alone_is_who_has_neither_replicas_nor_processes_beside_it() -> None:
    assert ReplicaRank(0, 1, RendezvousSlot()).is_alone
    assert not ReplicaRank(0, 1, RendezvousSlot(beyond=lambda *_, **__: ([], 0))).is_alone
    assert not rank().is_alone


def test_what_is_left_of_a_run_that_has_ended_meets_nobody_and_is_told_so() -> None:
    slot = RendezvousSlot()
    rank = ReplicaRank(0, 2, slot)
    slot.meeting.abandon()
    with pytest.raises(CollectiveError, match="all_reduce was called in replica 0 of a step that has ended"):
        rank.meet("all_reduce", 1)
    with pytest.raises(CollectiveError, match="has ended"):
        rank.meet_present("all_reduce", 1, sum)
