"""Round a step that is planned: what ran out of memory runs again, as far as nothing is lost by that."""

import pytest
import torch

from tests.conftest import SIMULATED
from tests.lightning.memory.test_out_of_memory import fit

pytestmark = [
    pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED),
    pytest.mark.usefixtures("devices_as_before"),
    pytest.mark.filterwarnings("ignore:dpx. the activations on sim.0 took"),  # which is what these tests are about
]


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("peak_in", ["forward", "backward"])
def test_the_step_is_repeated_and_nothing_differs(peak_in: str, num_devices: int) -> None:
    execution = "threads"
    expected = fit(None, num_devices, peak_in, execution)
    room = {("forward", 1): "2MiB", ("backward", 1): "4000KiB", ("forward", 2): "1600KiB", ("backward", 2): "1900KiB"}
    with pytest.raises(torch.OutOfMemoryError):
        fit(room[peak_in, num_devices], num_devices, peak_in, execution)
    with pytest.warns(UserWarning, match=r"ran out of memory .* and is repeated, 1 of 3 times at the most: on sim:0"):
        ours = fit(room[peak_in, num_devices], num_devices, peak_in, execution, on_oom="replan")
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


def test_half_a_backward_cannot_be_taken_back_once_gradients_accumulate() -> None:
    """The first batch of a window is repeated; in a later one the error comes out, and no gradient is lost unseen."""
    with pytest.warns(UserWarning, match=r"is repeated, 1 of 3"):
        fit("3500KiB", 1, "backward", "inline", on_oom="replan", accumulate_grad_batches=3)
    options = {"memory_budget": "3900KiB", "neighbor": True, "accumulate_grad_batches": 3}
    with pytest.raises(torch.OutOfMemoryError):
        fit("4000KiB", 1, "backward", "inline", on_oom="replan", **options)
