"""When the room that plans count on is looked at."""

from lightning_dpx.lightning.memory.room_check_schedule import RoomCheckSchedule


def test_it_is_looked_at_in_the_first_step_of_early_plans_and_of_epochs_and_now_and_then() -> None:
    confirmation = RoomCheckSchedule()
    confirmation.restart(before_batches=True)
    assert confirmation.begin_step()
    assert confirmation.is_first
    confirmation.restart(before_batches=False)
    assert [number for number in range(1, 10) if confirmation.begin_step()] == [2, 4, 8]
    confirmation.ask()
    assert confirmation.begin_step()
    assert not confirmation.is_first
    assert not confirmation.begin_step()
    confirmation.stop()
    confirmation.ask()
    assert not confirmation.begin_step()
