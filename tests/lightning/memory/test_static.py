"""What a step holds beside activations is counted: whole-device peaks stay within the budget, whoever reduces."""

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from lightning_dpx.lightning.memory.static import bytes_of_states
from lightning_dpx.reducers import REDUCERS
from tests.conftest import SIMULATED, assert_equal, make_trainer
from tests.lightning.memory.test_out_of_memory import Hungry
from tests.lightning.memory.test_planning import MIB, Tower, loader, tower
from tests.lightning.memory.test_shifts_and_plans import EACH, HALF, trained

pytestmark = [
    pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED),
    pytest.mark.usefixtures("sim"),
]
ANYWHERE = sorted(set(REDUCERS) - {"nccl"})


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("packs", [0, 8])
@pytest.mark.parametrize("reducer", ANYWHERE)
def test_the_whole_step_is_within_the_budget(
    reducer: str, packs: int, accumulate: int, shifted: bool, sim: Any
) -> None:
    budget = (2.125 if shifted else 3.0) + (0 if packs else 1)
    shifts: dict[str, Any] = {"shifts": EACH, "shift_activations": HALF} if shifted else {}
    trained(
        tower(dropout=0.0), 2, memory_budget=f"{budget}MiB", reducer=reducer, gradient_buckets=packs,
        accumulate_grad_batches=accumulate, **shifts,
    )  # fmt: skip
    peaks = [sim.max_memory_allocated(device) / MIB for device in range(8)]
    assert max(peaks) <= budget, peaks


@pytest.mark.filterwarnings("ignore:dpx. .*_step on .* is not what it is on one device.*self.seen")
@pytest.mark.parametrize("reducer", ["naive", "colocate"])
def test_the_check_before_the_first_step_is_within_the_budget_as_well(reducer: str, sim: Any) -> None:
    """The tower counts what every replica sees, which the check complains of."""
    trained(tower(dropout=0.0), 2, memory_budget="3MiB", reducer=reducer, verify="warn")
    peaks = [sim.max_memory_allocated(device) / MIB for device in range(8)]
    assert max(peaks) <= 3.0, peaks


