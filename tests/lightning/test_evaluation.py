"""What slices return and cannot be put together is computed from the whole batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.plugins.precision import Precision
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from tests.conftest import Classifier, make_trainer

pytestmark = pytest.mark.usefixtures("hardware")


class Pads(Classifier):
    """As many numbers as its label says, padded to the longest of the batch."""

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        longest = int(batch[1].max()) + 1
        rows = [torch.ones(int(label) + 1, device=self.device) for label in batch[1]]
        return torch.stack([F.pad(row, (0, longest - len(row))) for row in rows])


class PadsWords(Classifier):
    """The same in words, as an array of NumPy."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        longest = int(batch[1].max()) + 1
        return np.array([["word"] * (int(label) + 1) + [""] * (longest - int(label) - 1) for label in batch[1]])


class CountsAndPads(Pads):
    def __init__(self) -> None:
        super().__init__()
        self.num_rows = 0

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.num_rows += len(batch[1])
        return super().predict_step(batch, batch_idx)


def loader() -> DataLoader[Any]:
    labels = torch.full((24,), 2)
    labels[12:18] = 1  # in the second batch the slices are padded to other lengths
    return DataLoader(TensorDataset(torch.ones(24, 8), labels), 12)


class PredictsInHalves(Precision):
    """Other contexts for other steps, which no plugin of Lightning has."""

    @contextmanager
    def predict_step_context(self) -> Iterator[None]:
        with torch.autocast("cpu", torch.bfloat16):
            yield


def test_a_prediction_has_the_context_of_predictions(execution: str) -> None:
    def predicted(**options: Any) -> list[torch.dtype]:
        found = make_trainer(plugins=[PredictsInHalves()], accelerator="cpu", **options).predict(Classifier(), loader())
        assert found is not None
        return [logits.dtype for logits in found]

    ours = predicted(devices=2, strategy=dpx.DPXStrategy(execution=execution))
    assert ours == predicted() == [torch.bfloat16] * 2


def test_a_prediction_whose_shape_is_that_of_a_slice_is_made_by_one_device(execution: str) -> None:
    one = make_trainer().predict(Pads(), loader())
    trainer = make_trainer(devices=2, strategy=dpx.DPXStrategy(execution=execution))
    with pytest.warns(UserWarning, match=r"predict_step gets all of its batches whole.*shapes \(6, 2\), \(6, 3\)"):
        ours = trainer.predict(Pads(), loader())
    assert one is not None
    assert ours is not None
    for mine, theirs in zip(ours, one, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs)


@pytest.mark.parametrize("differs_from_batch", [0, 1])
def test_words_whose_columns_are_those_of_a_slice_are_made_by_one_device(
    differs_from_batch: int, execution: str
) -> None:
    labels = torch.full((24,), 2)
    labels[12 * differs_from_batch :][:6] = 1
    loader = DataLoader(TensorDataset(torch.ones(24, 8), labels), 12)
    one = make_trainer().predict(PadsWords(), loader)
    trainer = make_trainer(devices=2, strategy=dpx.DPXStrategy(execution=execution))
    with pytest.warns(UserWarning, match=r"predict_step gets all of its batches whole.*shapes \(6, 2\), \(6, 3\)"):
        ours = trainer.predict(PadsWords(), loader)
    for mine, theirs in zip(ours or [], one or [], strict=True):
        assert np.array_equal(mine, theirs)  # type: ignore[arg-type]


class CountsRowsInBuffer(Pads):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_rows", torch.zeros((), dtype=torch.long))
        self.batches: list[int] = []

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.num_rows += len(batch[1])
        self.batches.append(len(batch[1]))
        return super().predict_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [CountsAndPads, CountsRowsInBuffer])
def test_a_step_that_runs_again_on_the_whole_batch_counts_once(kind: Any, execution: str) -> None:
    model = kind()
    trainer = make_trainer(devices=2, strategy=dpx.DPXStrategy(execution=execution))
    with pytest.warns(UserWarning, match=r"predict_step gets all of its batches whole.*shapes \(6, 2\), \(6, 3\)"):
        trainer.predict(model, loader())
    assert int(model.num_rows) == 24
    assert getattr(model, "batches", [12, 12]) == [12, 12]


