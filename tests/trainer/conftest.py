"""What several files of tests of the strategy use."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lightning_dpx as dpx
from tests.conftest import SIMULATED


@pytest.fixture
def sim() -> Iterator[Any]:
    """``torch.sim``; its devices count from now on, and are as empty as other tests have left them."""
    if SIMULATED:
        pytest.skip(SIMULATED)
    gc.collect()
    module = torch.get_device_module("sim")
    for device in range(8):
        module.reset_peak_memory_stats(device)
    yield module
    gc.collect()
    dpx.simulate(8)
