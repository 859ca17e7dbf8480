"""How long tensors live by themselves, where steps differ."""

import itertools

import torch
from torch import nn

from lightning_dpx.memory import profile_module


class Alternating(nn.Module):
    """Takes one more step in every second forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(64, 64), itertools.count(1)  # which nobody can put back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layer(x))
        return torch.sigmoid(x * 2) if next(self.calls) % 2 else torch.sigmoid(x.abs() * 2)


def test_of_steps_that_differ_nobody_knows_when_a_value_is_unused() -> None:
    """So nothing counts as free before the last operator of the forward has run."""
    profile = profile_module(Alternating(), torch.randn(64, 64))
    assert len(profile.storages) > 1
    (unused,) = {storage.unused for storage in profile.storages}
    assert profile.forward_events - 3 < unused < profile.forward_events
