"""Profiling a step ends, whatever the shape of its graph."""

import torch
from torch import Tensor, nn

from lightning_dpx.recompute import profile_module


class _Doubled(nn.Module):
    """Nobody saves ``h``, and the sum asks for it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        y = h + h
        return y * y


def test_a_value_that_nobody_saves_is_asked_for_twice_by_one_operator() -> None:
    profile = profile_module(_Doubled(), torch.randn(32, 64))
    (total,) = [value for value in profile.values if value.operator == "AddBackward0"]
    assert not total.refused
    assert len(total.inputs) == 2
