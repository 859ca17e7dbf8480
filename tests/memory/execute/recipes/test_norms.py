"""Norms: every recipe repeats its operator to the bit."""

import pytest
import torch
from torch.nn import functional as F

from tests.memory.execute.recipes.probe import Function, check_recipe

EXAMPLES: dict[str, Function] = {
    "NativeBatchNorm": lambda p, x: F.batch_norm(x, p.running, p.running + 1, p.bias, p.bias, training=True),
    "NativeBatchNorm in evaluation": lambda p, x: F.batch_norm(x, p.running, p.running + 1, p.frozen, p.frozen),
    "NativeBatchNorm outside": (
        lambda p, x: F.batch_norm(x, p.running, p.running + 1, p.frozen, p.frozen, training=True)
    ),
    "NativeGroupNorm": lambda p, x: F.group_norm(x, 4, p.bias, p.bias, 1e-3),
    "NativeGroupNorm outside": lambda p, x: F.group_norm(x, 4, p.bias, p.frozen, 1e-3),
    "NativeLayerNorm": lambda p, x: F.layer_norm(x, (8,), p.bias, p.bias, 1e-6),
    "NativeLayerNorm outside": lambda p, x: F.layer_norm(x, (8,), p.frozen, p.frozen, 0.123),
    "NativeLayerNorm without a bias": lambda p, x: F.layer_norm(x, (8,), p.bias),
    "WeightNormInterface": lambda p, x: torch._weight_norm(x, p.bias.view(8, 1, 1, 1).repeat(2, 1, 1, 1), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_recipe_repeats_its_operator(name: str) -> None:
    check_recipe(name, EXAMPLES[name])
