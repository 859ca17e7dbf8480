"""Which batch size is fastest and fits is predicted from one step, and the predictions are those of real sizes."""

import copy
import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from lightning_dpx.lightning import Settings, dry_run
from lightning_dpx.lightning.memory.dry_run import place
from lightning_dpx.lightning.memory.slice_timing import TimedSlice
from lightning_dpx.lightning.tuning import TuneOptions, batch_size_tuner, tune_batch_size
from lightning_dpx.memory.plan_cache import PlanCache
from lightning_dpx.memory.profile import costs, timing_effort
from lightning_dpx.memory.profile.roofline import rates_of
from lightning_dpx.torch_compat import FakeTensor
from tests.commands.test_plan import Normed, Shallow
from tests.conftest import SIMULATED, make_trainer

ROWS = 2048
DEVICES = (torch.device("cuda:0"), torch.device("cuda:1"))


class Rows(LightningDataModule):
    """Rows (B, 64) and a number for each."""

    def __init__(self, batch_size: int = 256) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(ROWS, 64), torch.randn(ROWS, 1)), self.batch_size)


def test_every_peak_is_that_of_a_dry_run_with_this_batch_size() -> None:
    found = dpx.tune(Shallow(), Rows(), devices=DEVICES, batch_sizes=(64, 512, 1024))
    assert found.current == 256
    assert [one.batch_size for one in found.batch_sizes] == [64, 512, 1024]
    for one in found.batch_sizes:
        dry = dry_run(make_trainer(), Shallow(), Rows(one.batch_size), Settings(DEVICES))
        assert [device.rows for device in one.devices] == [one.batch_size // 2] * 2
        for device, expected in zip(one.devices, dry.forecasts, strict=True):
            assert device.peak == pytest.approx(expected.peak, rel=0.005)
            assert device.inputs == expected.inputs


def test_with_a_budget_larger_batches_are_cut_or_computed_again_and_keep_it() -> None:
    free = dpx.tune(Shallow(), Rows(), devices=["cuda:0"], batch_sizes=(256, 1024)).batch_sizes
    budget = free[0].devices[0].peak
    found = dpx.tune(Shallow(), Rows(), devices=["cuda:0"], batch_sizes=(256, 1024), budget=budget)
    usual, larger = (one.devices[0] for one in found.batch_sizes)
    assert usual.plan is not None
    assert usual.plan.keeps_all
    assert larger.plan is not None
    assert larger.plan.micro_batches > 1 or larger.plan.num_recomputed > 0
    assert larger.peak <= budget < free[1].devices[0].peak
    assert found.batch_sizes[1].seconds > free[1].seconds


def test_batches_that_a_run_would_not_cut_are_not_promised() -> None:
    free = dpx.tune(Normed(), Rows(), devices=["cuda:0"], batch_sizes=(256, 1024)).batch_sizes
    budget = free[0].devices[0].peak
    with pytest.warns(UserWarning, match="would normalize by micro-batch"):
        found = dpx.tune(Normed(), Rows(), devices=["cuda:0"], batch_sizes=(256, 4096), budget=budget)
    assert [one.fits for one in found.batch_sizes] == [True, False]


class Clock(Callback):
    """What the first simulated device's clock shows after each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(torch.sim.busy_seconds("sim:0"))  # type: ignore[attr-defined]


def samples_per_second(batch_size: int, budget: str) -> float:
    """Of the last of five steps of a real run, in which everything is as it will be."""
    clock = Clock()
    strategy = dpx.DPXStrategy(memory_budget=budget)
    trainer = make_trainer(
        accelerator="sim", devices=1, strategy=strategy, max_steps=5, max_epochs=5, callbacks=[clock], logger=False
    )
    trainer.fit(Shallow(), Rows(batch_size))
    return batch_size / (clock.seconds[-1] - clock.seconds[-2])


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
@pytest.mark.parametrize(
    ("budget", "link"),
    [
        ("1500KiB", "5GB/s"),
        pytest.param("2MiB", "5GB/s", marks=pytest.mark.slow),
        pytest.param("4MiB", "50GB/s", marks=pytest.mark.slow),
    ],
)
def test_on_simulated_devices_the_best_is_that_of_a_run_of_every_size(
    budget: str, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(timing_effort.VARIABLE, "full")  # where times are those of a model, they are sure
    sizes = (64, 256, 1024)
    try:
        dpx.simulate(8, link=link)
        found = dpx.tune(Shallow(), Rows(), devices=["sim:0"], budget=budget, batch_sizes=sizes)
        measured = [samples_per_second(size, budget) for size in sizes]
    finally:
        dpx.simulate(8)
    assert found.best is not None
    assert found.best.batch_size == sizes[measured.index(max(measured))]
    predicted = [one.samples_per_second for one in found.batch_sizes]
    assert sorted(sizes, key=lambda size: predicted[sizes.index(size)]) == sorted(
        sizes, key=lambda size: measured[sizes.index(size)]
    )


def test_what_does_not_fit_is_never_the_best() -> None:
    budget = dpx.tune(Shallow(), Rows(), devices=["cuda:0"], batch_sizes=(256,)).batch_sizes[0].devices[0].peak
    found = dpx.tune(Shallow(), Rows(), devices=["cuda:0"], batch_sizes=(256, 2048), budget=budget, micro_batches=1)
    assert [one.fits for one in found.batch_sizes] == [True, False]
    assert found.batch_sizes[1].samples_per_second == 0
    assert found.best is found.batch_sizes[0]
    assert found.fastest(3) == [found.batch_sizes[0]]
    assert str(found).splitlines()[1].startswith("batch_size=2048: does not fit, peak ")
    nothing = dpx.tune(Shallow(), Rows(), devices=["cuda:0"], batch_sizes=(256,), budget="1KiB")
    assert nothing.best is None
    assert nothing.fastest(3) == []


def test_a_device_without_an_index_is_the_first() -> None:
    """Named in two ways it would count as two devices."""
    (found,) = dpx.tune(Shallow(), Rows(), devices=["cuda", "cuda:0"], batch_sizes=(256,)).batch_sizes
    assert [(one.device, one.rows) for one in found.devices] == [("cuda:0", 256)]


class SlowStep(torch.optim.SGD):
    """Takes some processor time at the least."""

    def step(self, closure: Any = None) -> Any:
        began = time.thread_time()
        while time.thread_time() - began < 0.02:
            pass
        return super().step(closure)


class SlowlyUpdated(Shallow):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SlowStep(self.parameters(), lr=0.1)


def slow_collate(rows: Any) -> Any:
    began = time.thread_time()
    while time.thread_time() - began < 0.02:
        pass
    return torch.utils.data.default_collate(rows)


class SlowlyLoaded(Rows):
    def train_dataloader(self) -> DataLoader[Any]:
        data = TensorDataset(torch.randn(ROWS, 64), torch.randn(ROWS, 1))
        return DataLoader(data, self.batch_size, collate_fn=slow_collate)


def test_the_optimizer_and_the_loading_of_a_batch_count_on_the_host() -> None:
    small, large = dpx.tune(SlowlyUpdated(), SlowlyLoaded(64), batch_sizes=(64, 256)).batch_sizes
    assert small.seconds == small.compute + small.beside
    assert small.beside > 0.04, "one step, and one batch"
    assert large.beside > 0.02 + 4 * 0.02, "loading takes as long for every row"


class SlowlyCalled(SlowlyUpdated):
    """Takes processor time of the host in its forward, however many rows it has."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        began = time.thread_time()
        while time.thread_time() - began < 0.01:
            pass
        return super().training_step(batch, batch_idx)


@pytest.fixture
def taken_for_real(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulated devices have the time that passes, as real ones have."""
    gc.collect()  # what other tests left on the devices
    for module in (costs, place, batch_size_tuner):
        monkeypatch.setattr(module, "is_modelled", lambda device: False)
    yield
    gc.collect()


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
@pytest.mark.usefixtures("taken_for_real")
def test_on_a_device_that_is_here_a_step_takes_what_the_host_takes_for_it() -> None:
    module = SlowlyCalled()
    small, large = dpx.tune(module, SlowlyLoaded(64), devices=["sim:0"], batch_sizes=(64, 256)).batch_sizes
    for one in (small, large):
        assert one.seconds == max(one.compute + one.beside, one.queued)
    assert small.queued > 0.01 + 0.02 + 0.02, "a forward, a step of the optimizer, and a batch"
    assert large.queued > 0.01 + 0.02 + 4 * 0.02, "loading takes as long for every row"
    # Those are no times of the device.
    assert small.beside < 0.02


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
@pytest.mark.usefixtures("taken_for_real")
def test_the_host_hands_over_every_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    # As where the device has so much to do that the host is hardly ever busy.
    monkeypatch.setattr(TimedSlice, "busy_host", 0.0)
    (cut,) = dpx.tune(SlowlyCalled(), Rows(64), devices=["sim:0"], batch_sizes=(64,), micro_batches=3).batch_sizes
    assert cut.queued > 3 * 0.01 + 0.02, "three forwards, and a step of the optimizer"


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
@pytest.mark.usefixtures("taken_for_real")
def test_the_basis_tells_what_was_run_where() -> None:
    found = dpx.tune(Shallow(), Rows(), devices=["sim:0", "sim:1"], batch_sizes=(256,))
    assert found.basis == (
        "from a step that was run on sim:0, timed with what the host needs for it; it stands for all devices"
    )
    dry = dpx.tune(Shallow(), Rows(), devices=["sim:0", "sim:1"], batch_sizes=(256,), dry=True)
    assert dry.basis.startswith("from fake tensors for sim:0")
    assert dry.batch_sizes[0].queued == 0


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_every_peak_is_that_of_a_run_with_this_batch_size_on_the_device() -> None:
    found = dpx.tune(Shallow(), Rows(), devices=["sim:0"], batch_sizes=(64, 1024))
    assert found.basis == "from a step that was run on sim:0, with the times of its model"
    for one in found.batch_sizes:
        gc.collect()
        monitor = dpx.DeviceMemoryMonitor(table=False, every_n_steps=1)
        trainer = make_trainer(strategy="dpx", accelerator="sim", devices=1, max_steps=3, callbacks=[monitor])
        trainer.fit(Shallow(), Rows(one.batch_size))
        taken = max(monitor.last[torch.device("sim", 0)].peak_by_phase.values())
        # Gradients count all through the step; here they come while activations go.
        (device,) = one.devices
        assert device.peak - device.gradients <= taken * 1.02
        assert taken <= device.peak * 1.02


def test_on_devices_that_are_not_here_the_optimizer_counts_by_its_bytes() -> None:
    one, two = dpx.tune(SlowlyUpdated(), SlowlyLoaded(), devices=["cuda:0"], batch_sizes=(64, 256)).batch_sizes
    held = sum(parameter.nbytes for parameter in SlowlyUpdated().parameters())
    assert one.beside == two.beside == 3 * held / rates_of(torch.device("cuda")).bytes


class NeedsNothing(Shallow):
    """May be far too large for this machine."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert isinstance(batch[0], FakeTensor), "a real step runs"
        return super().training_step(batch, batch_idx)


def test_for_devices_that_are_not_here_no_real_step_runs() -> None:
    assert dpx.tune(NeedsNothing(), Rows(), devices=["cuda:0"], batch_sizes=(64,)).best is not None


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_no_real_step_runs_where_none_is_wanted() -> None:
    assert dpx.tune(NeedsNothing(), Rows(), devices=["sim:0"], batch_sizes=(64,), dry=True).best is not None


class Logs(Shallow):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("rate", 1.0)
        return super().training_step(batch, batch_idx)


def test_what_a_step_logs_is_logged_in_the_step_that_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = []
    log = LightningModule.log

    def noted(self: LightningModule, name: str, value: Any, **options: Any) -> None:
        names.append(name)
        log(self, name, value, **options)

    monkeypatch.setattr(LightningModule, "log", noted)
    settings = Settings((torch.device("cpu"),), cache=PlanCache(str(tmp_path), print))
    # Profiled, and found in the cache.
    for _ in range(2):
        names.clear()
        found = tune_batch_size(make_trainer(), Logs(), Rows(), settings, TuneOptions((64,)))
        assert found.batch_sizes[0].beside > 0
        assert set(names) == {"loss", "rate"}


def test_nothing_is_trained_and_nothing_is_changed() -> None:
    module = Shallow()
    before = copy.deepcopy(module.state_dict())
    random = torch.get_rng_state()
    found = dpx.tune(module, Rows(), batch_sizes=(64, 256), budget="64MiB")
    assert found.basis == "", "steps for the host are run and measured"
    assert all(one.seconds > 0 for one in found.batch_sizes)
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), random)


