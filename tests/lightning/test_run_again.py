"""A step that runs again on the whole batch does so as one device would run it: nothing of its slices is left."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import lightning_dpx as dpx
from tests.conftest import Classifier, make_trainer

BEGINS = 5  # the batch in which the step does what it did not do before
LOSSES: list[weakref.ref[torch.Tensor]] = []  # of that batch: of its slices, then of all of it
ALIVE: list[int] = []


class Changes(Classifier):
    """Remembers what the slices of one batch have computed, as long as anything else holds it."""

    def begin(self) -> None:
        """What runs on slices lead to another run for."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        # In the first batches what slices leave in globals is compared.
        if batch_idx == BEGINS and len(batch[0]) == 8:
            ALIVE.append(sum(loss() is not None for loss in LOSSES))
        outputs = super().training_step(batch, batch_idx)
        if batch_idx == BEGINS:
            LOSSES.append(weakref.ref(outputs["loss"]))
            self.begin()
        return outputs


class DrawsLater(Changes):
    def begin(self) -> None:
        self.last = float(torch.rand(1))


class MakesMetricsLater(Changes):
    def begin(self) -> None:
        self.mean = MeanMetric()


def make_rows() -> DataLoader[Any]:
    rows = torch.randn(56, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(rows, torch.arange(56) % 2), batch_size=8)


@pytest.mark.filterwarnings("ignore:The training_step draws random numbers")  # in threads: of their order
@pytest.mark.parametrize(
    ("kind", "told"), [(DrawsLater, "draws random numbers in"), (MakesMetricsLater, "makes metrics in")]
)
def test_what_slices_have_computed_is_gone_when_the_whole_batch_runs(
    execution: str, kind: type[Changes], told: str
) -> None:
    LOSSES.clear()
    ALIVE.clear()
    trainer = make_trainer(strategy=dpx.DPXStrategy(execution=execution), devices=2, max_epochs=1)
    with pytest.warns(UserWarning, match=told):
        trainer.fit(kind(), make_rows(), make_rows())
    assert len(LOSSES) == 3, "two slices, and the whole batch"
    assert ALIVE == [0]


class FailsThen(MakesMetricsLater):
    """And the whole batch, which then runs, has an error of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        if batch_idx == BEGINS and len(batch[0]) == 8:
            raise ValueError("of the whole batch")
        return outputs


def test_an_error_of_the_whole_batch_is_told_as_if_there_had_been_no_slices() -> None:
    trainer = make_trainer(strategy=dpx.DPXStrategy(execution="inline"), devices=2, max_epochs=1)
    with (
        pytest.warns(UserWarning, match="makes metrics in"),
        pytest.raises(ValueError, match="of the whole batch") as caught,
    ):
        trainer.fit(FailsThen(), make_rows(), make_rows())
    assert caught.value.__context__ is None, "which a traceback would print as well"
