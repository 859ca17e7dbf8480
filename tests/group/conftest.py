"""Groups for the tests, which are closed after each."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from tests.conftest import places


@pytest.fixture
def make_group():
    """Builds groups that are closed after the test."""
    with ExitStack() as groups:
        yield lambda *args, **options: groups.enter_context(dpx.ReplicaGroup(*args, **options))


@pytest.fixture
def group(make_group, execution, hardware):
    torch.manual_seed(0)
    return make_group(nn.Linear(3, 2), places(3), workload=[2, 1, 1], inputs_need_grad=True, execution=execution)
