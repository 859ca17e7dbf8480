"""What a step changes outside its module is put back and can be compared."""

from typing import Any

import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_dpx.lightning.rehearsal.surroundings import Surroundings, is_small_container
from tests.conftest import make_trainer

COUNTS = {"steps": 0}


class Counts(Callback):
    def __init__(self) -> None:
        self.number = 0
        self.seen: list[int] = []


class Totals:
    rows = 0
    largest: dict[str, int] = {}  # noqa: RUF012  of the class, as users have them


def note_rows(number: int) -> None:
    Totals.rows += number
    Totals.largest["rows"] = max(number, Totals.largest.get("rows", 0))


class Module(nn.Module):
    calls: list[int] = []  # noqa: RUF012  of the class, as users have them

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        COUNTS["steps"] += 1
        self.calls.append(1)
        note_rows(len(rows))
        return rows


def test_callbacks_classes_and_globals_are_what_they_were() -> None:
    callback, module = Counts(), Module()
    trainer: Any = make_trainer(callbacks=[callback])
    surroundings = Surroundings(trainer, module)
    before = {path: repr(value) for path, value in surroundings.values()}
    seen = callback.seen
    callback.number = 1
    callback.seen.append(1)
    callback.extra = 1
    module(torch.ones(1))
    now = {path: repr(value) for path, value in surroundings.values()}
    assert {path for path, value in now.items() if before.get(path) != value} == {
        "trainer.callbacks[0].number", "trainer.callbacks[0].seen", "trainer.callbacks[0].extra", "COUNTS",
        "Module.calls", "Totals.rows", "Totals.largest",
    }  # fmt: skip
    surroundings.restore()
    assert (callback.number, callback.seen, hasattr(callback, "extra")) == (0, [], False)
    assert callback.seen is seen
    assert (COUNTS, Module.calls) == ({"steps": 0}, [])
    assert (Totals.rows, Totals.largest) == (0, {})


def test_only_small_containers_of_python_s_own_are_kept() -> None:
    assert is_small_container([1])
    assert not is_small_container([0] * 10_001)
    assert not is_small_container((1,))
    assert not is_small_container(torch.ones(1))