class LargeHead(LightningModule):
    """Backward begins with the largest parameter, whose gradient travels while all activations are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))
        self.head = nn.Linear(64, 8192)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.net(batch[0])
        return self.head(hidden.view(-1, 512, 64).mean(1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("reducer", ANYWHERE)
def test_what_gradients_take_beside_all_activations_is_counted(reducer: str, micro_batches: int, sim: Any) -> None:
    """Packs that travel; and gradients of the batch before, aside while micro-batches add up their own."""
    budget = 15 if reducer == "collective" else 12
    generator = torch.Generator().manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(4 * 4096, 64, generator=generator)), 4096)
    torch.manual_seed(0)
    strategy = dpx.DPXStrategy(memory_budget=f"{budget}MiB", reducer=reducer, micro_batches=micro_batches)
    on_sim: dict[str, Any] = {"accelerator": "sim", "devices": 2, "accumulate_grad_batches": 2}
    make_trainer(max_epochs=1, strategy=strategy, **on_sim).fit(LargeHead(), data)
    peaks = [sim.max_memory_allocated(device) / MIB for device in range(2)]
    assert max(peaks) <= budget, peaks


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("accelerator", ["cpu", "sim"])
def test_a_check_that_fails_half_way_leaves_no_gradients(accelerator: str) -> None:
    """A few rows are too few for this step, as its second batch shows again.

    On the host shadows go when garbage is collected, and on accelerators at once.
    """
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(3 * 4096, 64)), 4096)
    model = LargeHead()
    gc.collect()
    gc.disable()
    try:
        strategy = dpx.DPXStrategy(micro_batches=2)
        make_trainer(max_epochs=1, strategy=strategy, accelerator=accelerator).fit(model, data)
        parameters = [one for one in gc.get_objects() if type(one) is nn.Parameter and one.shape == (8192, 64)]
        with_gradients = [one for one in parameters if one.grad is not None and one is not model.head.weight]
    finally:
        gc.enable()
    assert (len(parameters) > 1) == (accelerator == "cpu"), "of shadows"
    assert not with_gradients


def test_four_replicas_in_threads(sim: Any) -> None:
    shifts = {f"sim:{index}": f"sim:{index + 4}" for index in range(4)}
    options: dict[str, Any] = {"reducer": "collective", "execution": "threads", "accumulate_grad_batches": 2}
    trained(tower(dropout=0.0), 4, memory_budget="2MiB", shifts=shifts, shift_activations=HALF, **options)
    peaks = [sim.max_memory_allocated(device) / MIB for device in range(8)]
    assert max(peaks) <= 2, peaks


def test_a_budget_that_the_reduction_breaks_is_refused_with_both_numbers() -> None:
    with pytest.raises(dpx.BudgetError, match=r"takes .* with 1\.60 MiB that the reduction .* gradient_buckets"):
        trained(tower(dropout=0.0), 2, memory_budget="3MiB", reducer="collective", gradient_buckets=0)


class Layers(LightningModule):
    """Eight rows that take as much as the parameters do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Penalized(Layers):
    """A step that needs a graph for its own gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = batch[0].detach().requires_grad_()
        out = self.net(rows).square().mean()
        (gradient,) = torch.autograd.grad(out, rows, create_graph=True)
        return out + gradient.square().mean()


@pytest.mark.parametrize(("kind", "tokens"), [(Layers, 4), (Penalized, 128)])
def test_later_looks_at_a_step_are_within_the_budget(kind: type[Layers], tokens: int, sim: Any) -> None:
    """Batches 2, 4 and 8 are looked at again: that takes no more than the budget, and leaves no reference cycles."""
    torch.manual_seed(0)
    whole = torch.randn(8 * 9, tokens, 64)
    model = kind()
    # Without a budget, the least are those of batches that are not looked at.
    budget = int(1.1 * min(peaks_of_later_steps(model, whole, sim, micro_batches=8)))
    within = peaks_of_later_steps(model, whole, sim, micro_batches=8, memory_budget=budget)
    assert max(within) <= budget, (budget, within)
    usual = {peak for batch, peak in enumerate(within, start=2) if batch not in (2, 4, 8)}
    assert usual == {min(within)}


def peaks_of_later_steps(model: LightningModule, whole: torch.Tensor, sim: Any, **options: Any) -> list[int]:
    """The bytes at the most in each of the batches from the second on."""
    device = torch.device("sim", 0)
    peaks = list[int]()

    class Peaks(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            sim.reset_peak_memory_stats(device)

        def on_train_batch_end(self, _: Any, __: Any, ___: Any, ____: Any, batch_idx: int) -> None:
            gc.disable()  # after the first step, which is planned: the collector may come too late
            if batch_idx:
                peaks.append(sim.max_memory_allocated(device))

    strategy = dpx.DPXStrategy(plan_cache=False, **options)
    on_sim: dict[str, Any] = {"accelerator": "sim", "devices": 1, "callbacks": [Peaks()]}
    try:
        make_trainer(max_epochs=1, strategy=strategy, **on_sim).fit(model, DataLoader(TensorDataset(whole), 8))
    finally:
        gc.enable()
    return peaks


class UsesAPart(Layers):
    """Most of its batch is not needed for the backward, which takes most when it begins."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.net(batch[0][:, :64].contiguous())
        loss: torch.Tensor = Hungry.apply(hidden).square().mean()
        return loss


class LooksAtBatches(Callback):
    """Before the backward hooks may compare the batch with what the step has made of it, on its device."""

    def __init__(self, sim: Any) -> None:
        self._sim = sim
        self.peaks: list[int] = []
        self.plans: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._sim.reset_peak_memory_stats(0)

    def on_before_backward(self, *_: Any) -> None:
        pass

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.peaks.append(self._sim.max_memory_allocated(0))
        self.plans = [plan for plan, _ in trainer.strategy.memory_plans.values()]


