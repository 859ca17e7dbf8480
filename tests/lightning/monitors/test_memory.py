"""The monitor's bytes are the devices' own, with any strategy; loggers, files and the table get them."""

import csv
import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import lightning_dpx as dpx
from tests.conftest import SIMULATED, Classifier, make_loader, make_trainer, seeded
from tests.pictures.headings import doubled_headings

sim_only = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
on_sim = {"accelerator": "sim", "max_epochs": 1}


pytestmark = pytest.mark.usefixtures("no_collection")  # what it frees in the middle of a step is not the step's


class Ledger(Callback):
    """What the simulated devices themselves count, after the monitor has had its turn."""

    def __init__(self) -> None:
        self.allocated: list[list[int]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        sim = torch.get_device_module("sim")
        self.allocated.append([sim.memory_allocated(index) for index in range(3)])


class Noted(dpx.DeviceMemoryMonitor):
    """Keeps every step's report."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps: list[dict[str, Any]] = []

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.steps.append({str(device): memory for device, memory in self.last.items()})


@sim_only
@pytest.mark.parametrize("reducer", ["collective", "colocate"])
def test_bytes_equal_the_devices_own_count(reducer: str, execution: str) -> None:
    monitor, ledger = Noted(table=False, every_n_steps=1), Ledger()
    model = seeded(optimizer="adam", norm=True)
    strategy = dpx.DPXStrategy(reducer=reducer, execution=execution, verify="off")
    trainer = make_trainer(strategy=strategy, devices=3, callbacks=[monitor, ledger], **on_sim)
    trainer.fit(model, make_loader(), make_loader())
    for step, counted in zip(monitor.steps, ledger.allocated, strict=True):
        assert [step[f"sim:{index}"].allocated for index in range(3)] == counted
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    for memory in monitor.steps[0].values():
        assert (memory.parameters, memory.buffers) == (parameters, buffers)
        assert memory.activations > 0
        assert memory.peak == max(memory.peak_by_phase.values()) >= memory.allocated
        assert set(memory.peak_by_phase) == {"forward", "backward", "optimizer"}
    first = list(monitor.steps[0].values())
    if reducer == "colocate":  # hooks that a user overrides, as these do, find all gradients on the module
        assert first[0].gradients == parameters
        assert parameters < sum(memory.gradients for memory in first) < 2 * parameters
    else:
        assert sum(memory.gradients for memory in first) == parameters
    assert sum(memory.optimizer for memory in first) == 2 * parameters, "Adam counts its steps on the host"
    held = [memory.gradients for memory in first]
    assert (min(held) > 0) == (reducer == "colocate"), "owners everywhere, or on the first device alone"


@sim_only
def test_peaks_are_those_of_the_same_run_without_the_monitor() -> None:
    sim = torch.get_device_module("sim")

    class Peak(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            sim.reset_peak_memory_stats(0)

        def on_train_batch_end(self, *_: Any) -> None:
            self.peak = sim.max_memory_allocated(0)

    def fit(callback: Callback) -> None:
        gc.collect()  # the fit before
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 3))
        classifier = seeded()
        classifier.net = model
        options = {"limit_train_batches": 1, "strategy": "dpx", "devices": 1, "callbacks": [callback], **on_sim}
        make_trainer(**options).fit(classifier, make_loader(), make_loader())

    plain, monitor = Peak(), dpx.DeviceMemoryMonitor(table=False)
    fit(plain)
    fit(monitor)
    assert monitor.highest[torch.device("sim:0")] == plain.peak


@sim_only
def test_shifted_parts_show_where_they_went() -> None:
    monitor = Noted(table=False, every_n_steps=1)
    strategy = dpx.DPXStrategy(shifts={"sim:0": "sim:5"}, shift_activations=["net.2"])
    model = seeded()
    make_trainer(strategy=strategy, devices=1, callbacks=[monitor], **on_sim).fit(model, make_loader(), make_loader())
    moved = monitor.steps[0]["sim:5"]
    assert moved.parameters == moved.gradients == sum(p.nbytes for p in model.net[2].parameters())
    assert moved.activations > 0


@sim_only
def test_loggers_get_names_that_all_of_them_keep(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    options = {"logger": logger, "log_every_n_steps": 1, "callbacks": [dpx.DeviceMemoryMonitor(table=False)], **on_sim}
    make_trainer(strategy="dpx", devices=2, **options).fit(seeded(), make_loader(), make_loader())
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("dpx/memory/sim1/peak_gib")]
    assert len(rows) == 4
    assert {name for name in rows[0] if name.startswith("dpx/memory/sim0/")} >= {
        f"dpx/memory/sim0/{kind}_gib"
        for kind in ("allocated", "activations", "parameters", "optimizer", "peak_backward")
    }
    assert 0 < float(rows[0]["dpx/memory/sim1/peak_gib"]) < 1e-3


@pytest.mark.parametrize("strategy", ["auto", "dpx"])
def test_on_the_host_and_with_other_strategies(strategy: str, tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "reports" / "memory.json"
    monitor = dpx.DeviceMemoryMonitor(save_to=path, prog_bar=True, every_n_steps=1)
    options = {} if strategy == "auto" else {"strategy": strategy}
    with caplog.at_level("INFO"):
        make_trainer(max_epochs=1, callbacks=[monitor], **options).fit(seeded(), make_loader(), make_loader())
    rows = json.loads(path.read_text())
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["device"] == "cpu" and row["peak"] >= row["allocated"] > 10 * 2**20 for row in rows)
    assert rows[0]["parameters"] == sum(parameter.nbytes for parameter in seeded().parameters())
    # Of this small model's step nearly all that is resident is none of its tensors.
    assert all(row["allocated"] / 2 < row["process"] <= row["peak"] for row in rows)
    table = next(record.message for record in caplog.records if "memory of the last step" in record.message)
    assert "peaks include what the process held before the step: cpu: " in table.splitlines()[0]
    assert table.splitlines()[1].split()[:3] == ["device", "parameters", "gradients"]
    assert table.splitlines()[2].split()[0] == "cpu"


@sim_only
def test_a_nearly_full_device_is_announced_once(tmp_path: Path) -> None:
    path = tmp_path / "memory.csv"
    dpx.simulate(2, memory="1MB")
    try:
        monitor = dpx.DeviceMemoryMonitor(table=False, warn_at=1e-3, save_to=path, every_n_steps=1)
        trainer = make_trainer(strategy="dpx", devices=2, callbacks=[monitor], **on_sim)
        full = r"sim:\d is nearly full: a step's peak was [1-9]\d* KiB of 977 KiB"
        with pytest.warns(UserWarning, match=full) as caught:
            trainer.fit(seeded(), make_loader(), make_loader())
    finally:
        dpx.simulate(8)
    assert len([warning for warning in caught if "nearly full" in str(warning.message)]) == 2
    with path.open() as file:
        assert {(row["step"], row["device"]) for row in csv.DictReader(file)} == {
            (str(step), f"sim:{index}") for step in range(4) for index in range(2)
        }


@sim_only
def test_after_running_out_the_table_tells_what_was_there(caplog: Any) -> None:
    class Grows(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                torch.ones(10**6, device=self.device)
            return super().training_step(batch, batch_idx)

    dpx.simulate(1, memory="1MB")
    try:
        trainer = make_trainer(strategy="dpx", devices=1, callbacks=[dpx.DeviceMemoryMonitor()], **on_sim)
        with caplog.at_level("INFO"), pytest.raises(torch.OutOfMemoryError):
            trainer.fit(Grows(), make_loader(), make_loader())
    finally:
        dpx.simulate(8)
    assert any("memory of the last step" in record.message for record in caplog.records)


def little() -> dict[str, int]:
    """24 KiB on each of two devices, beside what other tests have left there."""
    gc.collect()
    return {f"sim:{index}": torch.get_device_module("sim").memory_allocated(index) + 24 * 2**10 for index in range(2)}


def check_report(path: Path, table: list[str]) -> str:
    text = path.read_text()
    assert all(word in text for word in ("sim:0", "sim:1", *table))
    assert "src=" not in text
    assert doubled_headings(text) == []
    return text


@sim_only
def test_a_report_shows_planned_against_measured(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    monitor = dpx.DeviceMemoryMonitor(report=page, every_n_steps=1, table=False)
    budget = little()
    strategy = dpx.DPXStrategy(memory_budget=budget, execution="inline")
    trainer = make_trainer(strategy=strategy, devices=2, callbacks=[monitor], **on_sim)
    trainer.fit(seeded(), make_loader(), make_loader())
    text = check_report(page, ["planned", "Plan of sim:0", "activations: peak", "Memory of the last step, in MiB"])
    assert text.count("<svg") == 3, "the devices and two plans"
    for device, memory in monitor.last.items():
        assert memory.budget == budget[str(device)]
        assert 0 < memory.planned <= memory.budget


@sim_only
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_the_figures(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    strategy = dpx.DPXStrategy(memory_budget=little(), execution="inline")
    monitor = dpx.DeviceMemoryMonitor(table=False)
    trainer = make_trainer(
        strategy=strategy, devices=2, callbacks=[monitor], logger=logger, log_every_n_steps=1, **on_sim
    )
    trainer.fit(seeded(), make_loader(), make_loader())
    events = EventAccumulator(str(logger.log_dir)).Reload()
    assert set(events.Tags()["images"]) == {"dpx/memory", "dpx/plan/sim0", "dpx/plan/sim1"}
    assert "dpx/memory/sim1/planned_gib" in events.Tags()["scalars"]


def test_the_callback_planner_is_compared_as_well() -> None:
    monitor = dpx.DeviceMemoryMonitor(table=False)
    planner = dpx.ActivationPlanner()
    make_trainer(max_epochs=1, callbacks=[planner, monitor]).fit(seeded(), make_loader(), make_loader())
    (memory,) = monitor.last.values()
    static = memory.parameters + memory.gradients + memory.optimizer + memory.buffers
    assert memory.planned == static + planner.plan.peak


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(dpx.ConfigurationError, match=r"report='page\.pdf' is not allowed; name an \.html file"):
        dpx.DeviceMemoryMonitor(report="page.pdf")
    with pytest.raises(dpx.ConfigurationError, match=r"save_to='memory\.txt' is not allowed"):
        dpx.DeviceMemoryMonitor(save_to="memory.txt")
    with pytest.raises(dpx.ConfigurationError, match="warn_at=0 is not allowed"):
        dpx.DeviceMemoryMonitor(warn_at=0)


def test_a_page_without_matplotlib_is_refused_before_training(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(dpx.UnsupportedError, match=r"report='page\.html' .* pip install 'lightning-dpx\[plots\]'"):
        dpx.DeviceMemoryMonitor(report="page.html")
