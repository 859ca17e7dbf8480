"""What other slices return takes memory beside a step: micro-batches before it, or replicas of other devices."""

from lightning_dpx.memory import Profile
from lightning_dpx.memory.profile.other_outputs import beside_earlier_outputs, beside_merged_outputs

STEP = Profile((), (), (), (5, 9, 30, 20, 3), 3, 1.0, returned=4, merged=2)
SILENT = Profile((), (), (), (5, 9, 30, 20, 3), 3, 1.0)


def test_the_last_micro_batch_has_the_outputs_of_all_before_it_beside_it() -> None:
    # At the end 3 outputs of 4 bytes are merged into 6 bytes.
    assert beside_earlier_outputs(STEP, 3).curve == (13, 17, 38, 28, 18)
    assert beside_earlier_outputs(STEP, 1) == STEP
    assert beside_earlier_outputs(SILENT, 3) == SILENT


def test_outputs_are_merged_on_the_first_device_alone() -> None:
    assert beside_earlier_outputs(STEP, 3, 0).curve == (13, 17, 38, 28, 12)
    # Of another device as many come in parts, and 12 bytes are made of both.
    assert beside_earlier_outputs(STEP, 3, 6).curve == (13, 17, 38, 28, 30)


def test_backward_has_the_merged_outputs_of_all_devices_beside_it() -> None:
    assert beside_merged_outputs(STEP, 3).curve == (5, 9, 30, 30, 9)
    assert beside_merged_outputs(STEP, 0) == STEP
    assert beside_merged_outputs(SILENT, 3) == SILENT