def test_the_batch_that_hooks_find_before_the_backward_is_part_of_what_a_step_takes(sim: Any) -> None:
    held = sim.memory_allocated(0)
    rows = TensorDataset(torch.randn(1024, 1024))
    looks = LooksAtBatches(sim)
    budget = held + 3 * MIB
    strategy = dpx.DPXStrategy(memory_budget=budget, micro_batches=1, verify="off", plan_cache=False)
    trainer = make_trainer(max_epochs=1, strategy=strategy, accelerator="sim", devices=1, callbacks=[looks])
    trainer.fit(UsesAPart(), DataLoader(rows, 256))
    assert max(looks.peaks) <= budget
    assert not looks.plans[0].keeps_all, "a MiB of it is the batch"


@pytest.mark.parametrize("sees_gradients", [False, True])
def test_a_batch_and_gradients_on_the_host_are_part_of_what_a_step_takes_there(sees_gradients: bool) -> None:
    """A batch is copied to an accelerator within the step; on the host it is there, and nothing copies it.

    The second batch is larger, and planned when the gradients of the first are there, or have been freed.
    """
    whole = torch.randn(3072, 64)  # the data set, of which the loader below gives parts
    torch.manual_seed(0)
    model = LargeHead()
    strategy = dpx.DPXStrategy(memory_budget="14MiB", micro_batches=1)
    rooms = list[int | None]()

    class Look(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            rooms.extend(plan.budget for plan in strategy.planning.devices.plans.values())

    batches = DataLoader(TensorDataset(whole), batch_sampler=[range(1024), range(1024, 3072)])
    callbacks = [Look(), LooksAtGradients()] if sees_gradients else [Look()]
    on_host: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "callbacks": callbacks}
    make_trainer(max_epochs=1, strategy=strategy, **on_host).fit(model, batches)
    # SGD has no state; and gradients that nothing sees come within a step, among the activations.
    lasting = (2 if sees_gradients else 1) * sum(parameter.nbytes for parameter in model.parameters())
    assert rooms == [14 * MIB - lasting - rows * 64 * 4 for rows in (1024, 2048)]


class LooksAtGradients(Callback):
    """Where Lightning sets them to ``None``, between a forward and its backward."""

    def on_before_zero_grad(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        self.norms = [parameter.grad.norm() for parameter in pl_module.parameters() if parameter.grad is not None]


class Shadow(Callback):
    """Holds averages as many callbacks of users do: tensors by name."""

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        self.lazy = nn.LazyLinear(3)  # has no numbers yet
        self.averages = {name: value.detach().clone() for name, value in pl_module.named_parameters()}


@pytest.mark.parametrize(
    "callback", [EMAWeightAveraging, lambda: StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1), Shadow]
)
def test_what_callbacks_hold_on_the_host_is_part_of_what_a_step_takes_there(callback: Callable[[], Callback]) -> None:
    rooms = list[int | None]()
    strategy = dpx.DPXStrategy(memory_budget="14MiB", micro_batches=1, plan_cache=False)

    class Look(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            rooms.extend(plan.budget for plan in strategy.planning.devices.plans.values())

    torch.manual_seed(0)
    model = LargeHead()
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    batches = DataLoader(TensorDataset(torch.randn(1024, 64)), batch_size=1024)
    on_host: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "callbacks": [callback(), Look()]}
    make_trainer(max_epochs=1, strategy=strategy, **on_host).fit(model, batches)
    # Parameters, and the average; those of Lightning keep a count of their own beside it.
    assert rooms[0] == pytest.approx(14 * MIB - 2 * parameters - 1024 * 64 * 4, abs=64)


