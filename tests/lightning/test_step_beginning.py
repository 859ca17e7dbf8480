"""What a step on slices begins with is there again where it runs on the whole batch."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.lightning.step_beginning import contents_of
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer

DRAWS = "It draws random numbers in this batch, and drew none when it was checked"


class DrawsOnDevice(Classifier):
    """Drops out in one batch alone, which no check has looked at."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rows = batch[0]
        if self.global_step == 5:
            rows = F.dropout(rows, 0.5)
        return F.cross_entropy(self.net(rows), batch[1])


def weights_on(device: str, number: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = DrawsOnDevice()
    torch.manual_seed(1)
    trainer = make_trainer(accelerator=device, devices=number, strategy=dpx.DPXStrategy())
    trainer.fit(model, make_loader(), make_loader())
    return {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("number", [2, 3])
def test_what_is_drawn_for_the_first_time_on_a_device_is_drawn_by_the_whole_batch(number: int, sim: Any) -> None:
    expected = weights_on("sim", 1)
    with pytest.warns(UserWarning, match=DRAWS):
        seen = weights_on("sim", number)
    assert_equal(seen, expected)


def test_contents_are_others_after_any_write() -> None:
    rows = torch.arange(6.0).reshape(3, 2)
    batch = {"rows": rows, "numbers": [torch.arange(3).numpy()], "text": "as it is"}
    before = contents_of(batch)
    assert contents_of(batch) == before
    rows.numpy()[1] *= 2
    written = contents_of(batch)
    assert written != before
    batch["numbers"][0][0] = 7
    assert contents_of(batch) != written
