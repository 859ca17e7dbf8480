"""Levels that a step asks of what it counts, wherever it counts: as on one device, or announced and then so."""

import random
import warnings
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.nn import functional as F

import lightning_dpx as dpx
from tests.conftest import make_loader, make_trainer

ROWS = 13  # of a batch
LEVEL = 30  # rows, of which a check has five
WHOLE = "gets all of its batches whole"
WAYS = [
    pytest.param({"execution": "inline"}, 2, id="inline-2"),
    pytest.param({"execution": "threads"}, 3, id="threads-3"),
    pytest.param({"micro_batches": 2}, 1, id="micro-batches"),
]


class Model(LightningModule):
    """Rows (B, 8) to logits (B, 3), scaled by the level."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch, self.count(batch))

    def loss(self, batch: Any, num_rows: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0] * (1 + num_rows // LEVEL)), batch[1])

    def count(self, batch: Any) -> int:
        """Adds the rows of the batch, and says how many there were."""
        raise NotImplementedError

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class InADict(Model):
    def __init__(self) -> None:
        super().__init__()
        self.seen = {"rows": 0}

    def count(self, batch: Any) -> int:
        self.seen["rows"] += len(batch[0])
        return self.seen["rows"]


class BeforeIt(InADict):
    """Asks before it counts, when other slices may have counted."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        before = self.seen["rows"]
        self.count(batch)
        return self.loss(batch, before)


class MadeByAStep(Model):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def count(self, batch: Any) -> int:
        self.seen["rows"] = self.seen.get("rows", 0) + len(batch[0])
        return self.seen["rows"]


class InAnObject(Model):
    def __init__(self) -> None:
        super().__init__()
        self.seen = SimpleNamespace(rows=0)

    def count(self, batch: Any) -> int:
        self.seen.rows += len(batch[0])
        return int(self.seen.rows)


class BesideATensor(InAnObject):
    """Such an object is each replica's own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen.mean = torch.zeros(1)


class OfClasses(Model):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[int] = Counter()

    def count(self, batch: Any) -> int:
        self.seen.update(batch[1].tolist())
        return sum(self.seen.values())


@dataclass
class State:
    by_loader: dict[int, list[float]] = field(default_factory=lambda: {0: [0.0]})


class DeepInside(Model):
    """In units of two rows, of which three rows are no whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State()

    def count(self, batch: Any) -> int:
        self.state.by_loader[0][0] += len(batch[0]) / 2
        return int(2 * self.state.by_loader[0][0])


class InAnArray(Model):
    def __init__(self) -> None:
        super().__init__()
        self.seen = np.zeros(3, dtype=np.int64)

    def count(self, batch: Any) -> int:
        self.seen[1] += len(batch[0])
        return int(self.seen[1])


