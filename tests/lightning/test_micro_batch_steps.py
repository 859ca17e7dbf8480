"""One step on one batch, whatever number of micro-batches it is run in."""

import warnings
from contextlib import nullcontext
from functools import cache
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

import lightning_dpx as dpx
from tests.conftest import StepsByHand, assert_equal, make_loader, make_trainer, run, seeded

pytestmark = pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
ROWS = 13  # in batches of 13 and, at the end, of 5
SEEN: SimpleQueue[int] = SimpleQueue()  # rows of every step that ran: where no rehearsal looks for Python state
SETTINGS = [(1, 2, "inline"), (1, 3, "threads"), (2, 2, "threads"), (2, [3, 1], "inline"), (2, 2, "auto")]


def seen_rows() -> list[int]:
    """What was noted since the last time."""
    return [SEEN.get() for _ in range(SEEN.qsize())]


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    seen_rows()


def loader() -> Any:
    return make_loader(2 * ROWS + 5, ROWS)


def fitted(model: LightningModule, **options: Any) -> dict[str, torch.Tensor]:
    """Weights, buffers, attributes and logged values after two epochs."""
    trainer = make_trainer(**options)
    trainer.fit(model, loader())
    seen = {**model.state_dict(), **trainer.callback_metrics}
    seen["steps"] = torch.tensor([trainer.global_step, getattr(model, "count", 0)])
    return {name: torch.as_tensor(value).detach().cpu().clone() for name, value in seen.items()}


def strategy(num_devices: int, micro_batches: Any, execution: str = "inline", **options: Any) -> dict[str, Any]:
    own = dpx.DPXStrategy(micro_batches=micro_batches, execution=execution, **options)
    return {"strategy": own, "devices": num_devices}


class Steps(LightningModule):
    """Rows (B, 8) to logits (B, 3); counts its steps, and says how many rows each had."""

    def __init__(self, event: str = "") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.event = event
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        SEEN.put(len(batch[0]))
        logits = self.net(batch[0])
        self.log("wrong", (logits.argmax(1) != batch[1]).sum().float(), reduce_fx="sum", on_step=False, on_epoch=True)
        loss = F.cross_entropy(logits, batch[1], reduction="sum" if self.event == "sum" else "mean")
        self.log("loss", loss, on_step=True, on_epoch=True)
        if self.event == "extras":
            return {"loss": loss, "logits": logits}
        if self.event == "none" and batch_idx == 1:
            return None
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class OwnBackward(Steps):
    def backward(self, loss: torch.Tensor) -> None:
        (3 * loss).backward()


class LooksAtGradients(Steps):
    """Keeps the norms that it finds in hooks round zeroing, and zeroes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("norms", torch.zeros(()))

    def note(self) -> None:
        for number, parameter in enumerate(self.parameters()):
            self.norms += 0 if parameter.grad is None else (number + 1) * parameter.grad.norm()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.note()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def on_after_backward(self) -> None:
        self.note()


class ReadsGradients(Steps):
    """Regularizes by the gradients of the step before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        earlier = [one.grad.sum() for one in self.parameters() if one.grad is not None]
        return super().training_step(batch, batch_idx) + sum(self.net[0].bias.sum() * one for one in earlier)


