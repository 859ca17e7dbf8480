"""Hooks of submodules do on every replica what they do on one device."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

import lightning_dpx as dpx
from lightning_dpx import ReplicaGroup
from tests.conftest import SIMULATED, assert_equal, make_loader, make_trainer, seeded

NEEDS_SIMULATION = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)


class ReadsWhatAHookKept(nn.Module):
    """Rows (B, 1) come back by way of a dict that a hook of a submodule captures."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        kept = self.kept = dict[str, torch.Tensor]()
        self.linear.register_forward_hook(lambda module, args, output: kept.update(rows=args[0]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.linear(rows)
        return self.kept["rows"]


@pytest.mark.parametrize("execution", ["inline", "threads"])
@pytest.mark.parametrize("devices", [["cpu"] * 3, pytest.param(["sim:0", "sim:1", "sim:2"], marks=NEEDS_SIMULATION)])
def test_hooks_write_into_the_containers_of_their_own_replica(devices: list[str], execution: Any) -> None:
    rows = torch.arange(6.0).view(6, 1)
    with ReplicaGroup(ReadsWhatAHookKept(), devices, execution=execution) as group:
        for step in range(3):
            group.forward(rows + 10 * step)
            merged: Any = group.outputs_merged()
            assert merged.view(-1).tolist() == (rows + 10 * step).view(-1).tolist()


class ScalesGradients(Callback):
    """Replicas are there by the time that it comes."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        last = [part for part in pl_module.modules() if isinstance(part, nn.Linear)][-1]
        last.register_full_backward_hook(lambda part, inputs, outputs: (inputs[0] * 0.5,))


def test_full_backward_hooks_that_come_during_a_fit_are_full_ones_on_all_replicas() -> None:
    """Others called them for the last node of the module alone, whose gradients they do not scale."""
    weights = []
    for options in ({}, {"devices": 2, "strategy": dpx.DPXStrategy(execution="inline")}):
        model = seeded()
        trainer = make_trainer(max_epochs=1, callbacks=[ScalesGradients()], precision="64-true", **options)
        trainer.fit(model, make_loader(), make_loader())
        weights.append(model.state_dict())
    assert_equal(weights[1], weights[0])
