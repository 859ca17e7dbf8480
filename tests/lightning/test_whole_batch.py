"""A loss over the whole batch: ``training_step_end`` sees the merged outputs of all replicas."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_dpx import DPXStrategy
from tests.conftest import Classifier, assert_equal, run

pytestmark = pytest.mark.usefixtures("hardware")


class Contrastive(Classifier):
    """Every row against every other row of the batch, with a temperature that only the whole batch uses."""

    def __init__(self) -> None:
        super().__init__(norm=False)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.rows_seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        left, right = self.net(batch[0]), self.net(batch[0].flip(1))
        return {"left": F.normalize(left, dim=1), "right": F.normalize(right, dim=1), "bonus": left.square().mean()}

    def training_step_end(self, outputs: Any) -> Any:
        self.rows_seen.append(len(outputs["left"]))
        scores = outputs["left"] @ outputs["right"].t() * self.temperature
        loss = F.cross_entropy(scores, torch.arange(len(scores), device=scores.device)) + outputs["bonus"]
        self.log("train_loss", loss)
        return {"loss": loss, "scores": scores.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def validation_step_end(self, logits: torch.Tensor) -> Any:
        self.log("spread", logits.std())


class OnOneDevice(Contrastive):
    """The same for a strategy that knows nothing of the hook."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step_end(super().training_step(batch, batch_idx))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.validation_step_end(super().validation_step(batch, batch_idx))


def contrastive(kind: type[Contrastive]) -> Contrastive:
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_a_contrastive_loss_equals_one_device(num_replicas: int, precision: str, execution: str) -> None:
    expected = run(contrastive(OnOneDevice), precision=precision)
    model = contrastive(Contrastive)
    ours = run(model, strategy=DPXStrategy(execution=execution), devices=num_replicas, precision=precision)
    assert_equal(ours, expected)
    assert model.rows_seen == [16, 16, 16, 5] * 2


def test_accumulation_and_clipping_go_through_the_hook(execution: str) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    expected = run(contrastive(OnOneDevice), **options)
    assert_equal(
        run(contrastive(Contrastive), strategy=DPXStrategy(execution=execution), devices=3, **options), expected
    )


def test_auto_takes_the_hook_too() -> None:
    expected = run(contrastive(OnOneDevice))
    assert_equal(run(contrastive(Contrastive), strategy="dpx", devices=4), expected)
