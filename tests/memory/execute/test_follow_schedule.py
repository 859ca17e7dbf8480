"""How many forwards are followed call by call."""

from lightning_dpx.memory.execute.follow_schedule import FollowSchedule


def followed(schedule: FollowSchedule, *, changed: bool = False, met: tuple[str, ...] = ()) -> bool:
    """Whether one more forward is followed; one that is not may turn out to have left the routine."""
    is_followed = schedule.begin()
    if is_followed:
        schedule.spend(met)
    schedule.end(changed=changed and not is_followed, grew=False)
    return is_followed


def test_every_deviation_doubles_the_forwards_that_are_followed_after_it() -> None:
    schedule = FollowSchedule(2, ())
    assert [followed(schedule) for _ in range(4)] == [True, True, False, False]
    lengths = []
    for _ in range(4):
        assert not followed(schedule, changed=True)
        length = 0
        while followed(schedule):
            length += 1
        lengths.append(length)
    assert lengths == [2, 4, 8, 16]
    assert schedule.num_deviations == 4


def test_all_that_a_plan_drops_is_met_first_but_not_waited_for_forever() -> None:
    schedule = FollowSchedule(2, {"a:1", "b:1"})
    assert [followed(schedule, met=("a:1",)) for _ in range(5)] == [True] * 5
    assert [followed(schedule, met=("b:1",)) for _ in range(3)] == [True, True, False]
    unmet = FollowSchedule(2, {"never:1"})
    assert [followed(unmet) for _ in range(20)] == [True] * 17 + [False] * 3


def test_where_larger_steps_matter_one_is_looked_at_now_and_then() -> None:
    schedule = FollowSchedule(1, ())
    looked_at = [number for number in range(1, 70) if followed(schedule)]
    assert looked_at == [1, 16, 32, 64]
