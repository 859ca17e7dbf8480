"""The models of the benches train, and cost their loader nothing."""

import pytest
import torch

from lightning_dpx.bench.models import MODELS, BenchModule, ready_loader


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("gpt", "wide", "deep")])
def test_every_model_has_a_loss_with_gradients_on_its_own_batches(name: str) -> None:
    model = MODELS[name]
    module = BenchModule(model)
    loader = ready_loader(model, 2)
    batch = next(iter(loader))
    assert len(batch[0]) == 2
    loss = module.training_step(batch, 0)
    assert loss.ndim == 0
    loss.backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_batches_are_made_beforehand() -> None:
    batches = iter(ready_loader(MODELS["nothing"], 2))
    first = [next(batches) for _ in range(9)]
    assert first[8][0] is first[0][0]
    assert len(torch.stack([rows for rows, _ in first[:8]]).unique()) > 2
