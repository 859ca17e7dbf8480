"""A step that fails on a slice of some batch, and runs on the whole batch, goes on as on one device."""

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torchmetrics
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from lightning_dpx.lightning.slice_errors import SliceStepError, may_be_of_slices
from tests.conftest import Classifier, assert_equal, make_trainer, run
from tests.lightning.several_replicas import on_replicas

ON_A_SLICE = (
    "It runs on the whole batch, but on a slice it raises ValueError: one class only. Its slices had begun that batch: "
    "what it counts outside of the module, they did as well."
)
STAGES = ["training_step", "validation_step", "predict_step"]


def make_sorted_loader() -> DataLoader[Any]:
    """Both classes are in every slice until the sixth batch, whose rows are sorted by class."""
    rows = torch.randn(56, 8, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(56) % 2
    labels[40:48] = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    return DataLoader(TensorDataset(rows, labels), batch_size=8)


class NeedsBoth(Classifier):
    """Its ``stage`` fails on rows of one class, after it has counted and appended."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage
        self.accuracy = torchmetrics.MeanMetric()
        self.register_buffer("num_rows", torch.zeros(1))
        self.register_buffer("rebound", torch.zeros(1))
        self.calls = 0
        self.labels: list[int] = []
        self.losses: list[torch.Tensor] = []
        self.items = iter(range(1000))
        self.taken: list[int] = []

    def check(self, stage: str, batch: Any) -> None:
        if stage != self.stage:
            return
        self.calls += 1
        self.labels += batch[1].tolist()
        self.taken.append(next(self.items))
        self.num_rows += len(batch[1])
        self.rebound = self.rebound + len(batch[1])
        self.accuracy.update(batch[0][:, 0])
        self.losses.append(F.cross_entropy(self.net(batch[0]), batch[1]).detach())
        if len(set(batch[1].tolist())) < 2:
            raise ValueError("one class only")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.check("training_step", batch)
        self.log("accuracy", self.accuracy)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.check("validation_step", batch)
        return super().validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.check("predict_step", batch)
        return super().predict_step(batch, batch_idx)


def seen_of(stage: str, **options: Any) -> tuple[dict[str, torch.Tensor], NeedsBoth]:
    torch.manual_seed(0)
    model = NeedsBoth(stage)
    seen = run(model, make_sorted_loader(), accumulate_grad_batches=2, **options)
    # Those after the predictions, as a step of these counts in buffers, too.
    seen.update({name: value.cpu() for name, value in model.state_dict().items()})
    return seen, model


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("stage", STAGES)
def test_a_batch_whose_slices_fail_runs_whole(stage: str, execution: str) -> None:
    expected, one = seen_of(stage)
    with pytest.warns(UserWarning, match=f"{stage} gets all of its batches whole, on the first replica.*{ON_A_SLICE}"):
        seen, ours = seen_of(stage, strategy=dpx.DPXStrategy(execution=execution), devices=2)
    assert_equal(seen, expected)
    assert (ours.calls, ours.labels, ours.taken) == (one.calls, one.labels, one.taken)
    torch.testing.assert_close([loss.cpu() for loss in ours.losses], one.losses)


def test_so_does_one_whose_micro_batches_fail() -> None:
    expected, one = seen_of("training_step")
    with pytest.warns(UserWarning, match=f"training_step gets all of its batches whole, in one piece.*{ON_A_SLICE}"):
        seen, ours = seen_of("training_step", strategy=dpx.DPXStrategy(micro_batches=2))
    assert_equal(seen, expected)
    assert (ours.calls, ours.labels, ours.taken) == (one.calls, one.labels, one.taken)


class Fails(Classifier):
    """Whatever rows it gets, in the sixth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 5:
            raise KeyError("a mistake") from OSError("of the disk")
        return super().training_step(batch, batch_idx)


def test_where_the_whole_batch_fails_as_well_the_error_is_that_of_one_device(recwarn: Any) -> None:
    trainer = make_trainer(strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    with pytest.raises(KeyError, match="a mistake") as caught:
        trainer.fit(Fails(), make_sorted_loader(), make_sorted_loader())
    assert not hasattr(caught.value, "__notes__")
    assert isinstance(caught.value.__cause__, OSError), "not one that came of another attempt"
    assert len(caught.traceback[-1].frame.f_locals["batch"][0]) == 8, "a debugger finds what the step had"
    assert not [warning for warning in recwarn if "whole" in str(warning.message)]


class FailsOtherwise(NeedsBoth):
    """On the whole batch, which its slices have not got to."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        if batch_idx == 5:
            raise KeyError("of the whole")
        return outputs


def test_an_error_of_the_whole_batch_alone_tells_of_the_other() -> None:
    trainer = make_trainer(strategy=dpx.DPXStrategy(execution="inline"), devices=2)
    with pytest.raises(KeyError, match="of the whole") as caught:
        trainer.fit(FailsOtherwise("training_step"), make_sorted_loader(), make_sorted_loader())
    told = "Before, training_step had raised on a slice of this batch: ValueError: one class only."
    assert caught.value.__notes__ == [told]
    assert caught.value.__context__ is None, "which a traceback would print as well"


HIDDEN: list[weakref.ref[torch.Tensor]] = []  # of the batch whose slices fail
ALIVE: list[int] = []


class RemembersHidden(NeedsBoth):
    """What its steps have computed, as long as anything else holds it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        # In the first batches what slices leave in globals is compared.
        if batch_idx == 5 and len(batch[0]) == 8:
            ALIVE.append(sum(hidden() is not None for hidden in HIDDEN))
        hidden = self.net(batch[0])
        if batch_idx == 5:
            HIDDEN.append(weakref.ref(hidden))
        return super().training_step(batch, batch_idx)


def test_what_failed_slices_have_computed_is_gone_when_the_whole_batch_runs(execution: str) -> None:
    HIDDEN.clear()
    ALIVE.clear()
    loader = make_sorted_loader()
    trainer = make_trainer(strategy=dpx.DPXStrategy(execution=execution), devices=2, max_epochs=1)
    with pytest.warns(UserWarning, match=ON_A_SLICE):
        trainer.fit(RemembersHidden("training_step"), loader, loader)
    assert ALIVE == [0]


class WritesItsBatch(NeedsBoth):
    """Doubles its rows in place: by a tensor, which counts its writes, or past it, by NumPy."""

    by_numpy = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.by_numpy:
            rows = batch[0].numpy()
            rows *= 2
        else:
            batch[0].mul_(2)
        return super().training_step(batch, batch_idx)


def weights_after_writes(*, by_numpy: bool, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = WritesItsBatch("training_step")
    model.by_numpy = by_numpy
    make_trainer(**options).fit(model, make_sorted_loader(), make_sorted_loader())
    return {**model.state_dict(), "labels": torch.tensor(model.labels)}


@pytest.mark.parametrize("by_numpy", [False, True])
def test_a_batch_that_slices_have_written_begins_again_as_it_was(by_numpy: bool, execution: str) -> None:
    expected = weights_after_writes(by_numpy=by_numpy)
    with pytest.warns(UserWarning, match=ON_A_SLICE):
        seen = weights_after_writes(by_numpy=by_numpy, strategy=dpx.DPXStrategy(execution=execution), devices=2)
    assert_equal(seen, expected)


def test_errors_that_have_a_remedy_of_their_own_are_not_of_slices() -> None:
    assert may_be_of_slices(ValueError("any"))
    assert not may_be_of_slices(dpx.ConfigurationError("ours"))
    assert not may_be_of_slices(torch.OutOfMemoryError("out of memory"))
    assert str(SliceStepError(ValueError("of\ntwo lines"))).startswith("ValueError: of")


class StopsAtARow(Classifier):
    """Ends the run at a batch that has a large number anywhere."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.should_stop = bool(batch[0].max() > 2.4)
        return super().training_step(batch, batch_idx)


def test_a_run_that_a_slice_ends_ends_where_one_device_would() -> None:
    found = []
    for options in ({}, on_replicas(2)):
        torch.manual_seed(0)
        model = StopsAtARow()
        trainer = make_trainer(limit_val_batches=0, min_epochs=0, **options)
        loader = make_sorted_loader()
        message = "It sets trainer.should_stop on some of its slices"
        with pytest.warns(UserWarning, match=message) if options else nullcontext():
            trainer.fit(model, loader, loader)
        found.append({**model.state_dict(), "steps": torch.tensor(trainer.global_step)})
    assert_equal(found[1], found[0])
    assert 0 < found[0]["steps"] < 2 * len(loader), "the premise: it ends early"
