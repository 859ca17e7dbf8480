"""What a step returns beside its loss is held while the loss runs its backward."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.lightning.memory.test_profiling import NARROW, WIDE, Gates, fitted, smallest_budget


class ReturnsLogits(Gates):
    """Returns what the loss was made of, which is as large as all that is kept of two gates."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(NARROW, 8 * WIDE)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (rows,) = batch
        logits = self.head(self.net(rows))
        return {"loss": logits.log_softmax(-1)[..., 0].mean(), "found": [logits.detach()]}


@dataclass
class Found:
    """What is no container to torch."""

    logits: torch.Tensor


class ReturnsAnObject(ReturnsLogits):
    """Slices of it are merged by its fields."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return {"loss": output["loss"], "found": Found(output["found"][0])}


@pytest.mark.parametrize("options", [{}, {"micro_batches": 4}, {"devices": 2}], ids=["one", "micro", "two"])
def test_what_a_step_returns_beside_its_loss_is_within_the_budget(options: dict[str, Any], sim: Any) -> None:
    budget = smallest_budget(sim, ReturnsLogits, **options)
    peaks = fitted(sim, kind=ReturnsLogits, memory_budget=budget, plan_cache=False, **options).found
    assert 0.9 * budget < max(peaks[1:]) <= budget


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"devices": 2}], ids=["micro", "two"])
def test_what_the_fields_of_an_object_hold_is_within_the_budget(options: dict[str, Any], sim: Any) -> None:
    budget = smallest_budget(sim, ReturnsAnObject, **options)
    assert max(fitted(sim, kind=ReturnsAnObject, memory_budget=budget, plan_cache=False, **options).found[1:]) <= budget
