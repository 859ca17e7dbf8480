"""``memory_budget`` or ``plan`` together with ``shifts``: each device within its budget, and the bits of neither."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

import lightning_dpx as dpx
from tests.conftest import SIMULATED, assert_equal
from tests.trainer.test_memory_planning import MIB, Tower, fit, loader, tower

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
HALF, MOST = ["net.[3-6]"], ["net.[1-8]"]
EACH = {"sim:0": "sim:4", "sim:1": "sim:5"}


@pytest.fixture(autouse=True)
def sim() -> Iterator[Any]:
    """The simulated devices; they count from now on."""
    gc.collect()
    module = torch.get_device_module("sim")
    for device in range(8):
        module.reset_peak_memory_stats(device)
    yield module
    gc.collect()
    dpx.simulate(8)


def trained(model: LightningModule, devices: int = 1, data: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    trainer = {name: options.pop(name) for name in list(options) if name in ("precision", "accumulate_grad_batches")}
    return fit(model, data, strategy=dpx.DPXStrategy(**options), accelerator="sim", devices=devices, **trainer)


@pytest.mark.parametrize(
    ("devices", "shifts", "parts", "budget"),
    [
        (1, {"sim:0": "sim:4"}, HALF, 10),
        (1, {"sim:0": "sim:4"}, MOST, 14),  # the target is the one that has too little
        (2, EACH, HALF, 9),
        (2, {"sim:0": "sim:4", "sim:1": "sim:4"}, HALF, 10),
        (2, {"sim:1": "sim:4"}, HALF, 14),
    ],
    ids=["one", "the target is planned", "each its own", "one spare for both", "only the second"],
)
def test_shifted_and_planned_training_ends_at_the_same_bits_within_the_budget(
    devices: int, shifts: dict[str, str], parts: list[str], budget: int, sim: Any
) -> None:
    ours = trained(tower(dropout=0.0), devices, memory_budget=f"{budget}MiB", shifts=shifts, shift_activations=parts)
    peaks = {device: sim.max_memory_allocated(device) for device in range(8)}
    assert all(peak <= budget * MIB for peak in peaks.values()), peaks
    assert_equal(ours, trained(tower(dropout=0.0), devices), bitwise=True)
    for device in range(8):
        sim.reset_peak_memory_stats(device)
    gc.collect()
    trained(tower(dropout=0.0), devices, shifts=shifts, shift_activations=parts)
    assert any(sim.max_memory_allocated(device) > budget * MIB for device in range(8)), "the budget was no budget"
