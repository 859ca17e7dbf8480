"""Chains of stages: plain ones, with equal and unequal stages, and residual ones."""

import random
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from lightning_dpx.memory import Profile, profile_module

KINDS = ("equal", "unequal", "residual")
_ROWS, _WIDTH = 32, 32


class _Add(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


def chain_profile(kind: str, length: int) -> Profile:
    """The step of a chain; times do not depend on the machine: 1 s for a cheap operator, more for a product."""
    generator = random.Random(length)
    torch.manual_seed(0)
    widths = [_WIDTH * (generator.randint(1, 4) if kind == "unequal" else 1) for _ in range(length + 1)]
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    stages = (
        [_Add(nn.Sequential(layer, nn.Linear(_WIDTH, _WIDTH))) for layer in layers] if kind == "residual" else layers
    )
    profile = profile_module(nn.Sequential(*stages), torch.randn(_ROWS, widths[0]))
    price = {"AddmmBackward0": 10.0, "TanhBackward0": 1.0, "AddBackward0": 1.0}
    rate = {name: generator.uniform(0.5, 1.5) if kind == "unequal" else 1.0 for name in ("", *"123456789")}
    values = tuple(
        replace(v, seconds=price.get(v.operator, 0.0) * v.num_bytes / 4096 * rate[generator.choice(tuple(rate))])
        for v in profile.values
    )
    return replace(profile, values=values, step_seconds=30.0 * length)
