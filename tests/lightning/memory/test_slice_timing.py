"""What the host takes of a step's time."""

import pytest

from lightning_dpx.lightning.memory.slice_timing import TimedSlice


@pytest.mark.parametrize(("whole", "queued", "busy"), [(2.0, 0.5, 0.25), (1.0, 1.5, 1.0)])
def test_the_host_is_busy_until_all_is_handed_over_and_never_longer_than_the_step(
    whole: float, queued: float, busy: float
) -> None:
    assert TimedSlice(whole, queued).busy_host == busy
