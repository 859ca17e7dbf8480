"""What was there at a time beside what was predicted, and beside what a budget allows."""

from typing import Any

import pytest
import torch

from lightning_dpx.lightning.memory.peak_check import PeakCheck

MIB = 2**20


def test_what_an_optimizer_takes_within_a_step_is_told_before_its_backward_and_not_again_after(sim: Any) -> None:
    device = torch.device("sim", 0)
    limit = sim.memory_allocated(0) + MIB
    checks = PeakCheck(lambda _: (MIB // 2, limit))
    for _ in range(2):
        checks.begin_step([device])
    torch.empty(2 * MIB, dtype=torch.uint8, device=device)
    # By hand an optimizer steps within a step, before any backward of Lightning's.
    with pytest.warns(UserWarning, match="were allocated on sim:0"):
        checks.end_update()
    with pytest.warns(UserWarning, match=r"activations on sim:0 took 2\.0 MiB where 512\.0 KiB was predicted"):
        checks.end_backward()
    checks.end_update()


@pytest.mark.parametrize("num_steps", [2, 7])
def test_what_steps_have_taken_since_the_last_look_is_told_before_a_plan_ends(sim: Any, num_steps: int) -> None:
    device = torch.device("sim", 0)
    limit = sim.memory_allocated(0) + MIB
    checks = PeakCheck(lambda _: (MIB // 2, limit))
    for number in range(num_steps):
        checks.begin_step([device])
        if number == num_steps - 1:
            torch.empty(2 * MIB, dtype=torch.uint8, device=device)
        elif number:
            checks.end_update()
    with pytest.warns(UserWarning, match="MiB were allocated on sim:0 at a time in the last steps"):
        checks.end_plan()
    checks.end_plan()
