"""Evaluation within a budget: cut where it would not fit, as one device, and within what was allowed."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

import lightning_dpx as dpx
from lightning_dpx.lightning.memory.evaluation_cuts import EvaluationBytes
from lightning_dpx.memory import BesideActivations
from lightning_dpx.torch_compat import tree_leaves
from tests.conftest import MakesParametersAnew, StepsByHand, make_loader, make_trainer

KIB = 1024
WIDE = 4096
ROWS = 256  # 4 MiB an activation


class Wide(LightningModule):
    """Rows (B, 8) to (B, 3), by way of two wide activations; evaluated in large batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.widen = nn.Linear(8, WIDE)
        self.narrow = nn.Linear(WIDE, 3)
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.chosen: list[torch.Tensor] = []
        self.num_rows = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.widen(rows).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.log("loss", F.cross_entropy(logits, batch[1]))
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy)
        self.chosen.append(logits.argmax(1))
        self.num_rows += len(batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Peaks(Callback):
    """The most that evaluation batches have taken, with all that was there."""

    def __init__(self) -> None:
        self.most = 0

    def on_validation_batch_start(self, *_: Any) -> None:
        torch.get_device_module("sim").reset_peak_memory_stats(0)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.most = max(self.most, torch.get_device_module("sim").max_memory_allocated(0))

    on_predict_batch_start = on_validation_batch_start
    on_predict_batch_end = on_validation_batch_end


class Batches(IterableDataset[Any]):
    """Batches of so many rows (B, 8)."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        for size in self.sizes:
            yield (torch.linspace(-1, 1, 8 * size).reshape(size, 8),)


def bytes_of_batch() -> int:
    """Of the first of :func:`large_batches`, which is there beside its step."""
    return sum(leaf.nbytes for leaf in tree_leaves(next(iter(large_batches()))))


def large_batches(num_rows: int = 2 * ROWS + 50) -> DataLoader[Any]:
    return DataLoader(make_loader(num_rows).dataset, ROWS)


def static(module: nn.Module) -> int:
    return 2 * sum(parameter.nbytes for parameter in module.parameters())


def evaluated(module: Wide, activations: int | None = None, held: int = 0, **more: Any) -> dict[str, Any]:
    """All that a fit, and a prediction, show; within so many bytes beside parameters and gradients."""
    options = dict(more)
    devices = options.pop("devices", 1)
    callbacks = options.pop("callbacks", [])
    where: dict[str, Any] = {}
    if activations is not None:
        budget = held + static(module) + activations
        where["strategy"] = dpx.DPXStrategy(memory_budget=budget, **{"execution": "inline", **options})
    trainer = make_trainer(max_epochs=1, devices=devices, callbacks=callbacks, **where)
    trainer.fit(module, make_loader(8, 4), large_batches())
    seen = {name: torch.as_tensor(value).cpu() for name, value in trainer.callback_metrics.items()}
    seen["chosen"] = torch.cat([one.cpu() for one in module.chosen])
    seen["num_rows"] = module.num_rows
    if type(module) is Wide:
        seen["predicted"] = torch.cat([one.cpu() for one in trainer.predict(module, large_batches())])
    return seen


@pytest.fixture(scope="module")
def one_device() -> dict[str, Any]:
    return evaluated(Wide())


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("devices", [1, 2])
def test_what_does_not_fit_is_cut_and_is_that_of_one_device(hardware, one_device, devices, caplog) -> None:
    caplog.set_level("INFO")
    torch.testing.assert_close(evaluated(Wide(), 3 << 20, devices=devices), one_device)
    assert "validation_step on" in said(caplog)
    assert "left by memory_budget: it runs in" in said(caplog)
    assert "validation_step)" in said(caplog), "micro-batches are rehearsed"


class CopiesItself(Wide):
    """Its copies have a parameter of their own, which micro-batches would have to share."""

    def __init__(self) -> None:
        super().__init__()
        narrow = MakesParametersAnew(WIDE, 3)
        narrow.load_state_dict(self.narrow.state_dict())
        self.narrow = narrow


def test_what_micro_batches_could_share_no_parameters_for_stays_in_one_piece(one_device) -> None:
    with pytest.warns(UserWarning, match=r"It stays in one piece: Micro-batches cannot share parameter narrow\.weight"):
        seen = evaluated(CopiesItself(), 3 << 20)
    torch.testing.assert_close(seen, {name: value for name, value in one_device.items() if name in seen})


def test_the_budget_is_kept(sim, one_device) -> None:
    held = sim.memory_allocated(0)
    module = Wide()
    peaks = Peaks()
    room = 5 << 19
    trainer_options = {"accelerator": "sim", "devices": 1, "callbacks": [peaks]}
    budget = held + static(module) + room
    strategy = dpx.DPXStrategy(memory_budget=budget)
    trainer = make_trainer(max_epochs=1, strategy=strategy, **trainer_options)
    trainer.fit(module, make_loader(8, 4), large_batches())
    predicted = torch.cat([one.cpu() for one in trainer.predict(module, large_batches())])
    torch.testing.assert_close(predicted, one_device["predicted"])
    assert 0.5 * room < peaks.most - held - static(module) <= room


def test_what_fits_is_not_cut_and_nothing_is_said(one_device, caplog) -> None:
    caplog.set_level("INFO")
    torch.testing.assert_close(evaluated(Wide(), 64 << 20), one_device)
    assert "it runs in" not in said(caplog)


class Spread(Wide):
    """Logs what parts of a batch do not tell of all of it."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("spread", self(batch[0]).std() / batch[1].float().mean())


class Ranked(Wide):
    """Logs the area under the curve of each batch, which that of parts does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.area = MulticlassAUROC(3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("area", self.area(self(batch[0]).softmax(1), batch[1]))


@pytest.mark.parametrize("kind", [Spread, Ranked])
def test_what_parts_do_not_tell_stays_whole_and_over_the_budget_is_said_to_be(kind) -> None:
    expected = evaluated(kind())
    with pytest.warns(UserWarning, match=r"validation_step on 256 rows takes .* no longer, as they .* stays in one"):
        torch.testing.assert_close(evaluated(kind(), 3 << 20), expected)


def test_an_evaluation_without_a_fit_has_no_gradients_to_make_room_for(one_device, caplog) -> None:
    module = Wide()
    caplog.set_level("INFO")
    budget = static(module) // 2 + bytes_of_batch() + (3 << 20)
    trainer = make_trainer(strategy=dpx.DPXStrategy(memory_budget=budget))
    trainer.validate(module, large_batches(), verbose=False)
    plain = Wide()
    make_trainer().validate(plain, large_batches(), verbose=False)
    assert torch.equal(torch.cat(module.chosen), torch.cat(plain.chosen))
    assert "3.00 MiB are left by memory_budget: it runs in" in said(caplog)


def test_where_nothing_may_be_rehearsed_nothing_is_cut(one_device, caplog) -> None:
    caplog.set_level("INFO")
    torch.testing.assert_close(evaluated(Wide(), 3 << 20, verify="off"), one_device)
    assert "it runs in" not in said(caplog)


class ByHand(StepsByHand, Wide):
    pass


@pytest.mark.parametrize("devices", [1, 2])
def test_steps_by_hand_train_on_as_before(sim, hardware, devices, one_device) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="dpx:")
        # On several devices no evaluation of theirs is cut, and what it takes is told.
        warnings.filterwarnings("ignore", message="dpx: .* were allocated")
        found = evaluated(ByHand(), 3 << 20, devices=devices)
    torch.testing.assert_close(found, {name: one_device[name] for name in found})


def test_a_number_that_was_asked_for_is_no_other_in_evaluation(one_device, caplog) -> None:
    caplog.set_level("INFO")
    with pytest.warns(UserWarning, match=r"_step on 256 rows .* in 2 .* micro_batches=2 was asked for; .* try 3"):
        torch.testing.assert_close(evaluated(Wide(), 3 << 20, micro_batches=2), one_device)
    assert "it runs in" not in said(caplog)


def test_one_piece_that_was_asked_for_and_exceeds_the_budget_is_told_of() -> None:
    module = Wide()
    trainer = make_trainer(strategy=dpx.DPXStrategy(memory_budget=static(module) // 2 + (3 << 20), micro_batches=1))
    with pytest.warns(UserWarning, match=r"predict_step on 256 rows takes .*\. It exceeds that, as micro_batches=1 "):
        predicted = torch.cat(trainer.predict(module, large_batches()))
    plain = torch.cat(make_trainer().predict(module, large_batches()))
    assert torch.equal(predicted, plain)
    fitting = make_trainer(strategy=dpx.DPXStrategy(memory_budget=static(module) + (64 << 20), micro_batches=1))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="dpx:")
        fitting.predict(module, large_batches())


def test_a_larger_batch_is_looked_at_again_and_a_smaller_one_is_not(caplog) -> None:
    module = Wide()
    caplog.set_level("INFO")
    batches = Batches(64, 256, 32, 300)
    budget = static(module) // 2 + bytes_of_batch() + (3 << 20)
    trainer = make_trainer(strategy=dpx.DPXStrategy(memory_budget=budget))
    predicted = torch.cat(trainer.predict(module, DataLoader(batches, batch_size=None)))
    expected = torch.cat([module(rows).detach() for (rows,) in batches])
    torch.testing.assert_close(predicted, expected)
    cut = [line for line in said(caplog).splitlines() if "it runs in" in line]
    assert len(cut) == 2
    assert "256 rows" in cut[0]
    assert "300 rows" in cut[1]


def test_a_row_that_does_not_fit_is_warned_of() -> None:
    module = Wide()
    trainer = make_trainer(strategy=dpx.DPXStrategy(memory_budget=static(module) // 2 + 20 * KIB))
    with pytest.warns(UserWarning, match="stays in one piece, as micro-batches take 3"):
        predicted = torch.cat(trainer.predict(module, large_batches(32)))
    torch.testing.assert_close(predicted, module(large_batches(32).dataset[:][0]).detach())


class Masked(Wide):
    """With a buffer as large as an activation, which every micro-batch has a copy of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(ROWS, WIDE))


