"""Every public name, used as README and guide do, for type checkers outside the package (.ci/release); not run."""

from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

import lightning_dpx as dpx

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
x = torch.randn(4, 8)


def show(*values: object) -> None:
    """What a program would do with them."""


def fit(module: LightningModule, loader: DataLoader[torch.Tensor], datamodule: LightningDataModule) -> None:
    monitor = dpx.DeviceMemoryMonitor(prog_bar=True, save_to="memory.csv", warn_at=0.9, report=Path("a.html"))
    throughput = dpx.DeviceThroughputMonitor(table=False, every_n_steps=5)
    planner = dpx.ActivationPlanner(budget="1GiB")
    profiler = dpx.DPXProfiler(dirpath="profile", filename="steps", row_limit=10)
    strategy = dpx.DPXStrategy(
        reducer="naive",
        workload=[3, 1],
        memory_budget={"cuda:0": "1GiB"},
        shifts={"cuda:0": "cuda:1"},
        execution="inline",
        plan="plan.yaml",
        micro_batches="auto",
        verify="raise",
    )
    trainer = Trainer(strategy=strategy, devices=2, callbacks=[monitor, throughput, planner], profiler=profiler)
    trainer.fit(module, loader)
    peak: int = monitor.highest[torch.device("cpu")]
    last = monitor.last[torch.device("cpu")].peak
    speed: float = throughput.samples_per_second
    samples: int = throughput.last[0].samples
    table: str = monitor.format_table()
    found: dpx.Tuning = dpx.tune(module, datamodule, devices=["cuda:0", "cuda:1"], budget="22GiB", batch_sizes=[4, 8])
    if found.best is not None:
        size: int = found.best.batch_size
        show(size, found.fastest(3))
    show(peak, last, speed, samples, table, found)


def plans() -> None:
    plan: dpx.MemoryPlan = dpx.search_plan(model, x, budget=2**20, planner="auto", num_trials=2)
    plan.save("plan.yaml")
    plan = dpx.MemoryPlan.load("plan.yaml")
    cost = dpx.estimate_cost(model, plan, x)
    show(cost)
    dpx.apply_plan(model, plan)
    dpx.remove_plan(model)


def activations() -> None:
    found = dpx.trace_activations(model, x)
    first: dpx.Activation = found[0]
    dpx.shift_activations(model, ["0"], {"cpu": "cpu"})
    dpx.unshift_activations(model)
    dpx.offload_activations(model, "0")
    dpx.unoffload_activations(model)
    show(first)


class Mean(dpx.GradientReducer):
    """A reducer."""


class Pairs(dpx.Slicer):
    """Rows of lists."""


def groups() -> None:
    dpx.simulate(4, memory="1GiB")
    group = dpx.ReplicaGroup(model, ["cpu", "cpu"], grad_req={"0.weight": "add"}, reducer="naive")
    group.forward(x)
    group.backward()
    group.install_monitor(dpx.TensorMonitor())
    group.set_params(*group.get_params())
    merged = group.outputs_merged()
    packer = dpx.GradientPacker(num_splits=8)
    placed = dpx.least_loaded_placement([3, 2, 1], [torch.device("cpu")])
    show(merged, packer, placed)


try:
    groups()
except (
    dpx.BudgetError,
    dpx.CollectiveError,
    dpx.ConfigurationError,
    dpx.DPXError,
    dpx.GatherError,
    dpx.ParityError,
    dpx.PlanError,
    dpx.ReplicationError,
    dpx.SliceError,
    dpx.UnsupportedError,
) as error:
    show(error)

show(dpx.register_planner, dpx.register_recipe, dpx.register_reducer, dpx.register_slicer)
show(dpx.DPXPrecision, dpx.__version__)
