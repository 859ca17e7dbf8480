"""Iterators that a module holds advance once in a step of several replicas, as on one device."""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader

import lightning_dpx as dpx
from tests.conftest import StepsByHand, assert_equal, make_loader, make_trainer

pytestmark = pytest.mark.usefixtures("hardware")


def more_rows() -> list[torch.Tensor]:
    """Ten batches of three rows."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(3, 8, generator=generator) for _ in range(10)]


class TakesMore(LightningModule):
    """A second loss on rows that the step takes from an iterator, and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.rows = more_rows()

    def more(self) -> torch.Tensor:
        return next(self.extra)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        extra = self.more().to(self.device).mul_(2)
        self.log("first", extra[0, 0])
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1]) + self.net(extra).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        assert type(self.__dict__.get("extra", iter([]))).__module__ != "lightning_dpx.replicas.shared_iterators"


class OfAList(TakesMore):
    def on_train_start(self) -> None:
        self.extra = iter([rows.clone() for rows in self.rows])


class OfItsDevice(TakesMore):
    def on_train_start(self) -> None:
        self.extra = iter([rows.to(self.device, copy=True) for rows in self.rows])


class MadeInTheStep(TakesMore):
    """As people write who mix two loaders by hand; the loader ends in the middle."""

    def more(self) -> torch.Tensor:
        try:
            return next(self.extra)
        except (AttributeError, StopIteration):
            self.extra = iter(DataLoader(torch.cat(self.rows[:2]), batch_size=3))
            return next(self.extra)


class InADict(TakesMore):
    def __init__(self) -> None:
        super().__init__()
        self.loaders = {"labeled": None, "extra": iter([rows.clone() for rows in self.rows])}

    def more(self) -> torch.Tensor:
        return next(self.loaders["extra"]) + next(self.loaders["extra"])


class Endless(Iterator[torch.Tensor]):
    """Begins again at its end."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.rows, self.place = rows, -1

    def __next__(self) -> torch.Tensor:
        self.place = (self.place + 1) % len(self.rows)
        return self.rows[self.place].clone()


class OwnClass(TakesMore):
    def __init__(self) -> None:
        super().__init__()
        self.extra = Endless(self.rows[:3])

    def more(self) -> torch.Tensor:
        assert isinstance(self.extra, Endless)
        rows = next(self.extra)
        self.log("place", float(self.extra.place))
        return rows


class Mixer:
    """Takes from an iterator of its own."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.streams = {"rows": iter(rows)}
        self.count = iter(range(100))

    def sample(self) -> torch.Tensor:
        return next(self.streams["rows"]) * (1 + next(self.count))


class InAnObject(TakesMore):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = Mixer([])

    def on_train_start(self) -> None:
        self.mixer.streams["rows"] = iter([rows.clone() for rows in self.rows])

    def more(self) -> torch.Tensor:
        return self.mixer.sample()


class Looks(TakesMore):
    """Hooks take items, too, and in a loop."""

    def on_train_start(self) -> None:
        self.extra = iter([rows.clone() for rows in self.rows])

    def on_train_batch_start(self, *_: Any) -> None:
        next(self.extra)

    def more(self) -> torch.Tensor:
        return sum(itertools.islice(self.extra, 2))


class ByHand(StepsByHand, OfAList):
    pass


class ByHandWithTheWholeBatch(ByHand):
    """What replicas cannot follow shows after the step has taken an item."""

    def on_after_backward(self) -> None:
        """Nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        torch.optim.SGD(self.parameters(), lr=0.01).step()


class OfAGenerator(TakesMore):
    """Cannot be copied, so a rehearsal cannot take from it."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = (rows.clone() for rows in self.rows)


COUNTS = itertools.count()


class OfItsFile(TakesMore):
    """A global, of which there is one for all runs."""

    def on_train_start(self) -> None:
        global COUNTS
        COUNTS = itertools.count()

    def more(self) -> torch.Tensor:
        return self.rows[next(COUNTS)].clone()


class OfItsClass(TakesMore):
    counts: Iterator[int] = iter(())

    def on_train_start(self) -> None:
        type(self).counts = iter(range(10))

    def more(self) -> torch.Tensor:
        return self.rows[next(self.counts)].clone()


