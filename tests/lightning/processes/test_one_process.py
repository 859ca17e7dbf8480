"""What only looks at a step works by itself in a job of several processes, and leaves the job as it was."""

import os

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import rank_zero_only

import lightning_dpx as dpx
from lightning_dpx.lightning.processes.one_process import OneProcess
from tests.conftest import make_trainer


def test_variables_of_a_launcher_are_not_heeded_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(vars(rank_zero_only), "rank", 1)
    strategy = dpx.DPXStrategy(cluster_environment=OneProcess(), verify="off")
    trainer = make_trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=1)
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank) == (1, 0, 0, 0)
    trainer.fit(BoringModel())
    assert trainer.global_step == 1
    assert {name: os.environ[name] for name in launched} == launched, "for the runs that follow"
    assert vars(rank_zero_only)["rank"] == 1
