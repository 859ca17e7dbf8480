"""The time of a stage is that of the replicas that worked in it."""

import torch

from lightning_dpx.replicas.timing import StepTimes

CPU = torch.device("cpu")


def test_only_the_replica_and_the_stage_that_were_watched_have_a_time() -> None:
    times = StepTimes([CPU, CPU])
    times.begin([3, 0])
    watch = times.watch(0, "forward")
    watch.start()
    sum(range(1000))
    watch.stop()
    first, second = times.seconds("forward")
    assert first > 0
    assert second == 0
    assert times.seconds("backward") == [0, 0]
    assert times.rows == (3, 0)


def test_a_step_that_was_watched_as_a_whole_belongs_to_the_replica_with_rows() -> None:
    times = StepTimes([CPU, CPU])
    times.begin([0, 4])
    with_rows = times.watch_alone("forward")
    with_rows.start()
    sum(range(1000))
    with_rows.stop()
    first, second = times.seconds("forward")
    assert first == 0
    assert second > 0
