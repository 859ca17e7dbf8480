"""Operators of fakes are tried for real, one by one, where that concerns this process alone."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed

from lightning_dpx.memory.profile.probe import Probe
from lightning_dpx.memory.profile.roofline import rates_of
from lightning_dpx.torch_compat import FakeTensorMode

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[str]:
    """The name of a group of this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    assert distributed.group.WORLD is not None
    yield distributed.group.WORLD.group_name
    distributed.destroy_process_group()


def probed(func: Any, *others: Any) -> Any:
    with FakeTensorMode():
        x = torch.empty(64, 64)
        out = func(x, *others)
    return Probe(CPU, rates_of(CPU)).of(func, (x, *others), {}, out)


def test_an_operator_is_tried() -> None:
    assert probed(torch.ops.aten.cumsum.default, 0) is not None


def test_collectives_are_not_tried_as_the_other_processes_would_not_answer(group: str) -> None:
    assert probed(torch.ops._c10d_functional.all_reduce.default, "sum", group) is None