def test_a_step_of_the_optimizer_beyond_the_budget_is_told_of_with_what_was_measured(sim: Any) -> None:
    """Its step takes the size of all parameters once more, and no plan for activations can help."""

    class Adam(Layers):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), foreach=self.foreach)

        def __init__(self, foreach: bool) -> None:
            super().__init__()
            self.foreach = foreach
            self.net = nn.Sequential(nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, 64))

    whole = torch.randn(8 * 6, 4, 64)
    budget = 4 * (2 * 64 * 2048) * 4 + 840 * 1024  # parameters, gradients, two states, and the activations
    with pytest.warns(UserWarning, match=r"MiB were allocated on sim:0 .* allows 4\.8 MiB") as told:
        peaks = peaks_of_later_steps(Adam(foreach=True), whole, sim, micro_batches=1, memory_budget=budget)
    assert max(peaks) > 1.02 * budget, "the premise"
    assert len([one for one in told if "were allocated" in str(one.message)]) == 1
    assert any(f"{max(peaks) / MIB:.1f} MiB were allocated" in str(one.message) for one in told)


def test_nothing_is_told_of_steps_within_the_budget(sim: Any) -> None:
    torch.manual_seed(0)
    whole = torch.randn(8 * 6, 128, 64)
    budget = int(0.8 * max(peaks_of_later_steps(Layers(), whole, sim, micro_batches=1)))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="dpx:")
        within = peaks_of_later_steps(Layers(), whole, sim, micro_batches=1, memory_budget=budget)
    assert max(within) <= budget


class Backbone(BaseFinetuning):
    """Unfreezes all but the head in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net, optimizer, lr=0.1)


class Finetuned(Tower):
    """The backbone joins the optimizer once it is unfrozen."""

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def finetuned(**options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Finetuned(dropout=0.0)
    torch.manual_seed(1)
    strategy = dpx.DPXStrategy(**options)
    trainer = make_trainer(max_epochs=2, strategy=strategy, accelerator="sim", devices=1, callbacks=[Backbone()])
    trainer.fit(model, loader(), loader(batches=1))
    return {name: value.cpu() for name, value in model.state_dict().items()}


def test_what_is_unfrozen_during_a_run_is_planned_for(sim: Any) -> None:
    """Its activations, its gradients, and the states that its optimizer will make."""
    expected = finetuned()
    unplanned = sim.max_memory_allocated(0)
    sim.reset_peak_memory_stats(0)
    budget = 3.75 * MIB
    assert_equal(finetuned(memory_budget=int(budget)), expected, bitwise=True)
    assert sim.max_memory_allocated(0) <= budget < 0.75 * unplanned


def test_a_budget_without_room_for_what_is_unfrozen_is_refused(sim: Any) -> None:
    with pytest.raises(dpx.BudgetError) as error:
        finetuned(memory_budget="2MiB")
    text = "\n".join([str(error.value), *error.value.__notes__])
    assert "it must allow at least" in text
    assert "a step that trained less: net.0" in text
    assert "more were unfrozen since" in text


def test_states_of_parameters_that_have_been_frozen_are_still_to_come(sim: Any) -> None:
    first, second = (nn.Parameter(torch.zeros(1000, device="sim:0")) for _ in range(2))
    optimizer = torch.optim.Adam([first])
    assert bytes_of_states([first], [optimizer]) == {first.device: 2 * first.nbytes}
    first.grad = torch.ones_like(first)
    optimizer.step()
    assert bytes_of_states([first], [optimizer]) == {first.device: 0}
    optimizer.add_param_group({"params": [second]})
    assert bytes_of_states([first, second], [optimizer]) == {first.device: 2 * second.nbytes}


def test_an_optimizer_that_keeps_one_state_for_all_parameters_makes_more_of_it(sim: Any) -> None:
    parameters = [nn.Parameter(torch.zeros(1000, device="sim:0")) for _ in range(2)]
    optimizer = torch.optim.LBFGS(parameters, history_size=3)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    device, all_bytes = parameters[0].device, sum(parameter.nbytes for parameter in parameters)
    before = bytes_of_states(parameters, [optimizer])[device]
    optimizer.step(lambda: (parameters[0] * 3).sum() + 1.0)
    (state, *others) = optimizer.state.values()
    assert not others
    kept = [state["d"], state["prev_flat_grad"], *state["old_dirs"], *state["old_stps"]]
    present = sum(one.nbytes for one in kept if one is not None) // all_bytes
    assert present > 1
    assert bytes_of_states(parameters, [optimizer]) == {device: before - present * all_bytes}
