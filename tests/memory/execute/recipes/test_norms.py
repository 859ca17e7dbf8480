"""Norms: every recipe repeats its operator to the bit."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.memory.execute.recipes.probe import Function, Probe, check_recipe, cube


def _batch_norm_in(dtype: torch.dtype, p: Probe, x: Tensor) -> Tensor:
    return F.batch_norm(x.to(dtype), None, None, p.bias.to(dtype), p.bias.to(dtype), training=True)


EXAMPLES: dict[str, Function] = {
    "NativeBatchNorm": lambda p, x: F.batch_norm(x, p.running, p.running + 1, p.bias, p.bias, training=True),
    "NativeBatchNorm in evaluation": lambda p, x: F.batch_norm(x, p.running, p.running + 1, p.frozen, p.frozen),
    "NativeBatchNorm outside": (
        lambda p, x: F.batch_norm(x, p.running, p.running + 1, p.frozen, p.frozen, training=True)
    ),
    "NativeBatchNorm with strides": (
        lambda p, x: F.batch_norm(x.transpose(2, 3), p.running, p.running + 1, p.bias, p.bias, training=True)
    ),
    "NativeBatchNorm of a part": (
        lambda p, x: F.batch_norm(torch.cat([x, x], 1)[:, :8], p.running, p.running + 1, p.bias, p.bias, training=True)
    ),
    "NativeBatchNorm channels last": (
        lambda p, x: F.batch_norm(
            x.contiguous(memory_format=torch.channels_last), p.running, p.running + 1, p.bias, p.bias, training=True
        )
    ),
    "NativeBatchNorm of volumes": lambda p, x: F.batch_norm(cube(x), None, None, p.bias, p.bias, training=True),
    "NativeBatchNorm in half precision": lambda p, x: _batch_norm_in(torch.bfloat16, p, x),
    "NativeBatchNorm of half precision": (
        lambda p, x: F.batch_norm(x.bfloat16(), p.running, p.running + 1, p.bias, p.bias, training=True)
    ),
    "NativeBatchNorm without weights": (
        lambda p, x: F.batch_norm(x.transpose(2, 3), p.running, p.running + 1, training=True)
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
