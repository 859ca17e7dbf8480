"""What a Trainer, callbacks and loggers may ask of the strategy and tell it, in a run and outside of one."""

from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import DoublePrecision
from torch.utils.data import DistributedSampler

import lightning_dpx as dpx
from lightning_dpx.lightning.precision import DPXPrecision
from tests.conftest import make_loader, make_trainer, seeded, strategy_in


def test_outside_of_a_step_there_is_one_process() -> None:
    strategy = dpx.DPXStrategy(parallel_devices=[torch.device("cpu")] * 3)
    assert (strategy.global_rank, strategy.local_rank, strategy.world_size) == (0, 0, 1)
    assert not strategy.is_distributed
    tensor = torch.tensor([1.0, 3.0])
    assert strategy.broadcast("text", src=0) == "text"
    assert torch.equal(strategy.reduce(tensor, reduce_op="sum"), tensor)
    assert strategy.reduce_boolean_decision(decision=True, all=False)
    strategy.barrier("nobody to wait for")


def test_replicas_share_one_loader_so_samplers_count_processes() -> None:
    strategy = dpx.DPXStrategy(parallel_devices=[torch.device("cpu")] * 3)
    sampler: DistributedSampler[int] = DistributedSampler(range(10), **strategy.distributed_sampler_kwargs)
    assert len(sampler) == 10


def test_a_strategy_without_devices_says_so() -> None:
    with pytest.raises(dpx.ConfigurationError, match=r"no devices; give Trainer\(devices=\.\.\.\) at least one"):
        _ = dpx.DPXStrategy().root_device


def test_options_can_be_read_as_they_were_given() -> None:
    reducer = dpx.DPXStrategy(reducer="naive", workload=[2, 1], batch_dim={"rows": 1}, micro_batches=[1, 2])
    assert reducer.reducer == "naive"
    assert reducer.workload == [2, 1]
    assert reducer.batch_dim == {"rows": 1}
    assert reducer.batch_slicer is None
    assert reducer.micro_batches == [1, 2]


def test_the_precision_that_was_given_works_inside_of_ours() -> None:
    strategy = dpx.DPXStrategy(precision_plugin=DoublePrecision())
    assert isinstance(strategy.precision_plugin, DPXPrecision)
    assert strategy.dpx_precision is strategy.precision_plugin
    assert strategy.precision_plugin.precision == "64-true"


class OwnFiles(TorchCheckpointIO):
    """A user's own way of writing checkpoints."""


def test_a_checkpoint_plugin_of_the_user_stays_and_lightnings_writes_whole_files() -> None:
    given = OwnFiles()
    assert dpx.DPXStrategy(checkpoint_io=given).checkpoint_io is given
    assert type(dpx.DPXStrategy().checkpoint_io) is not TorchCheckpointIO


def test_a_text_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    strategy = dpx.DPXStrategy()
    with caplog.at_level("INFO"):
        strategy.announce("a batch goes whole")
        strategy.announce("a batch goes whole")
    assert caplog.text.count("a batch goes whole") == 1


class Questions(Callback):
    """What the strategy answers at each moment of a run, in order."""

    def __init__(self) -> None:
        self.modules: list[LightningModule | None] = []
        self.num_replicas: list[int] = []

    def ask(self, trainer: Trainer) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, dpx.DPXStrategy)
        self.modules.append(strategy.lightning_module)
        self.num_replicas.append(len(strategy.replica_modules))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ask(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.ask(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ask(trainer)


def test_callbacks_see_the_users_module_all_through_a_run_and_replicas_until_its_end(hardware: str) -> None:
    model, questions = seeded(), Questions()
    strategy = strategy_in("inline", verify="off")
    trainer = make_trainer(strategy=strategy, devices=2, max_epochs=1, limit_train_batches=2, callbacks=[questions])
    loader = make_loader(32)
    trainer.fit(model, loader, loader)
    assert len(questions.modules) == 5  # the check before training, its start, two steps, one validation
    assert all(module is model for module in questions.modules)
    assert questions.num_replicas == [2] * 5
    assert strategy.replica_modules == []
    assert not strategy.is_running
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_a_strategy_without_a_module_says_where_it_comes_from() -> None:
    with pytest.raises(dpx.ConfigurationError, match=r"no module yet"):
        _ = dpx.DPXStrategy().connected_module
