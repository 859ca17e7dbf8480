"""A count of steps that decides what steps do is seen wherever it is kept: named, or as on one device at once."""

import array
import ctypes
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from tests.conftest import make_loader, make_trainer


class Called:
    """A schedule as libraries have it: an object that is called."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


class ListWithACount(list[int]):
    count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


class InAnArray:
    def __init__(self) -> None:
        self.counts = array.array("l", [0])

    def __call__(self) -> int:
        self.counts[0] += 1
        return self.counts[0]


class BytesWithACount(bytearray):
    count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


class PartialWithACount(functools.partial[int]):
    count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


class InANumberOfC:
    def __init__(self) -> None:
        self.count = ctypes.c_int(0)

    def __call__(self) -> int:
        self.count.value += 1
        return self.count.value


def closure() -> Callable[[], int]:
    count = 0

    def call() -> int:
        nonlocal count
        count += 1
        return count

    return call


def with_attribute() -> Callable[[], int]:
    def call() -> int:
        call.count += 1  # type: ignore[attr-defined]
        return call.count  # type: ignore[attr-defined, no-any-return]

    call.count = 0  # type: ignore[attr-defined]
    return call


def with_default() -> Callable[[], int]:
    def call(counts: list[int] = [0]) -> int:  # noqa: B006
        counts[0] += 1
        return counts[0]

    return call


class InItsClass:
    """Keeps nothing itself."""

    count = 0

    def __call__(self) -> int:
        InItsClass.count += 1
        return InItsClass.count


class BehindAReference:
    """Refers weakly to what a list of its class keeps alive."""

    alive: list[Called] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.alive[:] = [Called()]
        self.reference = weakref.ref(self.alive[0])

    def __call__(self) -> int:
        counted = self.reference()
        assert counted is not None
        return counted()


class ByObject:
    """Counts by objects that have no name."""

    def __init__(self) -> None:
        self.key = Called()
        self.counts = {self.key: 0}

    def __call__(self) -> int:
        self.counts[self.key] += 1
        return self.counts[self.key]


class ByObjectWeakly(ByObject):
    def __init__(self) -> None:
        super().__init__()
        self.counts = weakref.WeakKeyDictionary({self.key: 0})  # type: ignore[assignment]


COUNTED = Called()


class Decays(LightningModule):
    """Sets its own learning rate, by how often its schedule was called."""

    def __init__(self, make_schedule: Callable[[], Any]) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)
        self.schedule = make_schedule()

    def next_count(self) -> int:
        count: int = self.schedule()
        return count

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        optimizer: Any = self.optimizers()
        optimizer.param_groups[0]["lr"] = 0.1 / self.next_count()
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class DecaysByAGlobal(Decays):
    def next_count(self) -> int:
        return COUNTED()


def fitted(kind: type[Decays], schedule: Callable[[], Any], **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    COUNTED.count = 0
    InItsClass.count = 0
    model = kind(schedule)
    where = {"devices": 2, "strategy": dpx.DPXStrategy(execution="inline", **options)} if options else {}
    make_trainer(max_epochs=1, **where).fit(model, make_loader(32, 8))
    return model.net.weight.detach()


KINDS = [
    (Decays, Called, "self.schedule.count is 1 on one device, 2 in slices"),
    (Decays, Slotted, "self.schedule.count is 1 on one device, 2 in slices"),
    (Decays, ListWithACount, "self.schedule.count is 1 on one device, 2 in slices"),
    (Decays, InAnArray, "self.schedule.counts.items.0 is 1 on one device, 2 in slices"),
    (Decays, InANumberOfC, "self.schedule.count.bytes is"),
    (Decays, lambda: Called().__call__, "self.schedule.__self__.count is 1 on one device, 2 in slices"),
    (Decays, lambda: functools.partial(Called()), "self.schedule.count is 1 on one device, 2 in slices"),
    (Decays, BytesWithACount, "self.schedule.count is 1 on one device, 2 in slices"),
    (Decays, lambda: PartialWithACount(int), "self.schedule.count is 1 on one device, 2 in slices"),
    (Decays, closure, "self.schedule.count is 1 on one device, 2 in slices"),
    (Decays, with_attribute, "self.schedule.count is 1 on one device, 2 in slices"),
    (Decays, with_default, "self.schedule.counts.0 is 1 on one device, 2 in slices"),
    (Decays, ByObject, "self.schedule.counts.Called 0 is 1 on one device, 2 in slices"),
    (Decays, ByObjectWeakly, "self.schedule.counts.Called 0 is 1 on one device, 2 in slices"),
    (Decays, InItsClass, "InItsClass.count is 1 on one device, 2 in slices"),
    (Decays, BehindAReference, "BehindAReference.alive.0.count is 1 on one device, 2 in slices"),
    (DecaysByAGlobal, Called, "COUNTED.count is 1 on one device, 2 in slices"),
]


@pytest.mark.parametrize(("kind", "schedule", "text"), KINDS)
def test_a_count_of_slices_is_named(kind: type[Decays], schedule: Callable[[], Any], text: str) -> None:
    with pytest.warns(UserWarning, match="is not what it is on one device") as told:
        fitted(kind, schedule, verify="warn")
    assert any(text in str(one.message) for one in told)


@pytest.mark.parametrize(("kind", "schedule", "text"), KINDS)
def test_with_verify_first_it_counts_as_on_one_device(
    kind: type[Decays], schedule: Callable[[], Any], text: str
) -> None:
    del text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        ours = fitted(kind, schedule, verify="first")
    torch.testing.assert_close(ours, fitted(kind, schedule))
