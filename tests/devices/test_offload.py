"""An offloaded tensor: its values are elsewhere until they are fetched, once."""

import gc

import pytest
import torch

from lightning_dpx.devices import OffloadedTensor
from tests.conftest import SIMULATED, sim_device

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
SIZE = 4096  # floats


def test_the_memory_is_free_until_the_values_are_fetched_and_again_after_their_release(sim) -> None:
    tensor = torch.arange(SIZE, dtype=torch.float32, device=sim_device(1))
    held = sim.memory_allocated(1)
    offloaded = OffloadedTensor(tensor, torch.device("cpu"))
    offloaded.free_original()
    del tensor
    gc.collect()
    assert sim.memory_allocated(1) == held - SIZE * 4
    offloaded.start_fetch()
    fetched = offloaded.fetch()
    assert offloaded.fetch() is fetched, "once"
    assert (fetched.device, fetched[-1].item()) == (sim_device(1), SIZE - 1)
    del fetched
    offloaded.release()
    assert sim.memory_allocated(1) == held - SIZE * 4
    assert offloaded.fetch()[1].item() == 1, "the values stay offloaded"


def test_a_device_may_hold_what_the_host_offloads() -> None:
    offloaded = OffloadedTensor(torch.ones(3), sim_device(1))
    assert offloaded.fetch().device == torch.device("cpu")
