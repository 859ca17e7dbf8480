"""Numbers that a step counts, adds up or keeps are those of one device, whatever the number of slices."""

import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from tests.conftest import make_trainer

WAYS = [
    pytest.param({"execution": "inline"}, 2, id="inline-2"),
    pytest.param({"execution": "threads"}, 3, id="threads-3"),
    pytest.param({"micro_batches": 3}, 1, id="micro-batches"),
    pytest.param({"micro_batches": 2, "execution": "inline"}, 2, id="both"),
]


class Model(LightningModule):
    """Rows (B, 8) to logits (B, 3); its figures are looked at after every batch."""

    dropout = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.figures: list[list[float]] = []
        self.begin()

    def begin(self) -> None: ...

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, labels = batch
        logits = self.net(F.dropout(rows, self.dropout))
        loss = F.cross_entropy(logits, labels)
        self.keep(rows, labels, logits, loss, batch_idx)
        return loss

    def keep(
        self, rows: torch.Tensor, labels: torch.Tensor, logits: torch.Tensor, loss: torch.Tensor, batch_idx: int
    ) -> None: ...

    def kept(self) -> list[Any]:
        return []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.figures.append([float(value) for value in self.kept()])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Sums(Model):
    """By hand, without torchmetrics; what is counted begins anew with every epoch."""

    def begin(self) -> None:
        self.num_hits = 0
        self.num_rows = 0
        self.num_steps = 0
        self.loss_sum = 0.0
        self.confusions = torch.zeros(3, 3)
        self.in_place = torch.zeros(3)
        self.array = np.zeros(3, dtype=np.int64)

    def on_train_epoch_start(self) -> None:
        self.begin()

    def keep(self, rows: Any, labels: Any, logits: Any, loss: Any, batch_idx: int) -> None:
        found = logits.argmax(1)
        self.num_hits += (found == labels).sum().item()
        self.num_rows += len(rows)
        self.num_steps += 1
        self.loss_sum += loss.item() * len(rows)
        pairs = F.one_hot(found, 3).float().T @ F.one_hot(labels, 3).float()
        self.confusions = self.confusions + pairs.cpu()
        self.in_place += logits.detach().sum(0).cpu()
        self.array += np.bincount(labels.cpu().numpy(), minlength=3)

    def kept(self) -> list[Any]:
        counts = [self.num_hits, self.num_rows, self.num_steps, self.loss_sum]
        return [*counts, *self.confusions.flatten(), *self.in_place, *self.array]


class SumsBesideDropout(Sums):
    """Draws are compared where they can be made equal; counts of rows are no matter of draws."""

    dropout = 0.3

    def kept(self) -> list[Any]:
        return [self.num_rows, self.num_steps, *self.array]


class Latest(Model):
    """Set anew by each step, and not added to."""

    def begin(self) -> None:
        self.loss: Any = 0.0
        self.size = 0
        self.largest = -1e9
        self.average: float | None = None
        self.first_label = 0
        self.last_label = 0

    def keep(self, rows: Any, labels: Any, logits: Any, loss: Any, batch_idx: int) -> None:
        self.loss = loss
        self.size = len(rows)
        self.largest = max(self.largest, rows.max().item())
        self.average = loss.item() if self.average is None else 0.9 * self.average + 0.1 * loss.item()
        self.first_label = int(labels[0])
        self.last_label = int(labels[-1])

    def on_after_backward(self) -> None:
        assert torch.is_tensor(self.loss)

    def kept(self) -> list[Any]:
        return [self.loss.detach(), self.size, self.largest, self.average, self.first_label, self.last_label]


class LatestRows(Model):
    """What hooks read of every row: with a graph and without, of a submodule, as an array, and large."""

    def begin(self) -> None:
        self.rows: Any = None

    def keep(self, rows: Any, labels: Any, logits: Any, loss: Any, batch_idx: int) -> None:
        self.rows = rows * 2
        self.logits = logits
        self.net.found = logits.argmax(1)
        self.labels = labels.cpu().numpy()
        self.large = rows.repeat(1, 1000)

    def kept(self) -> list[Any]:
        sizes = [len(self.rows), len(self.net.found), len(self.labels), len(self.large)]
        last = [self.rows[-1].sum(), self.net.found[-1], self.labels[-1], self.large[-1].sum()]
        return [*sizes, *last, self.logits.detach().sum()]


