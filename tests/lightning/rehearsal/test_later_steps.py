"""Steps that do something else later on: as on one device, or announced and then as on one device."""

import random
import re
import threading
import warnings
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from tests.conftest import make_loader, make_trainer

WAYS = [
    pytest.param({"execution": "inline"}, 2, id="inline-2"),
    pytest.param({"execution": "threads"}, 3, id="threads-3"),
    pytest.param({"micro_batches": 2}, 1, id="micro-batches"),
]
ROWS = 13  # of a batch
WHOLE = "gets all of its batches whole"


class Model(LightningModule):
    """Rows (B, 8) to logits (B, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def kept(self) -> Any:
        """What is compared beside the weights."""


class AveragesLater(Model):
    """A teacher that follows from the fourth step on, written through .data, which no version counts."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 3).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch[0])
        if self.global_step >= 3:
            for parameter in self.teacher.parameters():
                parameter.data.mul_(0.9)
        return F.cross_entropy(logits, batch[1]) + F.mse_loss(logits, self.teacher(batch[0]))


class CopiesNowAndThen(Model):
    """A target network that is synchronized every fourth step."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step % 4 == 3:
            self.target.load_state_dict(self.net.state_dict())
        return self.loss(batch) + F.mse_loss(self.net(batch[0]), self.target(batch[0]))


class KeepsItsState(Model):
    """The hidden state of a batch's rows, used by the next step: truncated backpropagation through time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)
        self.state: torch.Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        state = self.cell(batch[0], self.state)
        self.state = state.detach()
        return F.cross_entropy(self.net(state), batch[1])


class BeginsAnew(KeepsItsState):
    """Its state is that of an epoch: the first step, run twice, uses nothing of itself."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 0:
            self.state = None
        return super().training_step(batch, batch_idx)


class BeginsAnewWithDropout(BeginsAnew):
    """What it keeps is of random draws."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, labels = batch
        return super().training_step([F.dropout(rows, 0.3), labels], batch_idx)


class Queue(Model):
    """Keys of the last batches in a ring, whose place is a buffer as well, as MoCo has them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(32, 3))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch[0])
        loss = torch.logsumexp(logits @ self.queue.clone().T, 1).mean()
        with torch.no_grad():
            place = int(self.place)
            length = min(len(logits), 32 - place)
            self.queue[place : place + length] = logits[:length]
            self.place[0] = 0 if length < len(logits) else place + length
        return loss


class SetsData(Model):
    """Data-dependent initialization in the sanity check, as layers of normalizing flows do it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.is_set = False

    def loss(self, batch: Any) -> torch.Tensor:
        if not self.is_set:
            self.scale.data = 1 / batch[0].std(0)
            self.is_set = True
        return F.cross_entropy(self.net(batch[0] * self.scale), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))


