"""Compiled code has room for the versions of every device."""

import pytest
import torch
from torch import nn
from torch._dynamo import config
from torch._dynamo.testing import CompileCounter

import lightning_dpx as dpx
from lightning_dpx.replicas.compiled_versions import versions_for


def test_each_device_has_as_many_versions_as_one(sim) -> None:
    before = config.recompile_limit
    with versions_for([torch.device("sim:1"), torch.device("cpu"), torch.device("cpu")]):
        assert config.recompile_limit == 2 * before
    assert config.recompile_limit == before
    with versions_for([torch.device("cpu")] * 3):
        assert config.recompile_limit == before


@pytest.mark.parametrize("num_devices", [2, 8])
def test_what_is_compiled_runs_compiled_on_all_devices(sim, num_devices: int) -> None:
    """Of each device there are two versions: one of the size of the first batch, and one of any size."""
    torch.compiler.reset()
    compiled = CompileCounter()
    net = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to("sim:0"), backend=compiled)
    group = dpx.ReplicaGroup(net, [f"sim:{index}" for index in range(num_devices)])
    before = config.recompile_limit
    for rows in (4, 6, 8):
        group.forward(torch.randn(rows * num_devices, 4), is_train=True)
    assert compiled.frame_count == 2 * num_devices
    assert config.recompile_limit == before
    torch.compiler.reset()
