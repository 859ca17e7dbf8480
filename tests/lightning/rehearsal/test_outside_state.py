"""What a step changes outside its module is put back and can be compared."""

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import Dataset, Subset

from lightning_dpx.lightning.rehearsal.comparison.observation import state_outside
from lightning_dpx.lightning.rehearsal.outside_state import Surroundings, is_small_container
from tests import helpers
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


class MakesAGlobal(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        global center
        if "center" not in globals():
            center = rows.mean(0)
        return rows - center


def test_a_global_that_a_step_makes_is_seen_and_taken_away() -> None:
    trainer: Any = make_trainer()
    module = MakesAGlobal()
    surroundings = Surroundings(trainer, module)
    assert "center" not in dict(surroundings.values())
    module(torch.ones(2, 3))
    assert torch.equal(dict(surroundings.values())["center"], torch.ones(3))
    surroundings.restore()
    assert "center" not in globals()


def test_what_python_keeps_of_a_file_is_no_state_of_a_step() -> None:
    surroundings = Surroundings(make_trainer(), MakesAGlobal())
    before = [path for path, _ in surroundings.values()]
    globals()["__warningregistry__"] = {"shown": True}  # as a warning of the step leaves it
    try:
        assert [path for path, _ in surroundings.values()] == before
        surroundings.restore()
        assert globals()["__warningregistry__"] == {"shown": True}
    finally:
        del globals()["__warningregistry__"]


def test_what_a_step_keeps_on_its_trainer_is_seen_and_put_back() -> None:
    trainer: Any = make_trainer(callbacks=[Counts()])
    losses = trainer.losses = [torch.ones(1)]
    surroundings = Surroundings(trainer, Module())
    trainer.losses.append(torch.zeros(1))
    trainer.rows = 3
    trainer.callbacks = []  # as a rehearsal exchanges them
    now = dict(surroundings.values())
    assert (now["trainer.rows"], len(now["trainer.losses"])) == (3, 2)
    surroundings.restore()
    assert trainer.losses is losses
    assert losses == [torch.ones(1)]
    assert not hasattr(trainer, "rows")
    assert trainer.callbacks == [], "what holds objects is Lightning's"


NESTED: dict[str, Any] = {"a": {"b": [0]}}
SUM = torch.zeros(2)
num_draws = 0


def make_counter() -> Callable[[], int]:
    count = 0

    def call() -> int:
        nonlocal count
        count += 1
        return count

    return call


counter = make_counter()


def appends_to_its_default(seen: list[int] = []) -> int:  # noqa: B006  as users have them
    seen.append(1)
    return len(seen)


@lru_cache
def drawn_once(size: int) -> torch.Tensor:
    global num_draws
    num_draws += 1
    return torch.rand(size)


class Holder:
    def __init__(self) -> None:
        self.inner = {"rows": [np.zeros(2)]}


HOLDER = Holder()


class Reaching(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        NESTED["a"]["b"].append(1)
        NESTED["new"] = rows
        SUM.add_(1)
        HOLDER.inner["rows"][0] += 1
        drawn_once(len(rows))
        helpers.note()
        return rows + counter() + appends_to_its_default()


def reached() -> Any:
    default: Any = appends_to_its_default.__defaults__
    return copy.deepcopy((NESTED, SUM.tolist(), HOLDER.inner, default, num_draws, helpers.SEEN))


def test_what_the_code_names_is_put_back_through_containers_objects_closures_and_tensors() -> None:
    trainer: Any = make_trainer()
    helpers.forget()
    before = repr(reached())
    number = counter()
    surroundings = Surroundings(trainer, Reaching())
    for _ in range(2):
        Reaching()(torch.ones(1))
        assert repr(reached()) != before
        surroundings.restore()
        assert repr(reached()) == before
    assert drawn_once.cache_info().currsize == 0
    assert counter() == number + 1


def test_results_that_a_function_had_kept_before_stay() -> None:
    kept = drawn_once(3)
    surroundings = Surroundings(make_trainer(), Reaching())
    Reaching()(torch.ones(1))
    surroundings.restore()
    assert drawn_once(3) is kept
    drawn_once.cache_clear()


class Meter:
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rows = 0


class Records(Callback):
    def __init__(self) -> None:
        self.meter = Meter()
        self.by_batch: dict[int, list[float]] = {0: []}
        self.bank = np.zeros(3)
        self.sums = torch.zeros(3)

    def note(self) -> None:
        self.meter.losses.append(1.0)
        self.meter.rows += 1
        self.by_batch[0].append(1.0)
        self.bank[0] += 1
        self.sums += 1

    def held(self) -> Any:
        return copy.deepcopy((vars(self.meter), self.by_batch, self.bank.tolist(), self.sums.tolist()))


class Rows(Dataset[int]):
    def __init__(self) -> None:
        self.records = Records()
        self.seen: list[tuple[int, str]] = []

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 4


class HoldsData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = Rows()
        self.parts = {"first": Subset(Rows(), [0, 1])}


def test_what_lies_behind_attributes_of_callbacks_and_data_sets_is_seen_and_put_back() -> None:
    callback, module = Records(), HoldsData()
    subset: Any = module.parts["first"].dataset
    trainer: Any = make_trainer(callbacks=[callback])
    trainer.history = [{"loss": 1.0}]
    surroundings = Surroundings(trainer, module)
    every = [callback, module.rows.records, subset.records]
    before = ([one.held() for one in every], state_outside(surroundings.values()))
    for one in every:
        one.note()
    for data in (module.rows, subset):
        data.seen.append((1, "a"))
    trainer.history.append({"loss": 2.0})
    now = state_outside(surroundings.values())
    changed = {path for path, value in now.items() if repr(value) != repr(before[1][path])}
    assert changed == {
        "@trainer.callbacks[0].meter", "@trainer.callbacks[0].by_batch", "@trainer.callbacks[0].bank",
        "@trainer.callbacks[0].sums", "@trainer.history", "@self.rows.records", "@self.rows.seen",
        "@self.parts['first'].dataset.records", "@self.parts['first'].dataset.seen",
    }  # fmt: skip
    surroundings.restore()
    assert [one.held() for one in every] == before[0]
    assert module.rows.seen == subset.seen == []
    assert trainer.history == [{"loss": 1.0}]


def test_only_small_containers_of_python_s_own_are_kept() -> None:
    assert is_small_container([1])
    assert not is_small_container([0] * 10_001)
    assert not is_small_container((1,))
    assert not is_small_container(torch.ones(1))
