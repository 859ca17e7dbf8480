"""``memory_budget`` or ``plan`` together with ``shifts``: each device within its budget, and the bits of neither."""

import gc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

import lightning_dpx as dpx
from tests.conftest import SIMULATED, Classifier, assert_equal, make_loader, make_trainer
from tests.lightning.memory.test_planning import MIB, Tower, fit, loader, tower

pytestmark = [
    pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED),
    pytest.mark.usefixtures("sim"),
    pytest.mark.shares_plans,
    pytest.mark.xdist_group("plans of shifted steps"),
]
HALF, MOST = ["net.[3-6]"], ["net.[1-8]"]
EACH = {"sim:0": "sim:4", "sim:1": "sim:5"}


def trained(model: LightningModule, devices: int = 1, data: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    trainer = {name: options.pop(name) for name in list(options) if name in ("precision", "accumulate_grad_batches")}
    options = {"verify": "off"} | options  # what is checked before the first step is the business of other tests
    if data is None and "accumulate_grad_batches" in trainer:
        data = loader(batches=3)  # the last step is one with the optimizer's state
    return fit(model, data, strategy=dpx.DPXStrategy(**options), accelerator="sim", devices=devices, **trainer)


@cache
def plain(devices: int = 1, **options: Any) -> dict[str, torch.Tensor]:
    """What all end at, whatever is planned or shifted; to be asked for after peaks were read."""
    return trained(tower(dropout=0.0), devices, **options)


@pytest.mark.parametrize(
    ("devices", "shifts", "parts", "budget"),
    [
        (1, {"sim:0": "sim:4"}, HALF, 2.5),
        (1, {"sim:0": "sim:4"}, MOST, 3.5),  # the target is the one that has too little
        (2, EACH, HALF, 2.25),
        (2, {"sim:0": "sim:4", "sim:1": "sim:4"}, HALF, 2.5),
        (2, {"sim:1": "sim:4"}, HALF, 3.5),
    ],
    ids=["one", "the target is planned", "each its own", "one spare for both", "only the second"],
)
def test_shifted_and_planned_training_ends_at_the_same_bits_within_the_budget(
    devices: int, shifts: dict[str, str], parts: list[str], budget: float, sim: Any
) -> None:
    ours = trained(tower(dropout=0.0), devices, memory_budget=f"{budget}MiB", shifts=shifts, shift_activations=parts)
    peaks = {device: sim.max_memory_allocated(device) for device in range(8)}
    assert all(peak <= budget * MIB for peak in peaks.values()), peaks
    assert_equal(ours, plain(devices), bitwise=True)
    for device in range(8):
        sim.reset_peak_memory_stats(device)
    gc.collect()
    trained(tower(dropout=0.0), devices, shifts=shifts, shift_activations=parts)
    assert any(sim.max_memory_allocated(device) > budget * MIB for device in range(8)), "the budget was no budget"


@pytest.mark.parametrize("execution", ["inline", "threads"])
@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2, "reducer": "naive"}, {"reducer": "colocate"}],
    ids=["bf16", "accumulated", "colocate"],
)
def test_with_mixed_precision_accumulation_and_owners(options: dict[str, Any], execution: str, sim: Any) -> None:
    both = {"memory_budget": "2.25MiB", "shifts": EACH, "shift_activations": HALF}
    ours = trained(tower(dropout=0.0), 2, execution=execution, **both, **options)
    assert all(sim.max_memory_allocated(device) <= 2.25 * MIB for device in range(8))
    assert_equal(ours, plain(2, **options), bitwise=True)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_plan_from_a_file_holds_for_shifted_replicas(devices: int, tmp_path: Path, sim: Any) -> None:
    dpx.search_plan(tower(dropout=0.0), next(iter(loader())), budget=0.4).save(tmp_path / "plan.yaml")
    both = {"plan": str(tmp_path / "plan.yaml"), "shifts": EACH if devices == 2 else {"sim:0": "sim:4"}}
    ours = trained(tower(dropout=0.0), devices, **both, shift_activations=HALF)
    assert sim.max_memory_allocated(0) < 2.5 * MIB, "3.5 without"
    assert_equal(ours, plain(devices), bitwise=True)


@pytest.mark.parametrize("memory", [["3.25MiB", "15MiB"], ["6MiB", "2125KiB"]], ids=["the source", "the target"])
def test_whichever_device_runs_out_is_planned(memory: list[str]) -> None:
    dpx.simulate(8, memory=[memory[0]] * 4 + [memory[1]] * 4)
    options = {"shifts": {"sim:0": "sim:4"}, "shift_activations": HALF}
    planned = trained(tower(dropout=0.0), memory_budget="auto", **options)
    gc.collect()
    with pytest.warns(UserWarning, match=r"ran out of memory .* and is repeated, 1 of 3"):
        replanned = trained(tower(dropout=0.0), on_oom="replan", **options)
    dpx.simulate(8)
    assert_equal(planned, plain(), bitwise=True)
    assert_equal(replanned, plain(), bitwise=True)


def test_the_host_is_no_device_with_a_budget(sim: Any) -> None:
    options = {"shifts": {"sim:0": "cpu"}, "shift_activations": HALF}
    ours = trained(tower(dropout=0.0), memory_budget="3MiB", **options)
    assert sim.max_memory_allocated(0) <= 3 * MIB, "3.5 without"
    assert_equal(ours, plain(), bitwise=True)