class Ragged(Rows):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(range(64), 8, collate_fn=lambda rows: {"number": len(rows)})


@pytest.mark.parametrize("rows", [3, 7])
def test_batch_norm_needs_more_than_one_row_of_a_small_batch(rows: int) -> None:
    """A quarter of the rows was one, on which it raises an error."""
    assert dpx.tune(Normed(), Rows(rows), devices=["cuda:0"], batch_sizes=(16,)).best is not None


def test_without_rows_that_are_known_nothing_is_predicted() -> None:
    with pytest.raises(dpx.PlanError, match=r"Batches of other sizes cannot be made of the first one.*has a batch dim"):
        dpx.tune(Shallow(), Ragged())


@pytest.mark.parametrize("sizes", [8, "8,16"])
def test_batch_sizes_are_a_list(sizes: Any) -> None:
    with pytest.raises(dpx.ConfigurationError, match=r"batch_sizes=.* is not allowed; give a list of numbers of rows"):
        dpx.tune(Shallow(), Rows(), batch_sizes=sizes)


def test_micro_batches_of_few_rows_have_a_time_too() -> None:
    model = Shallow()
    # Its gradients, which are added to those before them, take more than the activations of all rows.
    model.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    found = dpx.tune(model, Rows(4), batch_sizes=(4, 8), micro_batches=4)
    assert all(one.samples_per_second > 0 for one in found.batch_sizes)
    plans = [one.devices[0].plan for one in found.batch_sizes]
    assert [plan.micro_batches for plan in plans if plan is not None] == [4, 4]
    assert not any(plan.num_recomputed for plan in plans if plan is not None)


def test_a_budget_for_a_device_whose_batch_is_too_large_names_the_least_it_needs() -> None:
    found = dpx.tune(Shallow(), Rows(), devices=["cuda:0"], batch_sizes=(1024,), budget="600KiB", micro_batches=1)
    device = found.batch_sizes[0].tightest
    assert not device.fits
    assert device.needed == device.smallest > device.budget
    assert replace(device, budget=device.needed, plan=None).needed == device.needed


def test_lightning_says_nothing_of_a_run_that_is_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        dpx.tune(Shallow(), Rows(), batch_sizes=(64,))
        assert [record.message for record in caplog.records] == []
        rank_zero_info("it speaks again")
    assert [record.message for record in caplog.records] == ["it speaks again"]