class InABufferOfClasses(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def count(self, batch: Any) -> int:
        self.seen += torch.bincount(batch[1], minlength=3)
        return int(self.seen.sum())


class Slotted:
    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows = 0


class InASlot(Model):
    def __init__(self) -> None:
        super().__init__()
        self.seen = [Slotted()]

    def count(self, batch: Any) -> int:
        self.seen[0].rows += len(batch[0])
        return self.seen[0].rows


def counter() -> Callable[[int], int]:
    rows = 0

    def add(number: int) -> int:
        nonlocal rows
        rows += number
        return rows

    return add


class InAClosure(Model):
    def __init__(self) -> None:
        super().__init__()
        self.add = counter()

    def count(self, batch: Any) -> int:
        return self.add(len(batch[0]))


class AmongHyperparameters(Model):
    def __init__(self, rows: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def count(self, batch: Any) -> int:
        self.hparams["rows"] += len(batch[0])
        return int(self.hparams["rows"])


class OfItsClass(Model):
    rows = 0

    def __init__(self) -> None:
        super().__init__()
        OfItsClass.rows = 0

    def count(self, batch: Any) -> int:
        OfItsClass.rows += len(batch[0])
        return OfItsClass.rows


SEEN = {"rows": 0}


class InAGlobal(Model):
    def __init__(self) -> None:
        super().__init__()
        SEEN["rows"] = 0

    def count(self, batch: Any) -> int:
        SEEN["rows"] += len(batch[0])
        return SEEN["rows"]


class Counting(Callback):
    def __init__(self) -> None:
        self.seen = {"rows": 0}


class InACallback(Model):
    def count(self, batch: Any) -> int:
        callback: Any = self.trainer.callbacks[0]  # type: ignore[attr-defined]
        callback.seen["rows"] += len(batch[0])
        return int(callback.seen["rows"])


class OnItsTrainer(Model):
    def count(self, batch: Any) -> int:
        trainer: Any = self.trainer
        trainer.rows = getattr(trainer, "rows", 0) + len(batch[0])
        return int(trainer.rows)


class LengthOfAList(Model):
    def __init__(self) -> None:
        super().__init__()
        self.labels: list[int] = []

    def count(self, batch: Any) -> int:
        self.labels.extend(batch[1].tolist())
        return len(self.labels)


class LengthsOfTensors(Model):
    """A memory of rows, which is warmed up."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: deque[torch.Tensor] = deque(maxlen=100)

    def count(self, batch: Any) -> int:
        self.memory.append(batch[0])
        return sum(map(len, self.memory))


class AmongDraws(Model):
    """Mixes rows, so that slices cannot be compared with one device."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        share = np.random.beta(1.0, 1.0)
        order = torch.randperm(len(batch[0]))
        mixed = share * batch[0] + (1 - share) * batch[0][order]
        return self.loss([mixed, batch[1]], self.count(batch))

    def count(self, batch: Any) -> int:
        self.rows += len(batch[0])
        return self.rows


class AmongDrawsInADict(InADict):
    def loss(self, batch: Any, num_rows: int) -> torch.Tensor:
        return super().loss([batch[0][torch.randperm(len(batch[0]))], batch[1]], num_rows)


@pytest.mark.parametrize(("options", "devices"), WAYS)
@pytest.mark.parametrize(
    "kind",
    [
        InADict, BeforeIt, MadeByAStep, InAnObject, BesideATensor, OfClasses, DeepInside, InAnArray, InABufferOfClasses,
        InASlot, InAClosure, AmongHyperparameters, OfItsClass, InAGlobal, InACallback, OnItsTrainer, LengthOfAList,
        LengthsOfTensors, AmongDraws, AmongDrawsInADict,
    ],
)  # fmt: skip
def test_a_level_of_what_is_counted_anywhere_comes_with_its_batch(
    kind: type[Model], options: Any, devices: int
) -> None:
    found, said = fitted(kind, devices, **options)
    assert WHOLE in said
    assert found == fitted(kind)[0]


class Unused(InADict):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = self.count(batch)
        self.seen["loss"] = self.seen.get("loss", 0) + 1.0 * len(batch[0])  # type: ignore[assignment]
        self.log("rows", float(rows))
        return self.loss(batch, 0)


class BeyondTheRun(InADict):
    def loss(self, batch: Any, num_rows: int) -> torch.Tensor:
        return super().loss(batch, num_rows // 10_000)


@pytest.mark.parametrize(("options", "devices"), WAYS)
@pytest.mark.parametrize("kind", [Unused, BeyondTheRun])
def test_counts_that_decide_nothing_let_batches_be_cut(kind: type[Model], options: Any, devices: int) -> None:
    found, said = fitted(kind, devices, **options)
    assert WHOLE not in said
    assert found == fitted(kind)[0]


def fitted(kind: type[Model], devices: int = 0, **options: Any) -> tuple[Any, str]:
    """The weights, and what was warned of; on one device unless there are ``devices``."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = kind()
    where = {"strategy": dpx.DPXStrategy(**options), "devices": devices} if devices else {}
    trainer = make_trainer(max_epochs=2, precision="64-true", callbacks=[Counting()], **where)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, make_loader(4 * ROWS, ROWS))
    weights = {
        name: [round(number, 8) for number in value.double().flatten().tolist()]
        for name, value in model.named_parameters()
    }
    return weights, "\n".join(str(one.message) for one in caught if "dpx: " in str(one.message))