class WeighsByLabel(Steps):
    """A mean over the rows of one class, as over the tokens that count."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1], ignore_index=0)

    def loss_weight(self, batch: Any) -> float:
        return float((batch[1] != 0).sum())


MODELS: dict[str, Any] = {
    "plain": Steps,
    "extras": lambda: Steps("extras"),
    "sum": lambda: Steps("sum"),
    "none": lambda: Steps("none"),
    "own backward": OwnBackward,
    "looks at gradients": LooksAtGradients,
    "weighs by label": WeighsByLabel,
}


@cache
def single(name: str, window: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return fitted(MODELS[name](), accumulate_grad_batches=window)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("num_devices", "micro_batches", "execution"), SETTINGS)
def test_a_step_in_micro_batches_is_one_step(
    name: str, num_devices: int, micro_batches: Any, execution: str, hardware: str
) -> None:
    window = 2 if execution == "threads" else 1
    expected = single(name, window)
    seen_rows()
    torch.manual_seed(0)
    model = MODELS[name]()
    ours = fitted(model, accumulate_grad_batches=window, **strategy(num_devices, micro_batches, execution))
    assert_equal(ours, expected)
    assert max(seen_rows(), default=0) < ROWS


@pytest.mark.parametrize("window", [1, 2])
def test_steps_that_read_gradients_find_those_of_the_step_before(window: int, hardware: str) -> None:
    results = []
    for options in ({}, strategy(1, 2, verify="off")):
        torch.manual_seed(0)
        results.append(fitted(ReadsGradients(), accumulate_grad_batches=window, **options))
    assert_equal(results[1], results[0])


def test_rows_of_the_micro_batches() -> None:
    model = Steps()
    fitted(model, max_epochs=1, **strategy(1, 4, verify="off"))
    assert seen_rows() == [4, 3, 3, 3, 4, 3, 3, 3, 3, 2]  # five rows: two micro-batches, none larger than usual


@pytest.mark.parametrize(("num_devices", "micro_batches"), [(1, 2), (2, 3)])
def test_evaluation_and_prediction_are_cut_likewise(num_devices: int, micro_batches: int, hardware: str) -> None:
    one = run(seeded(), gradient_clip_val=0.1)
    ours = run(seeded(), gradient_clip_val=0.1, **strategy(num_devices, micro_batches, "auto"))
    assert_equal(ours, one)


@pytest.mark.parametrize("none_in", [None, 0, 1])
def test_rows_of_a_none_weigh_nothing(none_in: int | None) -> None:
    """What is left has the weight of all, though its backward ran before that was known."""

    class NoneInOne(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if SEEN.qsize() % 2 == none_in else loss

    class OnlyOthers(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            half = [part.tensor_split((ROWS + 1,) if none_in is None else (7,)) for part in batch]
            return super().training_step([part[none_in or 0] for part in half], batch_idx)

    results = []
    for kind, options in ((NoneInOne, strategy(1, 2, verify="off")), (OnlyOthers, {})):
        torch.manual_seed(0)
        model = kind()
        trainer = make_trainer(max_epochs=1, limit_train_batches=1, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(model, loader())
        results.append({name: value.clone() for name, value in model.state_dict().items()})
    assert_equal(*results)


def test_one_scaler_for_all_micro_batches(sim: Any) -> None:
    """Scaled, checked and skipped once a step; the overflow of one micro-batch skips the step of all."""

    class Overflows(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self.net(batch[0]).float(), batch[1])
            factor = torch.where(batch[1].sum() > 0, 1.0, 1.0) if batch_idx != 1 else 1e4
            return loss * factor * (3e4 if batch_idx == 1 else 1.0)

    class Counts(Callback):
        def __init__(self) -> None:
            self.scales: list[float] = []

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.scales.append(trainer.precision_plugin.scaler.get_scale())

    seen = []
    for options in ({}, strategy(1, 3, verify="off"), strategy(2, 2, "auto", verify="off")):
        torch.manual_seed(0)
        model = Overflows()
        counts = Counts()
        scaler = torch.amp.GradScaler("sim" if options else "cpu", init_scale=256.0, growth_interval=1)
        precision = MixedPrecision("16-mixed", "sim" if options else "cpu", scaler)
        accelerator = "sim" if options else "cpu"
        trainer = make_trainer(
            plugins=precision, callbacks=counts, gradient_clip_val=0.5, **{**options, "accelerator": accelerator}
        )
        trainer.fit(model, loader())
        seen.append((counts.scales, {key: value.detach().cpu() for key, value in model.state_dict().items()}))
    assert seen[0][0][1] < seen[0][0][0] < max(seen[0][0])  # one step was skipped
    for scales, weights in seen[1:]:
        assert scales == seen[0][0]
        for name, value in seen[0][1].items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=2e-3)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_activations_of_one_micro_batch_are_freed_before_the_next(sim: Any, num_devices: int) -> None:
    """By the counters of the devices: after every forward as much is held, but for the gradients."""

    class Wide(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(20)), nn.Linear(8, 3))
            self.held: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.held.append(sim.memory_allocated(batch[0].device))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    held = {}
    peaks = {}
    for number in (1, 4):
        model = Wide()
        rows = num_devices * 1024
        trainer = make_trainer(accelerator="sim", max_epochs=1, **strategy(num_devices, number, "auto", verify="off"))
        before = sim.memory_allocated(0)
        sim.reset_peak_memory_stats(0)
        trainer.fit(model, make_loader(2 * rows, rows))
        held[number] = model.held
        peaks[number] = sim.max_memory_allocated(0) - before
    activations = 20 * 1024 * 8 * 4
    assert len(held[4]) == 4 * len(held[1])
    assert max(held[4]) - min(held[4]) < activations / 16
    assert peaks[4] < 0.35 * peaks[1]


def test_steps_by_hand_take_turns() -> None:
    class ByHand(StepsByHand, Steps):
        """Two bases of which the second one's initializer is called by the first."""

    torch.manual_seed(0)
    expected = fitted(ByHand())
    seen_rows()
    torch.manual_seed(0)
    model = ByHand()
    assert_equal(fitted(model, **strategy(1, 2)), expected)
    assert max(seen_rows()) < ROWS


