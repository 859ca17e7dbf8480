"""A device whose type has no second one, as Apple's GPU (mps): torch's module for it is small, and keeps no statistics.

A simulated device stands for it, behind a module that has no more than torch.mps has.
"""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

import lightning_dpx as dpx
from lightning_dpx.commands import doctor
from lightning_dpx.devices import allocated_and_peak, capacity_of, device_context, free_bytes, reset_peak_memory
from lightning_dpx.devices.identity import canonical_device, is_only_of_its_type
from lightning_dpx.memory.tracing.allocator_account import hidden_on
from lightning_dpx.replicas.shared_iterators import SharedIterator
from tests.conftest import SIMULATED, make_trainer

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=str(SIMULATED))
MIB = 2**20
MODEL_OF_TIME = ("link_bytes_per_second", "link_latency", "bytes_per_second", "busy_seconds")


class Small:
    """What torch has of Apple's GPU, for the first simulated device."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.Event = module.Event
        # Lightning's accelerator for simulated devices and their clock are no part of torch's module.
        self.set_device = module.set_device
        for name in MODEL_OF_TIME:
            setattr(self, name, getattr(module, name))

    def device_count(self) -> int:
        return 1

    def is_available(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._module.synchronize(0)

    def get_rng_state(self, device: Any = "sim") -> torch.Tensor:
        state: torch.Tensor = self._module.get_rng_state(device)
        return state

    def set_rng_state(self, new_state: torch.Tensor, device: Any = "sim") -> None:
        self._module.set_rng_state(new_state, device)

    def current_allocated_memory(self) -> int:
        return int(self._module.memory_allocated(0))

    driver_allocated_memory = current_allocated_memory

    def recommended_max_memory(self) -> int:
        return 64 * MIB


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device of which there is no second one."""
    usual = torch.get_device_module
    small = Small(usual("sim"))

    def module_of(device: Any = None) -> Any:
        if device is not None and torch.device(device).type == "sim":
            return small
        return usual(device)

    monkeypatch.setattr(torch, "get_device_module", module_of)
    return torch.device("sim:0")


def test_it_needs_no_index_and_no_context(only: torch.device) -> None:
    assert is_only_of_its_type(only)
    assert canonical_device("sim") == only
    with device_context(only):
        assert torch.ones(1, device=only).device == only


def test_what_it_holds_is_told_as_far_as_torch_knows(only: torch.device) -> None:
    reset_peak_memory(only)
    held = allocated_and_peak(only)[0]
    tensor = torch.ones(MIB, dtype=torch.uint8, device=only)
    assert allocated_and_peak(only) == (held + MIB, held + MIB)
    del tensor
    assert allocated_and_peak(only) == (held, held + MIB), "the most that was seen"
    reset_peak_memory(only)
    assert allocated_and_peak(only) == (held, held)
    assert free_bytes(only) == 64 * MIB - held
    assert capacity_of(only) == (held, 64 * MIB, 0)
    assert hidden_on(only) == "torch tells no peaks of sim devices"


def test_the_doctor_names_it_by_its_type(only: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "accelerators", lambda: [only])
    found = {finding.topic: finding.value for finding in doctor.devices()}
    assert found["sim:0"] == "sim, 0.1 GiB"


def test_items_of_shared_iterators_are_copied_to_it(only: torch.device) -> None:
    given = torch.ones(2, device=only)
    taken = next(SharedIterator(iter([given]), only))
    assert taken.device == only
    assert torch.equal(taken.cpu(), given.cpu())


class Blocks(LightningModule):
    """(B, 32) to one number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("options", [{}, {"memory_budget": "1MiB", "plan_cache": False}, {"workload": "auto"}])
def test_training_on_it_gives_the_bits_of_the_host(options: dict[str, Any], only: torch.device) -> None:
    module = Blocks()
    twin = copy.deepcopy(module)
    loader = DataLoader(torch.randn(1024, 32), 256)
    make_trainer().fit(twin, loader)
    make_trainer(accelerator="sim", strategy=dpx.DPXStrategy(**options), callbacks=[dpx.DeviceMemoryMonitor()]).fit(
        module, loader
    )
    assert all(map(torch.equal, twin.parameters(), module.parameters()))