class BesideItsRows(OfAGenerator):
    """What it takes belongs to the rows of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = torch.cat([batch[0], self.more().to(self.device)])
        return self.net(rows).square().mean()


SHARED = [OfAList, OfItsDevice, MadeInTheStep, InADict, InAnObject, OwnClass, Looks, ByHand]


def trained(kind: type[LightningModule], **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = kind()
    trainer = make_trainer(max_epochs=1, **options)
    trainer.fit(model, make_loader(37))  # the last batch is for one replica alone
    seen = {**model.state_dict(), **trainer.callback_metrics}
    return {name: value.detach().cpu().clone() for name, value in seen.items()}


@cache
def of_one_device(kind: type[LightningModule]) -> dict[str, torch.Tensor]:
    return trained(kind)


@pytest.mark.parametrize("kind", [OfItsFile, OfItsClass])
@pytest.mark.parametrize(("num_replicas", "execution"), [(3, "inline"), (2, "threads")])
def test_items_of_globals_and_classes_are_shared_where_nothing_is_rehearsed(kind, num_replicas, execution) -> None:
    strategy = dpx.DPXStrategy(execution=execution, verify="off")
    assert_equal(trained(kind, strategy=strategy, devices=num_replicas), of_one_device(kind))
    assert type(COUNTS) is itertools.count
    assert type(OfItsClass.counts) in (type(iter(())), type(iter(range(1))))


@pytest.mark.filterwarnings("ignore:The training_step draws random numbers")  # a loader that is begun does
@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize(("num_replicas", "execution", "verify"), [(3, "inline", "raise"), (2, "threads", "off")])
def test_all_replicas_take_the_items_that_one_device_takes(kind, num_replicas, execution, verify) -> None:
    strategy = dpx.DPXStrategy(execution=execution, verify=verify)
    assert_equal(trained(kind, strategy=strategy, devices=num_replicas), of_one_device(kind))


@pytest.mark.parametrize("kind", [OfAGenerator, BesideItsRows, OfItsFile, OfItsClass])
@pytest.mark.parametrize(("num_replicas", "execution"), [(3, "inline"), (2, "threads")])
def test_where_no_item_can_be_given_back_one_replica_takes_the_whole_batch(kind, num_replicas, execution) -> None:
    with pytest.warns(UserWarning, match=r"all of its batches whole.*takes items of [\w.]+, .*CombinedLoader"):
        ours = trained(kind, strategy=dpx.DPXStrategy(execution=execution), devices=num_replicas)
    assert_equal(ours, of_one_device(kind))


@pytest.mark.filterwarnings("ignore:dpx. training_step gets all of its batches whole")
def test_a_step_that_is_taken_again_takes_the_same_items() -> None:
    ours = trained(ByHandWithTheWholeBatch, strategy=dpx.DPXStrategy(execution="inline", verify="off"), devices=2)
    assert_equal(ours, of_one_device(ByHandWithTheWholeBatch))


@pytest.mark.filterwarnings("ignore:dpx. training_step gets all of its batches whole")
@pytest.mark.parametrize("kind", [OfAList, OfAGenerator, OfItsFile, ByHand])
@pytest.mark.parametrize(("num_replicas", "workload"), [(1, "even"), (2, "even"), (2, [1, 2])])
def test_a_profile_of_the_first_step_takes_nothing_from_it(kind, num_replicas, workload) -> None:
    strategy = dpx.DPXStrategy(execution="inline", memory_budget="1GiB", workload=workload)
    assert_equal(trained(kind, strategy=strategy, devices=num_replicas), of_one_device(kind))


class WeighsInTurn(LightningModule):
    """Takes its weight from a cycle, and sometimes leaves a note, which has the batch run again whole."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.weights = itertools.cycle([0.5, 1.0, 2.0])
        self.noted: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        weight = next(self.weights)
        if self.global_step == 2:
            self.noted.append(weight)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1]) * weight

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("options", [{"devices": 2}, {"devices": 1, "micro_batches": 2}], ids=str)
def test_a_cycle_goes_on_where_a_batch_runs_again(options: dict[str, Any]) -> None:
    """In its first round it came to its end: no error, as Lightning takes it for the end of the data."""
    strategy = dpx.DPXStrategy(execution="inline", micro_batches=options.get("micro_batches", 1))
    found = []
    for where in ({}, {"strategy": strategy, "devices": options["devices"]}):
        torch.manual_seed(0)
        model = WeighsInTurn()
        trainer = make_trainer(max_epochs=2, **where)
        with pytest.warns(UserWarning, match="It writes self.noted in this batch") if where else nullcontext():
            trainer.fit(model, make_loader())
        found.append({**model.state_dict(), "steps": torch.tensor(trainer.global_step)})
        assert model.noted == [2.0]
    assert_equal(found[1], found[0])


class Lines:
    """An iterator of the user's, with a list of what was wrong."""

    def __init__(self) -> None:
        self.complaints: list[int] = []

    def __iter__(self) -> "Lines":
        return self

    def __next__(self) -> str:
        raise StopIteration


class Complains(LightningModule):
    """Leaves a note with an iterator that it takes nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.lines = Lines()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == 2:
            self.lines.complaints.append(batch_idx)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_a_step_leaves_with_an_iterator_is_there_once() -> None:
    model = Complains()
    with pytest.warns(UserWarning, match=r"It writes self\.lines in this batch"):
        make_trainer(max_epochs=1, strategy=dpx.DPXStrategy(execution="inline"), devices=2).fit(model, make_loader())
    assert model.lines.complaints == [2]
