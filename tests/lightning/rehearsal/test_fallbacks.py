"""What a step does that slices cannot, for one batch or for all."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

from tests.conftest import make_loader, make_trainer, strategy_in
from tests.lightning.by_hand import loss_or_step


class MakesAScaleForEachBatch(LightningModule):
    """A parameter that is gone before the next step, and a loss that no slices can give."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.scale = nn.Parameter(torch.ones(3, device=self.device))
        return F.cross_entropy(self.net(batch[0]) * self.scale, batch[1]) * batch[0].std()

    def on_train_batch_end(self, *args: Any) -> None:
        del self.scale

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


@pytest.mark.usefixtures("hardware")
@pytest.mark.filterwarnings("ignore:dpx. training_step gets a batch whole")
def test_a_step_that_makes_parts_in_every_batch_never_runs_in_slices() -> None:
    weights = []
    for options in ({}, {"strategy": strategy_in("inline", verify="raise"), "devices": 2}):
        torch.manual_seed(0)
        model = MakesAScaleForEachBatch()
        make_trainer(max_epochs=1, **options).fit(model, make_loader(48, 8))
        weights.append(model.net.weight.detach().cpu())
    assert torch.allclose(*weights, rtol=0, atol=1e-6)


class SpreadOfOutputs(LightningModule):
    """Of one row there is none: nan, where one device has a number."""

    def __init__(self, *, by_hand: bool, hides_nan: bool) -> None:
        super().__init__()
        self.hides_nan = hides_nan
        self.automatic_optimization = not by_hand
        self.net = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self.net(batch[0])
        spread = outputs.std(0)
        # Its gradient is nan all the same.
        if self.hides_nan:
            spread = spread.nan_to_num()
        loss = F.cross_entropy(outputs, batch[1]) + spread.mean()
        return loss_or_step(self, loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize(("by_hand", "hides_nan"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("options", [{"devices": 3}, {"devices": 1, "micro_batches": 3}], ids=str)
def test_a_step_that_gives_nan_in_slices_alone_has_its_batches_whole(
    options: dict[str, Any], by_hand: bool, hides_nan: bool
) -> None:
    def trained(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = SpreadOfOutputs(by_hand=by_hand, hides_nan=hides_nan)
        make_trainer(max_epochs=1, **options).fit(model, make_loader(12, 3))
        return model.net.weight.detach().cpu()

    expected = trained()
    strategy = strategy_in("inline", micro_batches=options.get("micro_batches", 1))
    with pytest.warns(UserWarning, match="whole.* In slices of 1 row it gives nan; .* on one device"):
        seen = trained(strategy=strategy, devices=options["devices"])
    assert torch.allclose(seen, expected, rtol=0, atol=1e-6)
