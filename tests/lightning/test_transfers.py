"""Slices reach their devices through the user's own hooks, and only where there is something to do."""

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

import lightning_dpx as dpx
from lightning_dpx.lightning.transfers import Transfer
from lightning_dpx.replicas import BatchSlice, Replica
from tests.conftest import Classifier, make_loader, make_trainer


class Hooks(Classifier):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.before = [*vars(self).get("before", []), len(batch[0])]
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * 0.5, batch[1]


@pytest.mark.usefixtures("hardware")
def test_batch_hooks_run_on_the_whole_batch_before_and_on_slices_after() -> None:
    def seen(**options: Any) -> tuple[list[int], torch.Tensor]:
        torch.manual_seed(0)
        model = Hooks()
        make_trainer(max_epochs=1, **options).fit(model, make_loader(), make_loader())
        return model.before, model.net[0].weight.detach()

    ours, one = seen(strategy=dpx.DPXStrategy(execution="inline"), devices=2), seen()
    assert ours[0] == one[0]
    assert set(one[0]) == {16, 5}, "whole batches"
    torch.testing.assert_close(ours[1], one[1])


class Looks(Classifier):
    """Asks in its first step what a transfer does with a slice of another loader."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        transfer = Transfer(self.trainer, self, 3)
        given = [torch.ones(2), torch.ones(2)]
        part = BatchSlice(Replica(0, torch.device("cpu"), self), 2, given)
        self.seen = transfer.is_plain, transfer.to_replica(part) is given
        return super().training_step(batch, batch_idx)


class LooksWithHook(Looks):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.index = dataloader_idx
        return [*batch]


def test_what_is_there_already_stays_the_same_object_unless_a_hook_makes_another() -> None:
    plain, hooked = Looks(), LooksWithHook()
    for model in (plain, hooked):
        make_trainer(fast_dev_run=True, accelerator="cpu").fit(model, make_loader(), make_loader())
    assert plain.seen == (True, True)
    assert hooked.seen == (False, False)


class LogsOnTheWay(Classifier):
    """Logs where one device refuses it: in hooks of a transfer no stage's results are there."""

    hook = ""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        if self.hook == "transfer_batch_to_device":
            self.log("moved", 1.0)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.hook == "on_after_batch_transfer":
            self.log("moved", 1.0)
        return batch


@pytest.mark.parametrize("hook", ["transfer_batch_to_device", "on_after_batch_transfer"])
@pytest.mark.parametrize("strategy", ["auto", "dpx", "inline", "threads"])
def test_logging_in_hooks_of_a_transfer_is_refused_as_on_one_device(strategy: Any, hook: str) -> None:
    options: dict[str, Any] = {"devices": 2, "strategy": strategy}
    if strategy == "auto":
        options = {}
    elif strategy != "dpx":
        options["strategy"] = dpx.DPXStrategy(execution=strategy)
    model = LogsOnTheWay()
    model.hook = hook
    with pytest.raises(MisconfigurationException, match=f"can't `self.log\\(\\)` inside `{hook}`"):
        make_trainer(max_epochs=1, **options).fit(model, make_loader(), make_loader())