def test_a_budget_that_the_target_cannot_meet_names_it() -> None:
    with pytest.raises(dpx.BudgetError) as error:
        trained(tower(), memory_budget="1.75MiB", shifts={"sim:0": "sim:4"}, shift_activations=MOST)
    assert any("On sim:4, memory_budget='1.75MiB' allows 1.75 MiB" in note for note in error.value.__notes__)


def test_offloaded_parts_are_left_to_the_offloading(sim: Any) -> None:
    offloaded = tower(dropout=0.0)
    dpx.offload_activations(offloaded, ["net.[0-1]", "net.4"], "cpu")
    options = {"memory_budget": "2.5MiB", "shifts": {"sim:0": "sim:4"}, "shift_activations": HALF}
    ours = trained(offloaded, **options)
    assert all(sim.max_memory_allocated(device) <= 2.5 * MIB for device in (0, 4))
    assert_equal(ours, plain(), bitwise=True)


class ByHand(Tower):
    """Optimizes inside of its step."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()
        return loss


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("planned", [False, True])
def test_manual_optimization(devices: int, planned: bool) -> None:
    def by_hand() -> Tower:
        torch.manual_seed(0)
        return ByHand()

    plan = dpx.search_plan(tower(dropout=0.0), next(iter(loader())), budget=0.4) if planned else None
    shifts = EACH if devices == 2 else {"sim:0": "sim:4"}
    ours = trained(by_hand(), devices, plan=plan, shifts=shifts, shift_activations=HALF)
    assert_equal(ours, trained(by_hand(), devices))


def test_a_module_that_is_shifted_already_gives_its_shift_up() -> None:
    model = tower().to("sim:0")
    dpx.shift_activations(model, HALF, {"sim:0": "sim:4"})
    with pytest.warns(UserWarning, match=r"shifted already, shifts\['sim:0'\]='sim:4'.*it runs unshifted"):
        ours = trained(model, memory_budget="2.5MiB")
    assert_equal(ours, trained(tower()))


class Measured(Classifier):
    """Its metric is one object, which all replicas share."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(num_classes=3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, labels = batch
        logits = self.net(rows)
        self.accuracy(logits, labels)
        self.log("accuracy", self.accuracy, on_epoch=True)
        return torch.nn.functional.cross_entropy(logits, labels)


SHIFTED = {"shifts": {"sim:0": "sim:4"}, "shift_activations": ["net.2"]}


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (2, {"memory_budget": "1MiB", "workload": [2, 1]}),
        (2, {"memory_budget": "1MiB", **SHIFTED}),
        (1, {"micro_batches": 2, **SHIFTED}),
        (2, {"micro_batches": [1, 2], "memory_budget": "1MiB", **SHIFTED}),
    ],
    ids=["planned on both devices", "planned and shifted", "cut and shifted", "all"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_module_with_a_metric_may_have_them_all(devices: int, options: dict[str, Any]) -> None:
    def run(**trainer: Any) -> tuple[float, list[torch.Tensor], Measured]:
        torch.manual_seed(0)
        model = Measured()
        runner = make_trainer(num_sanity_val_steps=0, limit_val_batches=0, **trainer)
        runner.fit(model, make_loader())
        accuracy = float(runner.callback_metrics["accuracy_epoch"])
        return accuracy, [part.cpu() for part in runner.predict(model, make_loader())], model

    accuracy, predicted, _ = run()
    strategy = dpx.DPXStrategy(plan_cache=False, **options)
    ours, found, model = run(strategy=strategy, accelerator="sim", devices=devices)
    assert ours == pytest.approx(accuracy)
    torch.testing.assert_close(found, predicted)
    # Nothing is left of the run.
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in model.modules())


class NotesAllocated(Callback):
    """What the second device holds after each batch, while nothing that is held in reference cycles is collected."""

    def __init__(self, sim: Any) -> None:
        self._sim = sim
        self.allocated: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        gc.disable()
        self.allocated.append(self._sim.memory_allocated(1))

    def on_train_end(self, *_: Any) -> None:
        gc.enable()


class MeasuredTower(Tower):
    """Large enough for a plan that drops something."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.error = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.error(batch[0], batch[0])
        self.log("error", self.error)
        return super().training_step(batch, batch_idx)


def test_looks_at_later_batches_copy_nothing_of_other_replicas(sim: Any) -> None:
    """Replicas share a metric, whose hooks of a plan lead from one replica to the modules of another."""
    torch.manual_seed(0)
    notes = NotesAllocated(sim)
    strategy = dpx.DPXStrategy(plan_cache=False, memory_budget="3MiB", micro_batches=1)
    trainer = make_trainer(strategy=strategy, accelerator="sim", devices=2, callbacks=[notes], max_epochs=1)
    model = MeasuredTower()
    trainer.fit(model, loader(batches=5), loader(batches=1))
    # The second and the fourth batch are looked at again.
    assert len(notes.allocated) == 5
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    # Shadows have buffers of their own, which wait to be collected.
    assert max(notes.allocated) - notes.allocated[0] < 0.1 * parameters