def fitted(kind: type[Model], labels: torch.Tensor | None = None, **options: Any) -> Model:
    torch.manual_seed(0)
    model = kind()
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(103, 8, generator=generator)
    drawn = torch.randint(0, 3, (103,), generator=generator)
    data = TensorDataset(rows, drawn if labels is None else labels)
    make_trainer(max_epochs=2, **options).fit(model, DataLoader(data, 20))
    return model


@pytest.mark.parametrize(("own", "num_devices"), WAYS)
@pytest.mark.parametrize("kind", [Sums, SumsBesideDropout, Latest, LatestRows])
def test_after_every_batch_they_are_those_of_one_device(
    hardware: str, own: Any, num_devices: int, kind: type[Model]
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The training_step draws random numbers from a generator")
        ours = fitted(kind, strategy=dpx.DPXStrategy(**own), devices=num_devices, accelerator=hardware)
    torch.testing.assert_close(torch.tensor(ours.figures), torch.tensor(fitted(kind).figures))


class Extremes(Model):
    """Of all rows until now."""

    def begin(self) -> None:
        self.largest = 0.0
        self.least = 0.0

    def keep(self, rows: Any, labels: Any, logits: Any, loss: Any, batch_idx: int) -> None:
        self.largest = max(self.largest, float(rows.max()))
        self.least = min(self.least, float(rows.min()))

    def kept(self) -> list[Any]:
        return [self.largest, self.least]


@pytest.mark.parametrize(("own", "num_devices"), WAYS)
@pytest.mark.parametrize("place", [0, 2])
def test_extremes_are_those_of_all_slices_though_one_had_them_by_chance(own: Any, num_devices: int, place: int) -> None:
    """In the first batch, which has no other rows to look at, the first slice has both; they remained that slice's."""
    rows = torch.linspace(0.1, 0.9, 24)[:, None] * torch.tensor([1.0, -1.0] * 4)
    rows[place] = torch.tensor([2.0, -2.0] * 4)
    rows[15] = torch.tensor([3.0, -3.0] * 4)
    loader = DataLoader(TensorDataset(rows, torch.zeros(24, dtype=torch.long)), 8)
    models = []
    for options in ({}, {"strategy": dpx.DPXStrategy(**own), "devices": num_devices}):
        torch.manual_seed(0)
        models.append(Extremes())
        make_trainer(max_epochs=1, **options).fit(models[-1], loader)
    assert models[0].figures == models[1].figures


class FirstRow(Model):
    """Which may well be the largest one."""

    def begin(self) -> None:
        self.first = 0.0

    def keep(self, rows: Any, labels: Any, logits: Any, loss: Any, batch_idx: int) -> None:
        self.first = float(rows[0, 0])

    def kept(self) -> list[Any]:
        return [self.first]


def test_an_extreme_that_may_be_the_first_number_is_part_of_the_line(caplog: Any) -> None:
    """Where all rows that there are leave both open; it was not."""
    rows = torch.linspace(1.0, 0.1, 5)[:, None].expand(5, 8)
    loader = DataLoader(TensorDataset(rows, torch.zeros(5, dtype=torch.long)), 5)
    torch.manual_seed(0)
    with caplog.at_level("INFO"):
        make_trainer(strategy=dpx.DPXStrategy(execution="inline"), devices=3, max_epochs=1).fit(FirstRow(), loader)
    assert "kept value 'self.first' is put together as the max of slices" in caplog.text


class CountsWhatIsNew(Model):
    """A second step on the same rows finds nothing new, and leaves the count as it is."""

    def begin(self) -> None:
        self.seen: set[float] = set()
        self.num_seen = 0
        self.cost = 0.0

    def keep(self, rows: Any, labels: Any, logits: Any, loss: Any, batch_idx: int) -> None:
        for value in (rows[:, 0] * 3).round().tolist():
            if value not in self.seen:
                self.seen.add(value)
                self.num_seen += 1
                self.cost += 0.5

    def kept(self) -> list[Any]:
        return [self.num_seen, self.cost, len(self.seen)]


@pytest.mark.parametrize(("own", "num_devices"), WAYS)
def test_a_count_of_what_is_new_is_that_of_one_device(own: Any, num_devices: int, caplog: Any) -> None:
    """It was the sum of what slices had there by then: 907 of 13."""
    with caplog.at_level("INFO"):
        ours = fitted(CountsWhatIsNew, strategy=dpx.DPXStrategy(**own), devices=num_devices)
    assert "What slices add to self.num_seen is added up, as of a count of what is new" in caplog.text
    assert ours.figures == fitted(CountsWhatIsNew).figures


class LargestSums(Model):
    """Of a batch until now, which in a first one are the sums of its slices'."""

    def begin(self) -> None:
        self.most = 0.0
        self.rows = 0

    def keep(self, rows: Any, labels: Any, logits: Any, loss: Any, batch_idx: int) -> None:
        self.most = max(self.most, float(rows.abs().sum()))
        self.rows = max(self.rows, len(rows))

    def kept(self) -> list[Any]:
        return [self.most, self.rows]


@pytest.mark.parametrize(("own", "num_devices"), WAYS)
def test_the_largest_sum_of_a_batch_is_no_count_of_what_is_new(own: Any, num_devices: int) -> None:
    """Later ones were lost without a word."""
    with pytest.warns(UserWarning, match=r"self\.most is the largest that .*self\.rows is the largest that"):
        fitted(LargestSums, strategy=dpx.DPXStrategy(**own), devices=num_devices)


class CountsBesideRoot(Sums):
    """The loss is none of slices, and announced; what is counted beside it comes together all the same."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx).sqrt()

    def kept(self) -> list[Any]:
        return [self.num_rows, self.num_steps, *self.array]


@pytest.mark.parametrize(("own", "num_devices"), WAYS)
def test_what_is_counted_beside_a_loss_that_differs_is_that_of_one_device(
    hardware: str, own: Any, num_devices: int
) -> None:
    with pytest.warns(UserWarning, match="the loss is") as caught:
        ours = fitted(CountsBesideRoot, strategy=dpx.DPXStrategy(**own), devices=num_devices, accelerator=hardware)
    assert ours.figures == fitted(CountsBesideRoot).figures
    assert "self.num_rows" not in str(caught[0].message)


class Memory(Model):
    """A place for each sample, which its first feature names; slices change places of their own."""

    def begin(self) -> None:
        self.times_seen = torch.zeros(100)
        self.losses = torch.zeros(100)
        self.averages = torch.zeros(100)

    def keep(self, rows: Any, labels: Any, logits: Any, loss: Any, batch_idx: int) -> None:
        places = (rows[:, 0] * 100).round().long().cpu()
        losses = F.cross_entropy(logits.detach(), labels, reduction="none").cpu()
        self.times_seen[places] += 1
        self.losses[places] = losses
        self.averages[places] = self.averages[places] / 2 + losses

    def kept(self) -> list[Any]:
        return [*self.times_seen, *self.losses, *self.averages]


@pytest.mark.parametrize(("own", "num_devices"), WAYS)
def test_memories_of_all_samples_are_those_of_one_device(hardware: str, own: Any, num_devices: int) -> None:
    rows = torch.randn(100, 8, generator=torch.Generator().manual_seed(1))
    rows[:, 0] = torch.arange(100) / 100
    loader = DataLoader(TensorDataset(rows, torch.arange(100) % 3), 20)

    def figures(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = Memory()
        make_trainer(**options).fit(model, loader)
        return torch.tensor(model.figures)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = figures(strategy=dpx.DPXStrategy(**own), devices=num_devices, accelerator=hardware)
    torch.testing.assert_close(ours, figures())
    assert not [str(one.message) for one in caught if "not what it is" in str(one.message)]


class Histogram(Model):
    """Each slice of the first batch has labels of its own."""

    def begin(self) -> None:
        self.counts = torch.zeros(3)

    def keep(self, rows: Any, labels: Any, logits: Any, loss: Any, batch_idx: int) -> None:
        self.counts += torch.bincount(labels.cpu(), minlength=3)

    def kept(self) -> list[Any]:
        return [*self.counts]


def test_elements_that_several_slices_change_later_on_are_announced(caplog: Any) -> None:
    labels = torch.tensor([0, 0, 0, 2, 1, 1, 0, 1, 2, 0, 1, 2])
    loader = DataLoader(TensorDataset(torch.randn(12, 8), labels), 4)

    def figures(**options: Any) -> list[list[float]]:
        model = Histogram()
        make_trainer(max_epochs=1, **options).fit(model, loader)
        return model.figures

    with caplog.at_level("INFO"):
        ours = figures(strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    assert re.search(r"done more in the last batch than when it was checked \(self\.counts\)", caplog.text)
    assert ours == figures()


class Large(Model):
    """Numbers that no tensor holds."""

    def begin(self) -> None:
        self.tokens = 2**70
        self.steps = 2**70
        self.precise = np.longdouble(0)
        self.short = np.uint16(0)

    def keep(self, rows: torch.Tensor, *_: Any) -> None:
        self.tokens += len(rows)
        self.steps += 1
        self.precise += len(rows)
        self.short += np.uint16(len(rows))

    def kept(self) -> list[Any]:
        return [self.tokens - 2**70, self.steps - 2**70, self.precise, self.short]


@pytest.mark.parametrize(("own", "num_devices"), WAYS)
def test_numbers_that_no_tensor_holds_are_those_of_one_device(
    hardware: str, own: Any, num_devices: int, caplog: Any
) -> None:
    with caplog.at_level("INFO"):
        ours = fitted(Large, strategy=dpx.DPXStrategy(**own), devices=num_devices, accelerator=hardware)
    assert "failed with" not in caplog.text
    assert ours.figures == fitted(Large).figures


class Positives(Sums):
    """There are none in the batches that are rehearsed first."""

    def keep(self, rows: Any, labels: Any, logits: Any, loss: Any, batch_idx: int) -> None:
        self.num_hits += int((labels == 1).sum())

    def kept(self) -> list[Any]:
        return [self.num_hits]


def test_what_was_zero_in_the_rehearsal_is_rehearsed_when_it_no_longer_is(caplog: Any) -> None:
    labels = torch.zeros(103, dtype=torch.long)
    labels[40::2] = 1  # from the third batch on, which is not looked at before it runs
    with caplog.at_level("INFO"):
        ours = fitted(Positives, labels, strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    assert re.search(r"done more in the last batch than when it was checked \(self\.num_hits\)", caplog.text)
    theirs = fitted(Positives, labels)
    assert ours.figures[0] == theirs.figures[0]
    assert ours.figures[6:] == theirs.figures[6:], "the second epoch"


class Flags(Model):
    """Zero in the first batches, and the same for all slices later: no sum of theirs."""

    def begin(self) -> None:
        self.flag = torch.zeros(())
        self.shared = np.zeros(3)

    def keep(self, rows: Any, labels: Any, logits: Any, loss: Any, batch_idx: int) -> None:
        self.flag = torch.tensor(float(batch_idx > 1))
        if batch_idx > 1:
            np.add.at(self.shared, labels.cpu().numpy(), 1.0)

    def kept(self) -> list[Any]:
        return [self.flag, *self.shared]


@pytest.mark.parametrize(("own", "num_devices"), WAYS)
def test_zeros_are_no_sums(hardware: str, own: Any, num_devices: int) -> None:
    ours = fitted(Flags, strategy=dpx.DPXStrategy(**own), devices=num_devices, accelerator=hardware)
    assert ours.figures == fitted(Flags).figures


class Windows(Model):
    """Slices see each other's items in a list that one device would not have by then."""

    def begin(self) -> None:
        self.window: list[float] = []
        self.means: list[float] = []

    def keep(self, rows: Any, labels: Any, logits: Any, loss: Any, batch_idx: int) -> None:
        self.window.append(loss.item())
        if len(self.window) == 3:
            self.means.append(sum(self.window) / 3)
            self.window = []

    def kept(self) -> list[Any]:
        return [len(self.means)]


def test_a_window_that_slices_share_gets_batches_whole_once_it_is_seen() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = fitted(Windows, strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    said = "\n".join(str(one.message) for one in caught)
    assert "It writes self.means in this batch, and wrote nothing there when it was checked." in said
    assert "gets all of its batches whole, on the first replica, while the others idle: It takes items out of " in said
    assert ours.figures == fitted(Windows).figures


class AtTimes(Model):
    """Counts in a few batches, in which a rehearsal never falls."""

    def begin(self) -> None:
        self.count = 0

    def keep(self, rows: Any, labels: Any, logits: Any, loss: Any, batch_idx: int) -> None:
        if bool((rows > 50).any()):
            self.count += int((rows > 50).sum())


def test_what_no_rehearsal_ever_sees_is_warned_of_once() -> None:
    torch.manual_seed(0)
    model = AtTimes()
    rows = torch.randn(400, 8, generator=torch.Generator().manual_seed(1))
    rows[[15, 35, 75, 115, 155, 195, 235, 275]] = 60.0
    data = DataLoader(TensorDataset(rows, torch.arange(400) % 3), 20)
    trainer = make_trainer(max_epochs=1, strategy=dpx.DPXStrategy(execution="inline", verify="warn"), devices=2)
    with pytest.warns(UserWarning, match=r"self\.count changed in 6 batches and in no check") as caught:
        trainer.fit(model, data)
    assert sum("in no check" in str(one.message) for one in caught) == 1


class Confuses(Model):
    """A matrix that hooks of an evaluation make, in inference mode, and its steps add to in place."""

    def begin(self) -> None:
        self.of_run = torch.zeros(3, 3)
        self.matrices: list[list[float]] = []

    def on_validation_epoch_start(self) -> None:
        self.confusions = torch.zeros(3, 3, device=self.device)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rows, labels = batch
        found = self.net(rows).argmax(1)
        self.confusions.index_put_((labels, found), torch.ones(len(found), device=found.device), accumulate=True)
        one_hot = F.one_hot(labels, 3).float().T @ F.one_hot(found, 3).float()
        self.of_run = self.of_run.to(one_hot.device) + one_hot

    def on_validation_epoch_end(self) -> None:
        self.matrices.append([*self.confusions.flatten().tolist(), *self.of_run.flatten().tolist()])


@pytest.mark.parametrize(("own", "num_devices"), WAYS)
@pytest.mark.usefixtures("hardware")
def test_matrices_of_an_evaluation_are_those_of_one_device(own: Any, num_devices: int) -> None:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(45, 8, generator=generator), torch.randint(0, 3, (45,), generator=generator))
    loader = DataLoader(data, 10)

    def matrices(**options: Any) -> list[list[float]]:
        torch.manual_seed(0)
        model = Confuses()
        make_trainer(**options).fit(model, loader, loader)
        make_trainer(**options).validate(model, loader, verbose=False)
        return model.matrices

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = matrices(strategy=dpx.DPXStrategy(**own), devices=num_devices)
    assert ours == matrices()
    assert not [str(one.message) for one in caught if "not what it is" in str(one.message)]


class Banks(Model):
    """What a step keeps of each row at the row's own place, of zeros; two epochs write every place twice."""

    def begin(self) -> None:
        self.latest = torch.zeros(103, 3)
        self.averages = torch.zeros(103, 3)
        self.classes = torch.zeros(103, dtype=torch.long)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, places = batch
        logits = self.net(rows)
        found = logits.detach().softmax(1).cpu()
        at = places.cpu()
        self.latest[at] = found
        self.averages[at] = self.averages[at] * 0.7 + found * 0.3
        self.classes[at] = found.argmax(1)
        target = self.averages[at].to(logits.device)
        return F.cross_entropy(logits, places % 3) + (logits.softmax(1) - target).square().sum(1).mean()

    def kept(self) -> list[Any]:
        return [*self.latest.flatten(), *self.averages.flatten(), *self.classes]


@pytest.mark.parametrize(("own", "num_devices"), WAYS)
def test_banks_with_a_place_for_every_row_are_those_of_one_device(hardware: str, own: Any, num_devices: int) -> None:
    ours = fitted(Banks, torch.arange(103), strategy=dpx.DPXStrategy(**own), devices=num_devices, accelerator=hardware)
    torch.testing.assert_close(torch.tensor(ours.figures), torch.tensor(fitted(Banks, torch.arange(103)).figures))
