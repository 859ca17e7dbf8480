"""Who a process is, and what must be equal before processes train together."""

from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn

import lightning_dpx as dpx
from lightning_dpx.lightning.processes.connect import agree, disconnect, fingerprint, gather_objects, start_equal
from tests.conftest import assert_equal, make_loader, make_trainer, seeded
from tests.lightning.several_replicas import on_replicas


@pytest.mark.parametrize("known", [(), ("SLURM_NODEID",), ("SLURM_NODEID", "SLURM_LOCALID"), ("SLURM_PROCID",)])
def test_a_shell_of_slurm_is_one_process(monkeypatch: pytest.MonkeyPatch, known: tuple[str, ...]) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    for name in known:
        monkeypatch.setenv(name, "0")
    ours, one = seeded(), seeded()
    make_trainer(fast_dev_run=True, **on_replicas()).fit(ours, make_loader(), make_loader())
    monkeypatch.undo()
    make_trainer(fast_dev_run=True).fit(one, make_loader(), make_loader())
    assert_equal(dict(ours.state_dict()), dict(one.state_dict()))


def test_a_task_of_slurm_that_cannot_tell_which_it_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "1")
    with pytest.raises(dpx.ConfigurationError, match="SLURM_NTASKS is 2, but SLURM_PROCID"):
        make_trainer(**on_replicas())


@pytest.fixture
def one_process() -> Iterator[None]:
    """A group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    disconnect()
    assert not distributed.is_initialized()


def test_what_must_be_equal_is_named_with_its_shape_and_dtype() -> None:
    mine = fingerprint(nn.BatchNorm1d(3, affine=False), reducer="naive")
    assert mine["reducer"] == "naive"
    assert mine["parameter"] == {}
    assert mine["buffer"]["running_mean"] == "[3] torch.float32"
    assert mine["buffer"]["num_batches_tracked"] == "[] torch.int64"


@pytest.mark.usefixtures("one_process")
def test_objects_and_tensors_reach_every_process() -> None:
    assert gather_objects("a test", {"a": 1}) == [{"a": 1}]
    agree(fingerprint(nn.Linear(2, 3)))
    module = nn.Linear(2, 3)
    before = module.weight.detach().clone()
    start_equal(module)
    assert torch.equal(module.weight, before)


@pytest.mark.usefixtures("one_process")
def test_a_process_group_in_which_this_process_has_another_rank_is_refused() -> None:
    """Samples would be dealt to two, and gradients be summed over one."""
    trainer = make_trainer(num_nodes=2, **on_replicas())
    with pytest.raises(dpx.ConfigurationError, match=r"is rank 0 of 1 .* rank 0 of 2 for LightningEnvironment"):
        trainer.fit(seeded(), make_loader(), make_loader())
