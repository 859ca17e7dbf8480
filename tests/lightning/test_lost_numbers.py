"""A slice without a counted row gives nan, and the batch runs again as on one device."""

import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_dpx as dpx
from lightning_dpx.lightning.lost_numbers import follow_lost_numbers, single_numbers
from lightning_dpx.replicas import BatchSlice, MergeRules, Replica
from tests.conftest import Classifier, assert_equal, make_trainer, run
from tests.lightning.by_hand import loss_or_step
from tests.lightning.several_replicas import on_replicas

LOST = r"On a slice it (gives|has given) nan \("
WAYS: dict[str, dict[str, Any]] = {
    "replicas": on_replicas(2),
    "micro-batches": {"strategy": dpx.DPXStrategy(micro_batches=2), "devices": 1, "accelerator": "cpu"},
}


def make_labelled_loader(unlabelled: slice) -> DataLoader[Any]:
    """All rows have a label until the sixth batch, at which no step is looked at."""
    rows = torch.randn(56, 8, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(56) % 3
    labels[unlabelled] = -100  # as cross_entropy leaves them out
    return DataLoader(TensorDataset(rows, labels), batch_size=8)


class KeepsLosses(Classifier):
    """Counts its losses where slices come together."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_rows", torch.zeros(()))
        self.num_rows: torch.Tensor

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_rows += len(batch[0])
        return super().training_step(batch, batch_idx)


def numbers_of(loader: DataLoader[Any], **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return run(KeepsLosses(), loader, max_epochs=1, num_sanity_val_steps=0, **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_slice_without_labels_gives_what_one_device_has(way: str, accumulate: int) -> None:
    options = {"accumulate_grad_batches": accumulate}
    wanted = numbers_of(make_labelled_loader(slice(44, 48)), **options)
    with pytest.warns(UserWarning, match=LOST) as caught:
        found = numbers_of(make_labelled_loader(slice(44, 48)), **options, **WAYS[way])
    assert_equal(found, wanted)
    texts = [str(one.message) for one in caught]
    assert sum("training_step gets a batch whole" in text for text in texts) == 1
    assert sum("validation_step gets a batch whole" in text for text in texts) == 1


def test_a_spread_over_single_labels_is_nan_on_all_slices_and_not_on_one_device() -> None:
    class Spreads(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rows, labels = batch
            logits = self.net(rows[labels >= 0])
            spread = ((logits - logits.mean(0)) ** 2).sum() / (len(logits) - 1)
            return F.cross_entropy(self.net(rows), labels) + 0 * spread

    wanted, found = [], []
    for seen, options in ((wanted, {}), (found, WAYS["replicas"])):
        torch.manual_seed(0)
        model = Spreads()
        trainer = make_trainer(max_epochs=1, limit_val_batches=0, **options)
        loader = make_labelled_loader(slice(44, 48))
        loader.dataset.tensors[1][41:45] = torch.tensor([-100, -100, -100, 1])  # one in either half
        with pytest.warns(UserWarning, match=LOST) if options else warnings.catch_warnings():
            trainer.fit(model, loader, loader)
        seen += model.state_dict().values()
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, wanted, strict=True))


def test_what_is_nan_on_one_device_as_well_runs_twice_once() -> None:
    calls = []

    class Diverges(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            calls.append(len(batch[0]))
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            return loss * float("nan") if self.global_step >= 2 else loss

    # What is nan in one batch of one device may be told of a slice, too.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(max_epochs=2, **WAYS["replicas"])
        trainer.fit(Diverges(), make_labelled_loader(slice(0, 0)))
    # Beside those of the rehearsal, whose rows are fewer.
    assert calls.count(8) == 1


def test_a_step_by_hand_has_later_batches_whole() -> None:
    class ByHand(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss_or_step(self, loss)

    loader = make_labelled_loader(slice(44, 48))
    trainer = make_trainer(max_epochs=1, limit_val_batches=0, **WAYS["replicas"])
    with pytest.warns(UserWarning, match=f"training_step gets all of its batches whole.*{LOST}"):
        trainer.fit(ByHand(), loader, loader)


def slices_of(*weights: float | None) -> list[BatchSlice]:
    """Of two rows each."""
    found = []
    for index, weight in enumerate(weights):
        replica = Replica(index, torch.device("cpu"), torch.nn.Linear(1, 1))
        found.append(BatchSlice(replica, 2, None, weight))
    return found


def test_only_what_counts_is_looked_at() -> None:
    nan = torch.tensor(float("nan"))
    values = {0: {"loss": torch.tensor(1.0)}, 1: {"loss": nan}}
    assert follow_lost_numbers(slices_of(None, None), values, MergeRules()) == ["loss"]
    assert not follow_lost_numbers(slices_of(3.0, 0.0), values, MergeRules()), "it weighs nothing"


def test_one_number_for_a_batch_is_no_tensor_of_rows() -> None:
    values = {"a": torch.tensor(1.0), "b": torch.ones(1), "c": 2.0, "d": 3, "e": torch.tensor(4), "f": "text"}
    assert single_numbers(values.items()).keys() == {"a", "c"}


@pytest.mark.usefixtures("sim")
def test_a_replica_may_give_what_is_on_another_ones_device() -> None:
    """As a global is, which a step logs: one sum of both would be an error of torch."""
    given = {"loss": torch.ones((), device="sim:1"), "logged": torch.ones((), device="sim:0")}
    assert not follow_lost_numbers(slices_of(None, None), {0: given, 1: given}, MergeRules())
    lost = {"loss": torch.ones((), device="sim:1"), "logged": torch.tensor(float("nan"), device="sim:0")}
    assert follow_lost_numbers(slices_of(None, None), {0: given, 1: lost}, MergeRules()) == ["logged"]
