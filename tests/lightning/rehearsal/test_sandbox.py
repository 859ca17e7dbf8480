"""What runs of a rehearsal change outside of their shadows is noted, and put back."""

import copy
import random
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_dpx.lightning.rehearsal.sandbox import Sandbox
from lightning_dpx.replicas import Replica
from tests.conftest import make_loader, make_trainer

CPU = torch.device("cpu")


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def module(tmp_path: Any) -> Any:
    """With a trainer, which has optimizers and a logger."""
    model = Model()
    trainer = make_trainer(max_epochs=1, log_every_n_steps=1, logger=CSVLogger(tmp_path))
    trainer.fit(model, make_loader(8, 4))
    return model


@pytest.fixture
def sandbox(module: Any) -> Sandbox:
    return Sandbox(module.trainer, module, [Replica(0, CPU, module)], [CPU])


def shadow_of(module: Any) -> Any:
    return copy.deepcopy(nn.ModuleList(module.children()))


def test_random_numbers_are_the_same_in_every_run_unless_others_are_asked_for(module: Any, sandbox: Sandbox) -> None:
    shadow = shadow_of(module)
    states = torch.get_rng_state(), random.getstate()
    drawn = []
    with sandbox.opened(calls_hooks=False):
        for other_draws in (False, False, True):
            with sandbox.run(shadow, other_draws=other_draws):
                drawn.append((float(torch.rand(())), random.random()))
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_what_a_run_has_done_is_told_until_the_next_one(module: Any, sandbox: Sandbox) -> None:
    shadow = shadow_of(module)
    trainer = module.trainer
    with sandbox.opened(calls_hooks=False):
        with sandbox.run(shadow):
            trainer.optimizers[0].param_groups[0]["lr"] = 7.0
            trainer.logger.log_metrics({"a": 1.0})
            shadow[0].weight.data = torch.zeros(3, 8)
        assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1
        assert sandbox.last.changed_settings
        assert sandbox.last.logger_calls == ["log_metrics"]
        assert sandbox.last.written == ["0.weight"]
        with sandbox.run(shadow):
            pass
        assert not sandbox.last.changed_settings
        assert (sandbox.last.logger_calls, sandbox.last.written) == ([], [])


def test_parameters_that_operators_write_are_named_and_put_back(module: Any, sandbox: Sandbox) -> None:
    before = module.net.weight.detach().clone()
    with sandbox.opened(calls_hooks=False), sandbox.run(module):
        with sandbox.in_step("training_step"), torch.no_grad():
            module.net.weight.zero_()
        assert not module.net.weight.any()
    assert sandbox.last.written == ["net.weight"]
    assert torch.equal(module.net.weight, before)


def test_the_trainer_loggers_callbacks_and_flags_are_what_they_were(module: Any, sandbox: Sandbox) -> None:
    trainer = module.trainer
    loggers, callbacks, number = trainer.loggers, trainer.callbacks, torch.get_num_threads()
    module.net.weight.grad = torch.ones(3, 8)
    with sandbox.opened(calls_hooks=True):
        assert trainer.callbacks == []
        assert module.net.weight.grad is None
        trainer.should_stop = True
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(number + 1)
    assert trainer.loggers is loggers
    assert trainer.callbacks is callbacks
    assert not trainer.should_stop
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_num_threads() == number
    assert module.net.weight.grad.sum() == 24


def test_settings_that_the_first_run_switches_for_a_while_are_named(module: Any, sandbox: Sandbox) -> None:
    rows = torch.ones(2)
    with sandbox.opened(calls_hooks=False), sandbox.run(module):
        with sandbox.in_step("training_step"):
            torch.set_default_dtype(torch.float64)
            rows.sum()
            torch.set_default_dtype(torch.float32)
    assert any("dtype" in name for name in sandbox.switched), sandbox.switched
