"""Whether a backward finds gradients that are there already."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_dpx.lightning.memory.kept_gradients import keeps_earlier_gradients, keeps_gradients
from tests.conftest import Classifier, make_trainer


class ZeroesByHand(Classifier):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class ReadsGradients(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen = [parameter.grad for parameter in self.parameters()]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        (Classifier, {}, False),
        (Classifier, {"accumulate_grad_batches": 2}, True),
        (Classifier, {"callbacks": [GradientAccumulationScheduler({4: 2})]}, True),
        (ZeroesByHand, {}, True),
    ],
)
def test_gradients_are_there_where_batches_add_to_them(
    module: type[Classifier], options: dict[str, Any], expected: bool
) -> None:
    trainer = make_trainer(**options)
    trainer.strategy.connect(module())
    assert keeps_gradients(trainer) is expected


def test_those_of_the_batch_before_are_there_where_a_step_reads_them() -> None:
    found = {}
    for kind in (Classifier, ReadsGradients):
        trainer = make_trainer()
        module = kind()
        trainer.strategy.connect(module)
        found[kind] = keeps_earlier_gradients(trainer, module)
    assert found == {Classifier: False, ReadsGradients: True}
