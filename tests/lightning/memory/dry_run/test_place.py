"""Steps that are planned for are run on their device where it is there, and what is found is what a run takes there."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lightning_dpx as dpx
from lightning_dpx.lightning import DryRun, Settings, dry_run
from lightning_dpx.lightning.lightning_api import Trainer
from lightning_dpx.lightning.memory.dry_run.place import device_there, on_its_device, trainer_on, trainer_to_look
from lightning_dpx.torch_compat import DisableTorchDispatch
from tests.commands.test_plan import Rows, Shallow
from tests.conftest import SIMULATED, make_trainer, sim_device

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
CPU = torch.device("cpu")
WORKSPACE = 2**20  # bytes


class Library:
    """Keeps room on every device that it was used on, as libraries of operators do."""

    rooms: dict[torch.device, torch.Tensor] = {}  # noqa: RUF012  of the process, as a library has it

    def use(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "sim" and tensor.device not in self.rooms:
            with DisableTorchDispatch():  # it asks the allocator, and no operator for it
                self.rooms[tensor.device] = torch.empty(WORKSPACE, dtype=torch.uint8, device=tensor.device)
        return tensor.clone()


LIBRARY = Library()


class ByLibrary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return LIBRARY.use(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].clone()


class UsesLibrary(Shallow):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = ByLibrary.apply(super().training_step(batch, batch_idx))  # type: ignore[no-untyped-call]
        return loss


def forget_uses() -> None:
    """Nothing is left on the devices, as in a new process."""
    Library.rooms.clear()
    gc.collect()


@pytest.fixture(autouse=True)
def _empty_devices() -> Iterator[None]:
    forget_uses()
    yield
    forget_uses()
    dpx.simulate(8)


def looked_at(module: Any, settings: Settings) -> DryRun:
    """What a dry run finds on the first device that is there."""

    def look(home: torch.device) -> DryRun:
        quiet = {"enable_model_summary": False, "enable_progress_bar": False, "enable_checkpointing": False}
        return dry_run(Trainer(**trainer_to_look(home), logger=False, max_epochs=1, **quiet), module, Rows(), settings)

    return on_its_device(settings.devices, look)


def peak_of_run(module: Any, budget: int | None = None) -> int:
    """The most that a real run has on the first device at a time."""
    monitor = dpx.DeviceMemoryMonitor(table=False, every_n_steps=1)
    strategy = dpx.DPXStrategy(memory_budget=budget, plan_cache=False)
    trainer = make_trainer(strategy=strategy, accelerator="sim", devices=1, max_epochs=1, callbacks=[monitor])
    trainer.fit(module, datamodule=Rows())
    return max(monitor.last[sim_device(0)].peak_by_phase.values())


def test_the_first_device_that_is_there_is_used() -> None:
    assert device_there([CPU, torch.device("cuda:0"), sim_device(2), sim_device(1)]) == sim_device(2)
    assert device_there([CPU, torch.device("cuda:0")]) is None
    assert device_there([torch.device("sim")]) == sim_device(0)
    assert device_there([torch.device("sim:9")]) is None, "there are eight"
    assert trainer_on([CPU, CPU]) == {"accelerator": "cpu", "devices": 2}
    assert trainer_on([sim_device(1), sim_device(3)]) == {"accelerator": "sim", "devices": [1, 3]}


def test_what_libraries_keep_on_a_device_is_in_the_peak_that_is_predicted_for_it() -> None:
    gc.collect()
    left = torch.get_device_module("sim").memory_allocated(0)  # by other tests: that is there as well
    found = looked_at(UsesLibrary(), Settings((sim_device(0),)))
    assert found.basis == "from a step that was run on sim:0, with the times of its model"
    (forecast,) = found.forecasts
    del found  # it holds a batch on the device
    assert WORKSPACE <= forecast.others <= WORKSPACE + left
    forget_uses()
    assert forecast.peak == pytest.approx(peak_of_run(UsesLibrary()), rel=0.02)


def test_a_budget_is_for_what_libraries_keep_as_well() -> None:
    budget = 3 * 2**20
    found = looked_at(UsesLibrary(), Settings((sim_device(0),), budget=budget))
    (forecast,) = found.forecasts
    del found
    assert forecast.fits
    assert forecast.static > WORKSPACE
    assert forecast.peak <= budget
    forget_uses()
    assert peak_of_run(UsesLibrary(), budget) == pytest.approx(forecast.peak, rel=0.02)


def test_a_step_that_does_not_fit_is_run_on_fewer_rows() -> None:
    whole = looked_at(Shallow(), Settings((sim_device(0),))).forecasts[0]
    gc.collect()
    dpx.simulate(8, memory=whole.peak // 2)
    found = looked_at(Shallow(), Settings((sim_device(0),)))
    assert found.basis.startswith("from steps on fewer rows that were run on sim:0")
    assert found.forecasts[0].peak == pytest.approx(whole.peak, rel=0.02)


def test_where_next_to_nothing_fits_a_step_is_predicted_from_fakes() -> None:
    module = Shallow()
    dpx.simulate(8, memory=sum(parameter.nbytes for parameter in module.parameters()) // 2)
    with pytest.warns(UserWarning, match=r"does not fit on sim:0 as it is, so it is predicted from fake tensors"):
        found = looked_at(module, Settings((sim_device(0),)))
    assert found.basis.startswith("from fake tensors for sim:0")
    assert all(parameter.device == CPU for parameter in module.parameters())


def test_an_error_of_the_step_is_no_lack_of_room() -> None:
    class Broken(Shallow):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise RuntimeError("not like this")

    with pytest.raises(RuntimeError, match="not like this"):
        looked_at(Broken(), Settings((sim_device(0),)))


def test_what_is_looked_at_on_a_device_comes_back_as_it_was() -> None:
    module = Shallow()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random = torch.sim.get_rng_state("sim:0")  # type: ignore[attr-defined]
    looked_at(module, Settings((sim_device(0), sim_device(1))))
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert torch.equal(torch.sim.get_rng_state("sim:0"), random)  # type: ignore[attr-defined]


def test_one_device_stands_for_others_and_says_so() -> None:
    found = looked_at(Shallow(), Settings((sim_device(1), torch.device("sim:12"))))
    assert "run on sim:1, with the times of its model; it stands for all devices" in found.basis
    assert [forecast.device for forecast in found.forecasts] == ["sim:1", "sim:12"]


def test_in_a_job_of_several_processes_none_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under SLURM and torchrun ``dpx plan`` waited for processes of the job, none of which plans."""
    for name, value in (("TORCHELASTIC_RUN_ID", "1"), ("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    trainer = Trainer(**trainer_to_look(sim_device(0)), logger=False)
    assert trainer.world_size == 1