class PoolOfRows(Model):
    """Rows of the last batches, of which the oldest go: a loss with them from the second batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.hardest: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        self.hardest.extend(losses.tolist())
        self.hardest.sort(reverse=True)
        del self.hardest[20:]
        return losses.mean()


class LevelByRows(Model):
    """Each 30 rows raise a level, which the few rows of a check do not reach; the batch that reaches it is of it."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.num_seen = getattr(self, "num_seen", 0) + len(batch[0])
        return self.loss([batch[0] * (1 + self.num_seen // 30), batch[1]])

    def kept(self) -> Any:
        return self.num_seen


class LevelSoon(LevelByRows):
    """The next level is three rows behind those of a check."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.num_seen = getattr(self, "num_seen", 0) + len(batch[0])
        return self.loss([batch[0] * (1 + self.num_seen // 8), batch[1]])


class LevelInABuffer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.num_seen += len(batch[0])
        levels = [1.0, 1.5, 2.0, 2.5]  # as many as a run reaches
        return self.loss([batch[0] * levels[int(self.num_seen) // 30], batch[1]])


class LevelInAFloat(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_seen", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.num_seen += len(batch[0])
        return self.loss([batch[0] * (1 + float(self.num_seen) // 30), batch[1]])


class LevelOfWhatIsLeft(Model):
    """Steps take their rows from a count."""

    def __init__(self) -> None:
        super().__init__()
        self.num_left = 30

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.num_left -= len(batch[0])
        return self.loss([batch[0] * (2 if self.num_left <= 0 else 1), batch[1]])

    def kept(self) -> Any:
        return self.num_left


class LevelBesideADifference(LevelByRows):
    """What is told of the step has nothing to do with its level."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("median", batch[0].median())
        return super().training_step(batch, batch_idx)


class ByHand(Model):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class AveragesLaterByHand(ByHand, AveragesLater):
    """ByHand calls the step of the other class."""


class QueueByHand(ByHand, Queue):
    """Likewise."""


class SpreadByHand(ByHand):
    """A second term, which is no mean over rows, joins the loss; gradients are asked for many times a step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            if self.global_step >= 3:
                loss = loss + 0.01 * self.net(batch[0]).std()
            self.manual_backward(loss)
            return loss

        optimizer: Any = self.optimizers()
        optimizer.step(closure)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=10)


@pytest.mark.parametrize(("options", "devices"), WAYS)
@pytest.mark.parametrize(
    "kind",
    [
        AveragesLater, CopiesNowAndThen, KeepsItsState, BeginsAnew, BeginsAnewWithDropout, Queue, SetsData, LevelByRows,
        LevelInABuffer, LevelInAFloat, LevelOfWhatIsLeft, LevelBesideADifference, AveragesLaterByHand, QueueByHand,
    ],
)  # fmt: skip
def test_what_slices_cannot_do_later_lets_batches_whole_before_it_is_done(
    kind: type[Model], options: Any, devices: int
) -> None:
    expected, _ = fitted(kind)
    found, said = fitted(kind, devices, **options)
    assert WHOLE in said
    assert found == expected


def test_the_search_for_a_level_ends_where_it_is_three_rows_further_on() -> None:
    strategy = dpx.DPXStrategy(execution="inline")
    trainer = make_trainer(max_epochs=1, devices=2, strategy=strategy)
    with pytest.warns(UserWarning, match="It uses what it adds up in self.num_seen, .*: 3 further on, the loss is"):
        trainer.fit(LevelSoon(), make_loader(6, 6))


@pytest.mark.parametrize(("options", "devices"), WAYS)
def test_a_step_that_takes_items_out_of_a_list_is_left_to_one_device(options: Any, devices: int) -> None:
    found, said = fitted(PoolOfRows, devices, **options)
    assert "It takes items out of self.hardest, or puts others in their place, which every slice does" in said
    assert found == fitted(PoolOfRows)[0], "its loss does not use them"


class PenaltyAndMore(Model):
    """Takes gradients of its own, which no look without graphs can; later on a second term joins the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = batch[0].clone().requires_grad_()
        logits = self.net(rows)
        (gradient,) = torch.autograd.grad(logits.sum(), rows, create_graph=True)
        loss = F.cross_entropy(logits, batch[1]) + gradient.square().sum(1).mean()
        return loss + logits.mean(0).square().sum() if self.global_step >= 2 else loss


class Best(Model):
    """A running minimum: the mean of its slices the first time, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.best = float("inf")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.best = min(self.best, loss.item())
        return loss


class KeepsASpread(Model):
    """Keeps a mean over rows at first, and from the second batch on their spread; nothing else tells of it."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        first = batch[0][:, 0]
        self.noted = float(first.std() if self.global_step else first.mean())
        return self.loss(batch)


class EndsTheRun(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if batch[0][0, 0] > 0.5:  # as one row of a batch says, and so one slice
            self.trainer.should_stop = True
        return loss


class NotesOnItsTrainer(Model):
    """Counts its steps where Lightning keeps its own counts."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        trainer: Any = self.trainer
        trainer.seen = getattr(trainer, "seen", 0) + 1
        return self.loss(batch)


class FirstDraws(Model):
    """Draws nothing in the first epoch, and once for a batch in the second."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = batch[0] * random.random() if self.current_epoch else batch[0]
        return F.cross_entropy(self.net(rows), batch[1])


class DrawsFromAll(Model):
    """Draws from all generators in the second epoch, and keeps sums in tensors, which a batch enters once."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()
        self.average = torch.zeros(())
        self.total = torch.zeros(2)
        self.last_loss: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = batch[0]
        if self.current_epoch:
            rows = rows * (random.random() + np.random.rand()) + torch.rand(())
            rows = rows * torch.rand((), generator=self.generator)
        self.average = 0.9 * self.average + 1
        self.total += 1
        self.last_loss = F.cross_entropy(self.net(rows.to(batch[0])), batch[1])
        return self.last_loss

    def kept(self) -> Any:
        return float(self.average), self.total.tolist(), random.random(), np.random.rand()


class CountsPositions(Model):
    """Where some rows are among all of them, once there are some, which no slice knows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        places = torch.arange(len(batch[0]), device=self.device)
        if self.global_step < 2:
            places = places[:0]
        return {"loss": self.loss(batch), "places": places[1:] if places.numel() else places}


@pytest.mark.parametrize(("options", "devices"), WAYS)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (PenaltyAndMore, "The batches that were checked before had shown nothing of it"),
        (SpreadByHand, "The batches that were checked before had shown nothing of it"),
        (NotesOnItsTrainer, "trainer.seen is 1 on one device, "),
        (Best, "self.best comes together from slices in a first step, and not in a second"),
        (KeepsASpread, "self.noted comes together from slices no more"),
        (CountsPositions, "What its slices return cannot be put together"),
        (EndsTheRun, "It sets trainer.should_stop on some of its slices, and not on all"),
    ],
)
def test_what_comes_later_and_is_of_a_slice_is_told(kind: type[Model], text: str, options: Any, devices: int) -> None:
    assert text in fitted(kind, devices, **options)[1]


class RedrawsFeatures(Model):
    """Draws new features in every third batch, and keeps them for the others; evaluation draws them once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("features", torch.randn(8, 8))
        self.register_buffer("age", torch.tensor(0))
        self.of_evaluation: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.age += 1
        if self.age > 2:
            self.age.zero_()
            self.features.copy_(torch.randn(8, 8))
        return self.loss((batch[0] @ self.features, batch[1]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rows = batch[0]
        if batch_idx == 1:
            rows = rows * torch.rand(8, dtype=rows.dtype)
        self.log("val_loss", self.loss((rows, batch[1])))

    def on_validation_epoch_end(self) -> None:
        self.of_evaluation.append(self.trainer.callback_metrics["val_loss"].round(decimals=8))

    def kept(self) -> Any:
        return self.of_evaluation


@pytest.mark.parametrize(("options", "devices"), WAYS)
@pytest.mark.parametrize("kind", [FirstDraws, DrawsFromAll, RedrawsFeatures])
def test_the_batch_of_the_first_draws_is_run_again_on_one_device(
    kind: type[Model], options: Any, devices: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make_loader(9 * ROWS, ROWS)
    with caplog.at_level("INFO"):
        ours, said = fitted(kind, devices, loader, **options)
    assert ours == fitted(kind, loader=loader)[0]
    assert "gets a batch whole" in said
    assert "It draws random numbers in this batch, and drew none when it was checked." in said
    assert "unchecked" not in caplog.text


class DrawsBeside(Model):
    """While the step runs, another thread draws: as one that loads batches, or another run."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.draw = draw

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.current_epoch:
            beside = threading.Thread(target=self.draw)
            beside.start()
            beside.join()
        return self.loss(batch)


def drawn_a_few_times(draw: Callable[[], Any], number: int) -> Callable[[], Any]:
    times = count()
    return lambda: draw() if next(times) < number else None


@pytest.mark.parametrize(
    ("draw", "number"),
    [
        # These show in no operator, so the step must be seen to draw nothing when it runs again.
        pytest.param(random.random, 2, id="python"),
        pytest.param(np.random.rand, 2, id="numpy"),
        pytest.param(partial(torch.rand, 2), 99, id="torch"),
    ],
)
def test_draws_of_another_thread_are_not_taken_for_those_of_the_step(
    draw: Callable[[], Any], number: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = make_loader(9 * ROWS, ROWS)
    with caplog.at_level("INFO"):
        kind = partial(DrawsBeside, drawn_a_few_times(draw, number))
        ours, said = fitted(kind, 2, loader, execution="inline")
    assert ours == fitted(partial(DrawsBeside, int), loader=loader)[0]
    assert "gets a batch whole" not in said
    assert caplog.text.count("another thread draws random numbers while steps run") == 1


class SeedsLater(Model):
    """Seeds the generator in each step of its second epoch, and draws in the last one."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if not self.current_epoch:
            return self.loss(batch)
        torch.manual_seed(batch_idx)
        rows = batch[0]
        if batch_idx == 8:
            rows = rows * torch.rand((), dtype=rows.dtype)
        return self.loss((rows, batch[1]))


def test_a_step_that_seeds_a_generator_is_not_taken_for_another_thread(caplog: pytest.LogCaptureFixture) -> None:
    loader = make_loader(9 * ROWS, ROWS)
    with caplog.at_level("INFO"):
        ours, said = fitted(SeedsLater, 2, loader, execution="inline")
    assert ours == fitted(SeedsLater, loader=loader)[0]
    assert "gets a batch whole" in said
    assert "another thread draws" not in caplog.text


class DropsLater(Model):
    """Drops in its second epoch, in compiled code, which tells how many rows it had."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__()
        self.drop = torch.compile(nn.Dropout(0.5), backend=partial(told_rows, rows))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.current_epoch and batch_idx == 1:
            return self.loss((self.drop(batch[0]), batch[1]))
        return self.loss(batch)


def told_rows(rows: list[int], graph: Any, _: Any) -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        rows.append(max(len(value) for value in inputs if isinstance(value, torch.Tensor) and value.dim() == 2))
        return graph(*inputs)

    return run


def test_a_step_that_draws_in_compiled_code_runs_again_compiled() -> None:
    rows: list[int] = []
    loader = make_loader(9 * ROWS, ROWS)
    ours, said = fitted(partial(DropsLater, rows), 2, loader, execution="inline")
    assert "It draws random numbers in this batch, and drew none when it was checked." in said
    assert rows[:3] == [7, 6, ROWS]
    assert ours == fitted(partial(DropsLater, []), loader=loader)[0]


class ScalesInPlace(Model):
    """Scales its batch in place, once and at random: to run it again would be to scale it twice."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2 and not self.current_epoch:
            batch[0].mul_(0.5 + random.random())
        return self.loss(batch)


class ScalesAnArray(Model):
    """Likewise, in an array, which counts no writes."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2 and not self.current_epoch:
            batch[0][:] *= 0.5 + random.random()
        return self.loss((torch.from_numpy(batch[0][:, :8]), batch[1]))


def arrays(width: int) -> DataLoader[Any]:
    """Batches of an array (B, width), and classes."""
    items = [(np.ones((ROWS, width)), torch.arange(ROWS) % 3) for _ in range(4)]
    return DataLoader(items, batch_size=None, collate_fn=lambda item: (item[0].copy(), item[1]))


@pytest.mark.parametrize(
    ("kind", "loader"),
    [
        pytest.param(ScalesInPlace, None, id="tensor"),
        pytest.param(ScalesAnArray, arrays(8), id="small-array"),
        pytest.param(ScalesAnArray, arrays(2000), id="large-array"),
    ],
)
def test_a_batch_that_its_slices_have_written_is_not_run_again(
    kind: type[Model], loader: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        _, said = fitted(kind, 2, loader, execution="inline")
    assert "gets a batch whole" not in said
    assert "(random draws): that was put together unchecked there" in caplog.text


class KeepsRows(Model):
    """Smooths the rows of all batches, in tensors as large as a batch, and draws once."""

    def __init__(self, *, in_a_dict: bool) -> None:
        super().__init__()
        self.rows = torch.zeros(0)
        self.all_rows = {"rows": self.rows}
        self.in_a_dict = in_a_dict

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        smooth = torch.ones(1200) + 0.5 * (self.all_rows["rows"] if self.in_a_dict else self.rows).sum()
        if self.in_a_dict:
            self.all_rows["rows"] = smooth
        else:
            self.rows = smooth
        scale = random.random() if self.current_epoch and batch_idx == 1 else 1.0
        return scale * self.loss(batch)


@pytest.mark.parametrize("in_a_dict", [False, True])
def test_a_batch_after_which_the_module_cannot_be_put_back_is_not_run_again(
    in_a_dict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        _, said = fitted(partial(KeepsRows, in_a_dict=in_a_dict), 2, make_loader(9 * ROWS, ROWS), execution="inline")
    assert "gets a batch whole" not in said
    assert "(random draws): that was put together unchecked there" in caplog.text


class Prunes(Model):
    """A pruned layer puts its weights together in every call, in evaluation as well."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            prune.l1_unstructured(self.net[0], "weight", 0.5)


def test_every_stage_of_a_module_that_has_got_other_parts_is_checked_anew(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(devices=2, strategy=dpx.DPXStrategy(execution="inline"))
    trainer.fit(Prunes(), make_loader(ROWS, ROWS), make_loader(4 * ROWS, ROWS))
    assert "validation_step has done more" not in caplog.text


class KeepsTheLastLoss(Model):
    """No step follows in which it could be seen."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if self.trainer.is_last_batch:
            self.last_loss = loss.item()
        return loss


def test_what_the_last_step_of_a_run_does_for_the_first_time_is_told(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(max_epochs=1, devices=2, strategy=dpx.DPXStrategy(execution="inline"))
    trainer.fit(KeepsTheLastLoss(), make_loader(3 * ROWS, ROWS))
    assert "training_step has done more in the last batch than when it was checked (self.last_loss)" in caplog.text


class Mixes(Model):
    """As people mix rows: one number and one permutation for a batch, of which no slice can have a part."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        share = np.random.beta(1.0, 1.0)
        self.shares.append(share)
        order = torch.randperm(len(batch[0]))
        logits = self.net(share * batch[0] + (1 - share) * batch[0][order])
        return share * F.cross_entropy(logits, batch[1]) + (1 - share) * F.cross_entropy(logits, batch[1][order])

    def on_fit_start(self) -> None:
        self.shares: list[float] = []

    def kept(self) -> Any:
        return [round(share, 9) for share in self.shares]


class SumsFromZero(Model):
    """A sum of floats that begins at an integer."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.by_epoch: dict[int, list[float]] = {}
        self.window: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.total += loss.item() * len(batch[0])
        self.by_epoch.setdefault(self.current_epoch, []).append(loss.item())
        self.window.append(loss.item())
        if len(self.window) > 3:
            self.window.pop(0)
        return loss

    def kept(self) -> Any:
        lists = [*self.by_epoch.values(), self.window]
        return round(self.total, 5), [[round(value, 6) for value in values] for values in lists]


class LevelOfTheRowsBefore(Model):
    """The level is that of the rows before the batch, which every slice knows."""

    def __init__(self) -> None:
        super().__init__()
        self.num_seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss([batch[0] * (1 + self.num_seen // 30), batch[1]])
        self.num_seen += len(batch[0])
        return loss

    def kept(self) -> Any:
        return self.num_seen


class LevelBeyondTheRun(Model):
    """A level begins long after the run has ended."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.num_seen = getattr(self, "num_seen", 0) + len(batch[0])
        return self.loss([batch[0] * (1 + self.num_seen // 100_000), batch[1]])

    def kept(self) -> Any:
        return self.num_seen


class CountsFromNothing(Model):
    """The first step makes a count, a sum in a tensor, and a number that each step sets anew."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.num_seen = getattr(self, "num_seen", 0) + len(batch[0])
        self.of_columns = getattr(self, "of_columns", 0) + batch[0].detach().sum(0)
        self.num_rows = len(batch[0])
        return self.loss(batch)

    def kept(self) -> Any:
        return self.num_seen, [round(value, 4) for value in self.of_columns.tolist()], self.num_rows


class Freezes(Model):
    """A step freezes a layer, and thaws it again, in the middle of a run."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if self.global_step in (2, 5):
            self.net[0].requires_grad_(self.global_step == 5)
        return loss


@pytest.mark.parametrize(("options", "devices"), WAYS)
@pytest.mark.parametrize("kind", [SumsFromZero, CountsFromNothing, LevelOfTheRowsBefore, LevelBeyondTheRun, Freezes])
def test_what_goes_on_from_step_to_step_is_that_of_one_device(kind: type[Model], options: Any, devices: int) -> None:
    found, said = fitted(kind, devices, **options)
    assert found == fitted(kind)[0]
    assert not said


def test_what_is_drawn_once_stays_so_beside_draws_that_mix_rows() -> None:
    assert fitted(Mixes, 2, execution="inline")[0][1] == fitted(Mixes)[0][1]


class Hardest(Model):
    """A loss of the eight hardest rows: no slice may have fewer."""

    def loss(self, batch: Any) -> torch.Tensor:
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return losses.mean() + 0 * losses.topk(8).values.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))

    def kept(self) -> Any:
        return round(self.trainer.callback_metrics["loss"].item(), 8)


class HardestByHand(ByHand, Hardest):
    """The same with an optimizer that it steps itself."""


@pytest.mark.parametrize(("options", "devices"), WAYS)
@pytest.mark.parametrize("kind", [Hardest, HardestByHand])
def test_a_last_batch_whose_slices_are_too_small_for_the_step_stays_whole(
    kind: type[Model], options: Any, devices: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    loader = make_loader(3 * 24 + 14, 24)
    found, said = fitted(kind, devices, loader, **options)
    assert re.search(r"A slice would have [47] rows\. ", said), "14 rows in two slices or three"
    assert WHOLE not in said, "the others are cut"
    assert "could not be looked at again" not in caplog.text
    assert found == fitted(kind, loader=loader)[0]


def fitted(
    kind: type[Model], devices: int = 0, loader: DataLoader[Any] | None = None, **options: Any
) -> tuple[Any, str]:
    """The weights and what the model has kept, and what was warned of; on one device unless there are ``devices``."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = kind()
    where = {"strategy": dpx.DPXStrategy(**options), "devices": devices} if devices else {}
    loader = loader or make_loader(4 * ROWS, ROWS)
    trainer = make_trainer(max_epochs=2, precision="64-true", num_sanity_val_steps=1, **where)
    evaluates = type(model).validation_step is not LightningModule.validation_step
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, loader, loader if evaluates else None)
    weights = {
        name: [round(number, 8) for number in value.double().flatten().tolist()]
        for name, value in model.state_dict().items()
    }
    said = "\n".join(str(one.message) for one in caught if "dpx: " in str(one.message))
    return (weights, model.kept()), said


class Branches(Model):
    """An adversary that is trained only while its loss is above a bound, which slices see each for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.adversary = nn.Linear(8, 1)
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        mine, other = self.optimizers()
        score = F.softplus(self.adversary(batch[0])).mean()
        if score > 0.55:
            other.zero_grad()
            self.manual_backward(score)
            other.step()
        mine.zero_grad()
        self.manual_backward(self.loss(batch))
        mine.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1), torch.optim.SGD(self.adversary.parameters(), lr=0.5)

    def kept(self) -> Any:
        return self.steps


@pytest.mark.parametrize(("options", "devices"), WAYS)
def test_slices_that_do_not_agree_on_what_to_do_begin_their_step_anew_as_one_batch(options: Any, devices: int) -> None:
    found, said = fitted(Branches, devices, **options)
    assert WHOLE in said
    assert found == fitted(Branches)[0]


class NowAndThen(Model):
    """Every so many batches it does more than in the first one."""

    every = 0

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []
        self.rows: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if batch_idx % self.every == self.every - 1:
            self.history.append(loss.item())
            self.log("rows", float(len(batch[0])))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.every == self.every - 1:
            self.rows.append(float(self.trainer.callback_metrics["rows"]))


class InTheSecond(NowAndThen):
    """As a GAN that trains its generator in every second batch."""

    every = 2


class InTheFifth(NowAndThen):
    """As a GAN whose critic takes five steps for one of its generator."""

    every = 5


@pytest.mark.parametrize("kind", [InTheSecond, InTheFifth])
@pytest.mark.parametrize(("options", "devices"), WAYS)
@pytest.mark.filterwarnings("ignore:The training_step writes Python state that its replicas share")
@pytest.mark.filterwarnings("ignore:dpx. training_step gets a batch whole")
def test_what_a_step_does_in_every_so_many_batches_is_checked_in_one_of_them(
    kind: type[NowAndThen], options: Any, devices: int
) -> None:
    def run(**options: Any) -> NowAndThen:
        torch.manual_seed(0)
        model = kind()
        make_trainer(max_epochs=1, **options).fit(model, make_loader(20 * ROWS, ROWS))
        return model

    ours = run(strategy=dpx.DPXStrategy(**options), devices=devices)
    theirs = run()
    # The first such batch in which nobody looks runs again whole.
    assert ours.rows == theirs.rows
    assert ours.history == pytest.approx(theirs.history, rel=1e-5)


class CountsSteps(Model):
    """It empties a count in a step, now and then, and notes when: no step before has appended anything."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0
        self.begun: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.num_steps += 1
        if self.num_steps == 3:
            self.num_steps = 0
            self.begun.append(self.global_step)
        return self.loss(batch)

    def kept(self) -> Any:
        return self.begun


class NotesLargeSteps(Model):
    """A dict of many items, which a whole batch could not be given as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0
        self.notes = dict.fromkeys(range(-100, 0), 0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.num_steps += 1
        if self.num_steps == 3:
            self.notes[self.global_step] = self.notes.get(self.global_step, 0) + 1
        return self.loss(batch)


@pytest.mark.parametrize(("options", "devices"), WAYS)
def test_a_list_that_first_grows_in_a_later_batch_grows_by_that_batch(options: Any, devices: int) -> None:
    """Every slice appended, until a check saw it: [2, 2, 5, 8] in place of [2, 5, 8]."""
    found, said = fitted(CountsSteps, devices, **options)
    assert found == fitted(CountsSteps)[0]
    assert "It writes self.begun in this batch, and wrote nothing there when it was checked" in said


def test_a_large_dict_that_first_grows_in_a_later_batch_is_told_and_not_written_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        _, said = fitted(NotesLargeSteps, 2, execution="inline")
    assert "gets a batch whole" not in said
    assert "has done more in the last batch than when it was checked (self.notes)" in caplog.text


class CountsSome(Model):
    """A mean over rows that are marked, which one slice alone has in the first rows."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def kept(self) -> list[float]:
        return self.losses

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows, labels = batch
        counted = rows[:, 0] > 0
        if not bool(counted.any()):
            return self.net(rows).sum() * 0
        return F.cross_entropy(self.net(rows[counted]), labels[counted])


def make_marked_loader(first: list[int], later: list[int]) -> DataLoader[Any]:
    """Three batches of 13 rows, of which those at these places are marked, in the first one and in all others."""
    rows = torch.randn(39, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows[:, 0] = -1.0
    rows[first, 0] = 1.0
    for batch in (1, 2):
        rows[[13 * batch + place for place in later], 0] = 1.0
    return DataLoader(TensorDataset(rows, torch.arange(39) % 3), 13)


@pytest.mark.parametrize(("options", "devices"), WAYS)
def test_a_mean_over_rows_of_one_slice_is_not_taken_for_a_sum(options: Any, devices: int) -> None:
    """Where the rows that are taken first show no other, more rows do."""
    loader = make_marked_loader([0, 7, 8, 9, 10, 12], [1, 4, 6, 8, 11, 12])
    said = fitted(CountsSome, devices, loader, **options)[1]
    assert "the loss is " in said
    assert "The batches that were checked before had shown nothing of it" not in said


@pytest.mark.parametrize(("options", "devices"), WAYS)
def test_a_loss_that_one_slice_alone_has_in_a_batch_is_decided_by_the_next(options: Any, devices: int) -> None:
    loader = make_marked_loader([0], [1, 4, 6, 8, 11, 12])
    (_, found), said = fitted(CountsSome, devices, loader, **options)
    wanted = fitted(CountsSome, 0, loader)[0][1]
    assert "the loss is " in said
    # Taken for a sum it would be twice as large, or three times.
    assert found[:3] == pytest.approx(wanted[:3], rel=0.1)