def test_copies_of_buffers_count_among_what_micro_batches_take(sim) -> None:
    module = Masked()
    held = sim.memory_allocated(0)
    peaks = Peaks()
    budget = held + static(module) // 2 + module.mask.nbytes + bytes_of_batch() + (6 << 20)
    strategy = dpx.DPXStrategy(memory_budget=budget)
    trainer = make_trainer(strategy=strategy, accelerator="sim", callbacks=[peaks])
    with pytest.warns(UserWarning, match=r"takes 8.* stays in one piece, as micro-batches take 1[2-9].* at the least"):
        trainer.validate(module, large_batches(), verbose=False)
    assert peaks.most <= budget + (3 << 20)


class Picky(Wide):
    """Evaluates whole batches only."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if len(batch[0]) not in (ROWS, 50):
            raise ValueError("other rows")
        super().validation_step(batch, batch_idx)


def test_a_step_that_does_not_run_on_a_few_rows_stays_whole() -> None:
    torch.testing.assert_close(evaluated(Picky(), 3 << 20), evaluated(Picky()))


class Normed(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDE)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.norm(self.widen(rows)).tanh())


def test_batch_norms_that_evaluate_do_not_look_at_the_batch(caplog) -> None:
    caplog.set_level("INFO")
    expected = evaluated(Normed())
    torch.testing.assert_close(evaluated(Normed(), 3 << 20), expected)
    assert "it runs in" in said(caplog)


# Nothing is cut while gradients wait, so what the evaluation takes is more than the budget.
@pytest.mark.filterwarnings("ignore:dpx. .* MiB were allocated on sim.[01] at a time in the last steps")
def test_evaluation_in_the_middle_of_an_accumulation_loses_no_gradients(hardware, one_device) -> None:
    ends: list[dict[str, torch.Tensor]] = []
    for strategy in (None, 3 << 20):
        module = Wide()
        where: dict[str, Any] = {}
        if strategy is not None:
            options = {"memory_budget": static(module) + strategy, "execution": "inline"}
            where = {"strategy": dpx.DPXStrategy(**options), "devices": 2}
        middle = {"accumulate_grad_batches": 2, "val_check_interval": 3, "num_sanity_val_steps": 0}
        make_trainer(max_epochs=1, **middle, **where).fit(module, make_loader(24, 4), large_batches())
        ends.append({name: value.cpu() for name, value in module.state_dict().items()})
    torch.testing.assert_close(ends[1], ends[0])


# ---- numbers ----


@pytest.mark.parametrize(
    ("room", "number"),
    [(2000, 1), (1100, 1), (1099, 2), (600, 2), (350, 4), (110, 100), (10, None)],
)
def test_the_least_number_that_fits(room: int, number: int | None) -> None:
    needs = EvaluationBytes(fixed=100, per_row=10, kept=0)
    assert needs.least_number(100, room) == number
    assert needs.peak(100) == 1100


def test_outputs_of_other_micro_batches_stay() -> None:
    needs = EvaluationBytes(fixed=0, per_row=10, kept=4)
    assert needs.peak(100, 2) == 500 + 200
    assert needs.least_number(100, 700) == 2
    assert needs.least_number(100, 399) is None


def test_more_micro_batches_have_more_copies() -> None:
    needs = EvaluationBytes(fixed=0, per_row=10, kept=0, copies=BesideActivations(buffers=100))
    assert [needs.peak(100, number) for number in (1, 2, 4)] == [1000, 700, 650]
    assert needs.least_number(100, 650) == 3
    assert needs.least_number(100, 600) is None
    assert needs.least_peak(100) == 640


def test_one_loader_after_the_other(caplog) -> None:
    class Two(Wide):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
            return self(batch[0]) + dataloader_idx

    module = Two()
    caplog.set_level("INFO")
    trainer = make_trainer(strategy=dpx.DPXStrategy(memory_budget=static(module) // 2 + (3 << 20)))
    first, second = trainer.predict(module, [large_batches(64), large_batches()])
    torch.testing.assert_close(torch.cat(first), module(make_loader(64).dataset.tensors[0]).detach())
    rows = large_batches().dataset.tensors[0]
    torch.testing.assert_close(torch.cat(second), module(rows).detach() + 1)
    assert said(caplog).count("it runs in") == 1