@pytest.mark.parametrize(("num_devices", "execution"), [(1, "inline"), (2, "inline"), (2, "threads")])
def test_metrics_and_collectives_in_a_step_meet(num_devices: int, execution: str) -> None:
    """They wait for each other, which is announced; in threads of several devices slices are run in one piece."""

    class Measures(Steps):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = MulticlassAccuracy(3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.net(batch[0])
            self.log("accuracy", self.accuracy(logits, batch[1]), on_epoch=False)
            return F.cross_entropy(logits, batch[1])

    torch.manual_seed(0)
    expected = fitted(Measures())
    torch.manual_seed(0)
    says = "which they cannot do on several devices" if execution == "threads" else "so what all of them keep"
    with pytest.warns(match=f"micro-batches .*wait.* for each other .*{says}"):
        ours = fitted(Measures(), **strategy(num_devices, 3, execution))
    assert_equal(ours, expected)


@pytest.mark.parametrize(("num_devices", "says"), [(1, "gets all of its batches whole"), (2, "")])
def test_gradients_that_cross_the_micro_batches_of_an_accelerator(num_devices: int, says: str, sim: Any) -> None:
    """Their backwards would wait for each other in one thread; announced, they come in larger pieces."""

    class Normalizes(Steps):
        def __init__(self) -> None:
            super().__init__()
            self.net.insert(1, nn.BatchNorm1d(16))

    torch.manual_seed(0)
    expected = fitted(Normalizes())
    torch.manual_seed(0)
    options = strategy(num_devices, 2, "auto")
    with pytest.warns(match=says) if says else nullcontext():
        ours = fitted(Normalizes(), accelerator="sim", sync_batchnorm=True, **options)
    assert_equal(ours, expected, additions=100 * 2 * 31 * 16)


def test_a_loss_over_the_whole_batch_is_that_of_all_rows() -> None:
    class WholeBatch(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            SEEN.put(len(batch[0]))
            return {"logits": self.net(batch[0]), "labels": batch[1]}

        def training_step_end(self, outputs: Any) -> Any:
            loss = F.cross_entropy(outputs["logits"], outputs["labels"]) + outputs["logits"].std()
            self.log("loss", loss)
            return loss

    class OneDevice(WholeBatch):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.training_step_end(super().training_step(batch, batch_idx))

    torch.manual_seed(0)
    expected = fitted(OneDevice())
    for num_devices in (1, 2):
        torch.manual_seed(0)
        assert_equal(fitted(WholeBatch(), **strategy(num_devices, 2)), expected)


class FetchesItself(Steps):
    """Its batches cannot be cut."""

    def training_step(self, dataloader_iter: Any) -> Any:
        batch, _, _ = next(dataloader_iter)
        return F.cross_entropy(self.net(batch[0]), batch[1])


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
def test_a_batch_that_cannot_be_cut_runs_whole() -> None:
    torch.manual_seed(0)
    expected = fitted(FetchesItself())
    torch.manual_seed(0)
    with pytest.warns(match="fetches its batches itself"):
        ours = fitted(FetchesItself(), **strategy(1, 2))
    assert_equal(ours, expected)


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
def test_batches_that_a_step_fetches_have_no_number_chosen(caplog: Any) -> None:
    torch.manual_seed(0)
    expected = fitted(FetchesItself())
    torch.manual_seed(0)
    caplog.set_level("INFO")
    options = {"memory_budget": "1MiB", "plan_cache": False}
    assert_equal(fitted(FetchesItself(), **strategy(1, "auto", **options)), expected)
    assert "profiles a step on" in "\n".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("rows", "number", "says"),
    [
        (5, 8, r"micro_batches=8 is more than the rows of a batch for cpu, 5: its steps run in 5 micro-batches of one"),
        (1, 4, r"micro_batches=4 is more than the rows of a batch for cpu, 1: its steps run in one piece, M = 1"),
    ],
)
def test_more_micro_batches_than_rows(rows: int, number: int, says: str) -> None:
    results = []
    for options in ({}, strategy(1, number)):
        torch.manual_seed(0)
        model = Steps()
        trainer = make_trainer(max_epochs=1, limit_train_batches=3, **options)
        with pytest.warns(UserWarning, match=says) if options else nullcontext():
            trainer.fit(model, make_loader(3 * rows, rows))
        results.append({name: value.clone() for name, value in model.state_dict().items()})
    assert_equal(*results)


def test_a_number_is_chosen_for_a_batch_of_one_row() -> None:
    results = []
    for options in ({}, strategy(1, "auto", memory_budget="1MiB", plan_cache=False)):
        torch.manual_seed(0)
        model = Steps()
        make_trainer(max_epochs=1, limit_train_batches=3, **options).fit(model, make_loader(3, 1))
        results.append({name: value.clone() for name, value in model.state_dict().items()})
    assert_equal(*results)


@pytest.mark.parametrize("number", [10**9, [2, 10**9]])
def test_more_micro_batches_than_any_batch_has_rows_are_an_error_at_once(number: Any) -> None:
    with pytest.raises(dpx.ConfigurationError, match="=1000000000 is not allowed; give at most 4096"):
        dpx.DPXStrategy(micro_batches=number)


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "two", [2, 0], None])
def test_a_number_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(dpx.ConfigurationError, match=r"micro_batches.* is not allowed; give a positive integer"):
        dpx.DPXStrategy(micro_batches=given)


