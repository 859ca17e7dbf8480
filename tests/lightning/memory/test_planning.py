"""``memory_budget``, ``plan`` and ``ActivationPlanner``: training within a budget ends where it does without one."""

import copy
import dataclasses
import gc
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from lightning_dpx.lightning.memory.budgets import parse_budget
from tests.conftest import SIMULATED, assert_equal, make_trainer
from tests.memory.models import Swing

MIB = 2**20

# The tower counts what every replica sees.
pytestmark = pytest.mark.filterwarnings("ignore:dpx. .*_step on .* is not what it is on one device.*self.seen")


class Tower(LightningModule):
    """Blocks over rows (B, 128) with dropout and batch norm; notes what it logs and appends."""

    def __init__(self, dropout: float = 0.2, depth: int = 10) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Dropout(dropout))
                for _ in range(depth)
            )
        )
        self.head = nn.Linear(128, 3)
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(len(batch[0]))
        loss = F.cross_entropy(self.head(self.net(batch[0])), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.head(self.net(batch[0])), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader(rows: int = 256, batches: int = 2) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(batches * rows, 128, generator=generator)
    return DataLoader(TensorDataset(data, torch.randint(3, (batches * rows,), generator=generator)), rows)


def tower(**options: Any) -> Tower:
    torch.manual_seed(0)
    return Tower(**options)


def fit(model: LightningModule, data: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    trainer = make_trainer(max_epochs=1, **options)
    trainer.fit(model, data or loader(), loader(batches=1))
    return {name: value.cpu() for name, value in model.state_dict().items()} | trainer.callback_metrics


@pytest.mark.parametrize(
    ("devices", "execution", "budget", "dropout"),
    [(1, "auto", 4.5, 0.2), (2, "auto", 4.5, 0.2), (2, "inline", 5.5, 0.2), (2, "threads", 5.5, 0.0)],
)
def test_training_within_a_budget_ends_at_the_same_bits(
    devices: int, execution: Any, budget: float, dropout: float, caplog: Any
) -> None:
    model = tower(dropout=dropout)
    with caplog.at_level("INFO"):
        strategy = dpx.DPXStrategy(verify="off", execution=execution, memory_budget=f"{budget}MiB")
        ours = fit(model, strategy=strategy, devices=devices)
    unplanned = dpx.DPXStrategy(verify="off", execution=execution)
    assert_equal(ours, fit(tower(dropout=dropout), strategy=unplanned, devices=devices), bitwise=True)
    told = next(record.message for record in caplog.records if "dpx: memory of cpu" in record.message)
    assert f"predicted of {budget} MiB allowed" in told
    assert "\nnet." in told, "a line per module"
    assert sum(model.seen) == 2 * 256 or execution != "auto", "the profile ran on a shadow module"
    assert not any(child._forward_hooks for child in model.modules()), "taken off at the end"


@pytest.mark.parametrize(("devices", "execution"), [(1, "auto"), (2, "inline"), (2, "threads")])
def test_frozen_layers_above_trained_ones_fit_into_as_little(devices: int, execution: Any) -> None:
    """Their biases are not part of the graph; every replica and thread finds its own."""

    def frozen() -> Tower:
        model = tower(dropout=0.0)
        model.net[1:].requires_grad_(False)
        return model

    ours = fit(
        frozen(), strategy=dpx.DPXStrategy(verify="off", execution=execution, memory_budget="2.5MiB"), devices=devices
    )
    expected = fit(frozen(), strategy=dpx.DPXStrategy(verify="off", execution=execution), devices=devices)
    assert_equal(ours, expected, bitwise=True)


@pytest.mark.parametrize("depth", [3, 4, 5, 6])
def test_the_budget_that_an_error_names_is_met(depth: int) -> None:
    # Parameters, gradients, a state, and some more.
    size = 3 * sum(parameter.nbytes for parameter in tower(depth=depth).parameters()) + MIB // 2
    with pytest.raises(dpx.PlanError) as error:
        fit(tower(depth=depth), strategy=dpx.DPXStrategy(verify="off", memory_budget=size))
    named = re.search(r"it must allow at least ([\d.]+ MiB)", "".join(error.value.__notes__))
    assert named is not None
    fit(tower(depth=depth), strategy=dpx.DPXStrategy(verify="off", memory_budget=named[1]))


class Swings(nn.Sequential):
    """Ends in a function whose backward only the function itself can serve."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Swing.apply(super().forward(x), 1.5)
        return out


@pytest.mark.parametrize(
    ("accelerator", "devices", "execution", "dropout"),
    [
        ("cpu", 1, "auto", 0.2),
        ("cpu", 2, "inline", 0.2),
        ("cpu", 2, "threads", 0.0),
        ("sim", 2, "inline", 0.2),
        ("sim", 2, "threads", 0.2),
    ],
)
def test_modules_that_are_called_again_train_as_well(
    accelerator: str, devices: int, execution: Any, dropout: float
) -> None:
    def swinging() -> Tower:
        model = tower(dropout=dropout)
        for number in range(10):
            model.net[number] = Swings(*model.net[number])
        return model

    plan = dpx.search_plan(swinging(), next(iter(loader())))  # where there is nowhere to offload
    assert plan.calls or plan.replayed
    strategies = [dpx.DPXStrategy(verify="off", execution=execution, plan=each) for each in (plan, None)]
    ours, theirs = (fit(swinging(), strategy=s, devices=devices, accelerator=accelerator) for s in strategies)
    assert_equal(ours, theirs, bitwise=True)


def test_a_budget_that_cannot_be_met_says_what_would_do() -> None:
    with pytest.raises(dpx.PlanError, match="smallest that can is") as error:
        fit(tower(), strategy=dpx.DPXStrategy(verify="off", memory_budget="2.25MiB"))
    assert any("it must allow at least" in note for note in error.value.__notes__)
    with pytest.raises(dpx.PlanError, match=r"what is there beside activations"):
        fit(tower(), strategy=dpx.DPXStrategy(verify="off", memory_budget="0.25MiB"))


def test_a_larger_batch_is_planned_anew(caplog: Any) -> None:
    batches: Any = [next(iter(loader(rows))) for rows in (128, 64, 256, 256)]
    data = DataLoader(batches, batch_size=None)
    with caplog.at_level("INFO"):
        ours = fit(tower(), data, strategy=dpx.DPXStrategy(verify="off", memory_budget="4.5MiB"))
    assert_equal(ours, fit(tower(), data), bitwise=True)
    assert sum("dpx: memory of cpu" in record.message for record in caplog.records) == 2


def test_a_given_plan_is_followed_and_checked(tmp_path: Any, caplog: Any) -> None:
    model = tower()
    plan = dpx.search_plan(model, next(iter(loader())), budget=0.6)
    assert model.seen == [], "a search leaves no trace of the steps that it runs"
    plan.save(tmp_path / "plan.yaml")
    with caplog.at_level("INFO"):
        ours = fit(tower(), strategy=dpx.DPXStrategy(verify="off", plan=str(tmp_path / "plan.yaml")), devices=2)
    assert_equal(ours, fit(tower()), bitwise=True)
    assert any("dpx: follows the given plan" in record.message for record in caplog.records)
    with pytest.raises(dpx.PlanError, match="made for a Tower"):
        fit(tower(depth=2), strategy=dpx.DPXStrategy(plan=plan))


@pytest.mark.parametrize("budget", [0, -5, 1.5, True, "much", [1]])
def test_bad_budgets_are_refused(budget: Any) -> None:
    with pytest.raises(dpx.ConfigurationError, match="memory_budget="):
        dpx.DPXStrategy(memory_budget=budget)


def test_bad_combinations_are_refused(tmp_path: Any) -> None:
    with pytest.raises(dpx.ConfigurationError, match="not both"):
        dpx.DPXStrategy(memory_budget="auto", plan="plan.yaml")
    with pytest.raises(dpx.PlanError, match="cannot be read as a plan"):
        dpx.DPXStrategy(plan=str(tmp_path / "missing.yaml"))
    with pytest.raises(dpx.ConfigurationError, match="Unknown planner 'best'"):
        dpx.DPXStrategy(memory_budget="auto", planner="best")
    with pytest.raises(dpx.ConfigurationError, match="memory_budget"):
        fit(tower(), strategy="dpx", callbacks=[dpx.ActivationPlanner(0.5)])
    assert parse_budget("2GB") == 2 * 10**9
    assert parse_budget(1) == 1


def test_the_callback_plans_for_another_strategy(caplog: Any) -> None:
    model, planner = tower(), dpx.ActivationPlanner(budget=0.6)
    with caplog.at_level("INFO"):
        ours = fit(model, callbacks=[planner])
    assert_equal(ours, fit(tower()), bitwise=True)
    assert planner.plan is not None
    assert not planner.plan.keeps_all
    assert sum(model.seen) == 2 * 256
    assert any("dpx: memory plan for cpu" in record.message for record in caplog.records)
    assert not any(child._forward_hooks for child in model.modules())
    with pytest.raises(dpx.PlanError, match="smallest that can"):
        fit(tower(), callbacks=[dpx.ActivationPlanner(budget="1KiB")])


class SkipsTheFirst(Tower):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        return None if batch_idx == 0 else super().training_step(batch, batch_idx)


returns_none = pytest.mark.filterwarnings("ignore:.*returned `None`:UserWarning")


@returns_none
@pytest.mark.parametrize("devices", [1, 2])
def test_a_first_step_without_a_loss_is_planned_at_the_next_one(devices: int, caplog: Any) -> None:
    strategy = dpx.DPXStrategy(memory_budget="2MiB", execution="inline", verify="off")
    dropped = []

    class Watched(SkipsTheFirst):
        def on_train_batch_end(self, *_: Any) -> None:
            dropped.append(sum(len(plan.dropped) for plan, _ in strategy.memory_plans.values()))

    with caplog.at_level("INFO"):
        torch.manual_seed(0)
        ours = fit(Watched(0.0, 4), loader(batches=3), strategy=strategy, devices=devices)
    torch.manual_seed(0)
    unplanned = dpx.DPXStrategy(execution="inline", verify="off")
    assert_equal(ours, fit(SkipsTheFirst(0.0, 4), loader(batches=3), strategy=unplanned, devices=devices))
    assert dropped[0] == 0
    assert dropped[1] > 0
    assert sum("planned at the first one that does" in record.message for record in caplog.records) == 1


@returns_none
def test_nor_does_the_callback_need_one(caplog: Any) -> None:
    planner = dpx.ActivationPlanner(budget=0.6)
    with caplog.at_level("INFO"):
        torch.manual_seed(0)
        ours = fit(SkipsTheFirst(0.0, 4), callbacks=[planner])
    torch.manual_seed(0)
    assert_equal(ours, fit(SkipsTheFirst(0.0, 4)), bitwise=True)
    assert planner.plan is not None
    assert "planned at the first one that does" in caplog.text


class EitherHalf(Tower):
    """Runs one half of its blocks in even batches, the other one in odd ones."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        half = len(self.net) // 2
        rows = batch[0]
        for block in self.net[half:] if batch_idx % 2 else self.net[:half]:
            rows = block(rows)
        return F.cross_entropy(self.head(rows), batch[1])


@pytest.mark.parametrize("budget", ["1.5MiB", None])
def test_the_callback_plans_for_steps_that_differ_once_they_are_seen(budget: str | None, caplog: Any) -> None:
    torch.manual_seed(0)
    model, planner = EitherHalf(), dpx.ActivationPlanner(budget=budget)
    with caplog.at_level("INFO"):
        ours = fit(model, loader(batches=6), callbacks=[planner])
    torch.manual_seed(0)
    assert_equal(ours, fit(EitherHalf(), loader(batches=6)), bitwise=True)
    assert "a step saved" in caplog.text
    assert caplog.text.count("dpx: memory plan for cpu") == 2
    assert planner.plan is not None
    dropped = {name.split(".")[1] for name in planner.plan.dropped if name.startswith("net.")}
    assert {int(block) < 5 for block in dropped} == {True, False}


def test_strategies_that_shard_the_module_in_an_engine_are_refused_by_name() -> None:
    # Without DeepSpeed itself none of its strategies can be made in the usual way.
    trainer: Any = SimpleNamespace(strategy=DeepSpeedStrategy.__new__(DeepSpeedStrategy))
    with pytest.raises(dpx.UnsupportedError, match=r"DeepSpeedStrategy shards it.*FSDPStrategy, or ModelParallel"):
        dpx.ActivationPlanner(0.5).setup(trainer, tower(), "fit")


# ---- on simulated devices, by their own count ----

on_devices = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)


@pytest.fixture
def small_devices() -> Any:
    gc.collect()
    dpx.simulate(3, memory=["6.5MiB", "6.5MiB", "10MiB"])
    yield torch.get_device_module("sim")
    gc.collect()
    dpx.simulate(8)


@on_devices
@pytest.mark.parametrize("share", [0.7, 0.5, 0.4])
def test_the_predicted_peak_is_that_of_the_allocator(share: float) -> None:
    gc.collect()
    module = tower(dropout=0.0).net.to("sim:0")
    x = torch.randn(1024, 128, device="sim:0")
    plan = dpx.search_plan(module, x, budget=share)
    plain = copy.deepcopy(module)
    dpx.apply_plan(module, plan)
    sim, gradients = torch.get_device_module("sim"), []
    for each in (module, plain):
        each.zero_grad()
        gc.collect()
        sim.reset_peak_memory_stats(0)
        before = sim.memory_allocated(0)
        loss = each(x).sum()
        loss.backward()
        kept = sum(parameter.grad.nbytes for parameter in each.parameters())
        taken = sim.max_memory_allocated(0) - before
        gradients.append([parameter.grad.cpu() for parameter in each.parameters()])
        if each is module:
            assert plan.peak is not None
            assert plan.peak == pytest.approx(taken, rel=0.02, abs=kept)
            assert taken <= share * plan.unplanned_peak + kept
        else:
            assert plan.unplanned_peak == pytest.approx(taken, rel=0.02, abs=kept)
    assert all(map(torch.equal, *gradients))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("share", [0.7, 0.4])
def test_the_predicted_peak_is_that_of_the_gpu(share: float) -> None:
    module, x = tower().net.cuda(), torch.randn(8192, 128, device="cuda")
    module(x).sum().backward()  # workspaces of the libraries
    plan = dpx.search_plan(module, x, budget=share)
    dpx.apply_plan(module, plan)
    module.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    module(x).sum().backward()
    assert plan.peak is not None
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(plan.peak, rel=0.05)


@on_devices
def test_a_prediction_that_was_wrong_is_reported_with_both_numbers(caplog: Any) -> None:
    strategy = dpx.DPXStrategy(verify="off", memory_budget="10MiB")

    class Lied(Tower):
        def on_train_batch_end(self, *_: Any) -> None:
            plans = strategy.planning.devices.plans
            plans.update({device: dataclasses.replace(plan, peak=MIB) for device, plan in plans.items()})

    with pytest.warns(UserWarning, match=r"activations on sim:0 took [\d.]+ MiB where 1.0 MiB was predicted"):
        fit(Lied(dropout=0.0), strategy=strategy, accelerator="sim", devices=1)


@on_devices
def test_a_model_that_does_not_fit_is_profiled_on_few_rows_and_trains(small_devices: Any, caplog: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        fit(tower(dropout=0.0), loader(512), strategy="dpx", accelerator="sim", devices=1)
    gc.collect()
    with caplog.at_level("INFO"):
        strategy = dpx.DPXStrategy(verify="off", memory_budget="auto")
        ours = fit(tower(dropout=0.0), loader(512), strategy=strategy, accelerator="sim", devices=1)
    assert_equal(ours, fit(tower(dropout=0.0), loader(512)))
    assert any("profiled on 1/4 of the rows" in record.message for record in caplog.records)
    assert small_devices.max_memory_allocated(0) <= 6.5 * MIB


@on_devices
@pytest.mark.parametrize("execution", ["inline", "threads"])
def test_replicas_that_offload_end_at_the_same_bits(execution: Any) -> None:
    everything = dpx.search_plan(tower(dropout=0.0), next(iter(loader())), budget=1.0)
    actions = {decision.name: "offload" for decision in everything.decisions}
    plan = dataclasses.replace(everything.with_actions(actions), prefetch_depth=2)  # type: ignore[arg-type]
    sim, found, peaks = torch.get_device_module("sim"), [], []
    for given in (plan, None):
        gc.collect()
        for device in range(2):
            sim.reset_peak_memory_stats(device)
        strategy = dpx.DPXStrategy(verify="off", execution=execution, plan=given)
        found.append(fit(tower(dropout=0.0), loader(512), strategy=strategy, accelerator="sim", devices=2))
        peaks.append([sim.max_memory_allocated(device) for device in range(2)])
    assert_equal(*found, bitwise=True)
    assert all(ours < theirs - MIB for ours, theirs in zip(*peaks, strict=True))


@on_devices
def test_unequal_devices_get_unequal_plans(small_devices: Any) -> None:
    strategy = dpx.DPXStrategy(verify="off", memory_budget="auto")
    plans: dict[torch.device, dpx.MemoryPlan] = {}

    class Peek(Tower):
        def on_train_batch_end(self, *_: Any) -> None:
            plans.update(strategy.planning.devices.plans)

    torch.manual_seed(0)
    model = Peek(dropout=0.0)
    ours = fit(model, loader(1024), strategy=strategy, accelerator="sim", devices=3)
    torch.manual_seed(0)
    reference = fit(
        Peek(dropout=0.0), loader(1024), strategy=dpx.DPXStrategy(verify="off", execution="inline"), devices=3
    )
    assert_equal(ours, reference)
    first, _, last = (plans[torch.device("sim", index)] for index in range(3))
    assert len(last.dropped) < len(first.dropped)


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_a_plan_made_without_the_device_is_followed_there(tmp_path: Any) -> None:
    """From a module and a batch that are on no device at all."""
    with torch.device("meta"):
        absent, batch = Tower(), (torch.empty(128, 128), torch.empty(128, dtype=torch.long))
    plan = dpx.search_plan(absent, batch, budget=0.5, device="sim:0")
    assert plan.peak is not None
    plan.save(tmp_path / "plan.yaml")
    sim: Any = torch.get_device_module("sim")
    peaks, results = [], []
    for options in ({}, {"plan": str(tmp_path / "plan.yaml")}):
        gc.collect()
        before = sim.memory_allocated(0)
        sim.reset_peak_memory_stats(0)
        strategy = dpx.DPXStrategy(verify="off", reducer="collective", execution="inline", **options)
        results.append(fit(tower(), strategy=strategy, accelerator="sim", devices=2))
        peaks.append(sim.max_memory_allocated(0) - before)
    assert_equal(results[1], results[0], bitwise=True)
    assert peaks[0] - peaks[1] == pytest.approx(plan.unplanned_peak - plan.peak, rel=0.1)


class OwnBackward(Tower):
    """Runs a backward of its own with automatic optimization, and returns nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(len(batch[0]))
        loss = F.cross_entropy(self.head(self.net(batch[0])), batch[1])
        loss.backward()
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_steps_that_never_return_a_loss_are_not_all_profiled(caplog: Any) -> None:
    model = OwnBackward(dropout=0.0, depth=2)
    strategy = dpx.DPXStrategy(verify="off", memory_budget="4MiB")
    with caplog.at_level("INFO"), pytest.warns(UserWarning, match="8 training steps in a row returned no loss"):
        fit(model, loader(rows=16, batches=20), strategy=strategy)
    profiled = [record for record in caplog.records if "profiles a step" in record.message]
    assert len(profiled) == 1, "one run of each later step tells as much"
    assert len(model.seen) == 20


class SkipsLong(LightningModule):
    """Rows (B, T, 64), of which batches with long rows have no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
        self.peaks: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.sim.reset_peak_memory_stats(0)  # type: ignore[attr-defined]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch.shape[1] > 60 else self.net(batch).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.peaks.append(torch.sim.max_memory_allocated(0))  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_skipped_batches_between_steps_with_a_loss_are_not_in_a_row() -> None:
    """After nine of them a larger shape of batch was not planned any more, and the budget was exceeded by 1.23."""
    lengths = [16, 64] * 9 + [48, 48]
    model = SkipsLong()
    budget = 700 * 2**10
    strategy = dpx.DPXStrategy(memory_budget=budget, micro_batches=1, plan_cache=False)
    loader = DataLoader([torch.randn(8, length, 64) for length in lengths], batch_size=None)
    before = torch.sim.memory_allocated(0)  # type: ignore[attr-defined]
    make_trainer(strategy=strategy, accelerator="sim", devices=1, max_epochs=1).fit(model, loader)
    assert len(model.peaks) == 20
    assert max(model.peaks[-2:]) - before <= budget