class PadsAndMeasures(Pads):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.rows = torchmetrics.CatMetric()

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.mean(batch[1].float())
        self.rows(batch[1])
        return super().predict_step(batch, batch_idx)


def test_metrics_that_a_step_has_called_before_it_runs_again_count_once(execution: str) -> None:
    model = PadsAndMeasures()
    trainer = make_trainer(devices=2, strategy=dpx.DPXStrategy(execution=execution))
    with pytest.warns(UserWarning, match=r"predict_step gets all of its batches whole.*shapes \(6, 2\), \(6, 3\)"):
        trainer.predict(model, loader())
    assert model.rows.compute().shape == (24,)
    assert model.mean.weight == 24


CALLS = ContextVar("CALLS", default=0)  # no state that a check could see, or put back


class CheckedForEverError(BaseException):
    """Ends a check, too, which reports any other error and goes on."""


class KeepsInADict(Classifier):
    """Writes to a dict in validation, of which a check does not see all."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, torch.Tensor] = {}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        CALLS.set(CALLS.get() + 1)
        if CALLS.get() > 500:
            raise CheckedForEverError
        self.kept["ones"] = torch.ones(8, device=self.device)
        logits = self.net(batch[0] * self.kept["ones"])
        self.log("loss", F.cross_entropy(logits, batch[1]), batch_size=len(batch[0]))


def test_a_batch_is_checked_once_where_more_is_expected_of_it(execution: str) -> None:
    CALLS.set(0)
    results = []
    rows = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(rows, torch.arange(48) % 3), 12)
    for options in ({"devices": 1}, {"devices": 3, "strategy": dpx.DPXStrategy(execution=execution)}):
        torch.manual_seed(0)
        model = KeepsInADict()
        trainer = make_trainer(max_epochs=2, **options)
        trainer.fit(model, data, data)
        results.append(trainer.validate(model, data, verbose=False)[0]["loss"])
    assert results[1] == pytest.approx(results[0], rel=1e-5)


class CountsRows(Classifier):
    """Counts the rows of some batches in a buffer, in evaluation."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("seen", torch.zeros(()))
        self.seen: torch.Tensor

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.kind == "in later batches" and batch_idx >= 2:
            self.seen += len(batch[0])
        if self.kind == "where it draws" and batch_idx == 3:
            self.seen += len(batch[0])
            return torch.rand(len(batch[0]))
        if self.kind == "where outputs cannot be merged":
            self.seen += len(batch[0])
            return str(batch[0].sum().item())
        return self.net(batch[0]).mean()

    predict_step = validation_step

    def on_train_start(self) -> None:
        self.seen += 1


CUTS: dict[str, dict[str, Any]] = {
    "replicas": {"devices": 2, "strategy": partial(dpx.DPXStrategy, execution="inline")},
    "micro-batches": {"devices": 1, "strategy": partial(dpx.DPXStrategy, micro_batches=2)},
}


RUNS_AGAIN = [
    ("in later batches", "warn"),
    ("where it draws", "warn"),
    ("where outputs cannot be merged", "warn"),
    # The others are noticed by what a check has seen.
    ("where outputs cannot be merged", "off"),
]


@pytest.mark.filterwarnings("ignore:dpx.")  # that a batch runs whole
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("kind", "verify"), RUNS_AGAIN)
def test_a_batch_that_runs_again_whole_writes_buffers_once(kind: str, cut: str, verify: str) -> None:
    options = CUTS[cut]
    rows = DataLoader(TensorDataset(torch.randn(48, 8), torch.arange(48) % 3), 8)
    for stage in ("predict", "fit"):
        model = CountsRows(kind)
        alone = CountsRows(kind)
        ours = options | {"strategy": options["strategy"](verify=verify)}
        for each, given in ((model, ours), (alone, {"devices": 1})):
            trainer = make_trainer(max_epochs=1, num_sanity_val_steps=6, **given)
            if stage == "predict":
                trainer.predict(each, rows, return_predictions=False)
            else:
                # Its first training step comes after a validation, which is in inference mode.
                trainer.fit(each, rows, rows)
        assert model.seen.item() == alone.seen.item() > 0