def test_as_many_numbers_as_devices() -> None:
    with pytest.raises(dpx.ConfigurationError, match=r"2 entries .* for 1 devices"):
        fitted(Steps(), **strategy(1, [2, 2]))


def test_an_error_leaves_the_gradients_of_earlier_batches() -> None:
    """In the second micro-batch of a window's second batch."""

    class Fails(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1 and SEEN.qsize() > 3:
                raise ArithmeticError("on purpose")
            return loss

    found = []
    for options in ({}, strategy(1, 2, verify="off")):
        torch.manual_seed(0)
        model = Fails()
        seen_rows()
        for _ in range(0 if options else 3):
            SEEN.put(0)
        with pytest.raises(ArithmeticError):
            fitted(model, accumulate_grad_batches=2, **options)
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_equal(found[1], found[0])


def test_a_budget_is_met_by_the_largest_micro_batch(sim: Any) -> None:
    """A budget that no plan of the whole step meets, by the counters of the device."""
    weights = []
    for number in (0, 1, 4):
        own = dpx.DPXStrategy(micro_batches=number or 1, memory_budget=100_000, plan_cache=False)
        options = {"strategy": own, "accelerator": "sim"} if number else {}
        torch.manual_seed(0)
        model = Steps()
        trainer = make_trainer(max_epochs=1, **options)
        before = sim.memory_allocated(0)
        sim.reset_peak_memory_stats(0)
        if number == 1:
            with pytest.raises(dpx.BudgetError, match=r"the smallest that can is .* KiB"):
                trainer.fit(model, make_loader(2048, 1024))
            continue
        trainer.fit(model, make_loader(2048, 1024))
        assert sim.max_memory_allocated(0) - before <= 100_000
        weights.append({name: value.detach().cpu().clone() for name, value in model.state_dict().items()})
    assert_equal(weights[1], weights[0])
