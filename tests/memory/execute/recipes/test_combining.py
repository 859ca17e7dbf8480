"""Operators on several tensors: every recipe repeats its operator to the bit."""

import pytest
import torch
from torch.nn import functional as F

from tests.memory.execute.recipes.probe import Function, as_complex, check_recipe

EXAMPLES: dict[str, Function] = {
    "Add": lambda p, x: torch.add(x, p.x, alpha=2),
    "Add in place": lambda p, x: x.cos().add_(p.frozen),
    "Add of a frozen parameter": lambda p, x: torch.add(p.frozen, x, alpha=2),
    "Add of a mask": lambda p, x: x + p.mask,
    "Add of a view": lambda p, x: x + p.table[:, :8],
    "Add outside": lambda _, x: 1 + x,
    "AddBackward0": lambda p, x: F.linear(x.transpose(1, 2), p.matrix, p.frozen),
    "Addcdiv": lambda p, x: torch.addcdiv(x, x, p.x, value=0.5),
    "Addcmul": lambda p, x: torch.addcmul(x, x, p.x, value=0.5),
    "Addcmul outside": lambda p, x: torch.addcmul(p.frozen, x, p.x),
    "Atan2": lambda p, x: torch.atan2(x, p.x),
    "Cat": lambda p, x: torch.cat([x, p.x], -1),
    "Cat outside": (
        lambda p, x: torch.cat([p.table[:, :1].expand(16, 1, 8, 8), x, p.table[:, :1].expand(16, 2, 8, 8)], 1)
    ),
    "Clamp": lambda _, x: x.clamp(-0.5, 0.5),
    "ClampBackward0": lambda p, x: torch.clamp(x, max=p.x),
    "Complex": as_complex,
    "Div": lambda p, x: x / p.x,
    "Hypot": lambda p, x: torch.hypot(x, p.x),
    "LerpBackward0": lambda p, x: torch.lerp(x, p.x, 0.3),
    "LerpBackward1": lambda p, x: torch.lerp(x, p.x, p.x.cos()),
    "LinalgCross": lambda p, x: torch.linalg.cross(x[:, :3], p.x[:, :3], dim=1),
    "Logaddexp": lambda p, x: torch.logaddexp(x, p.x),
    "MaskedFill": lambda p, x: x.masked_fill(p.mask > 0, -1e9),
    "MaskedFill with a tensor": lambda p, x: torch.masked_fill(x, p.mask > 0, p.mask[0, 0]),
    "MaskedFillBackward1": lambda p, x: x.masked_fill(p.x > 0.5, p.bias[0]),
    "Maximum": lambda p, x: torch.maximum(x, p.x),
    "Minimum": lambda p, x: torch.minimum(x, p.x),
    "Mul": lambda p, x: x * p.x,
    "NativeDropout": lambda _, x: torch.native_dropout(x, 0.3, True)[0],
    "Polar": lambda p, x: torch.polar(x, p.x),
    "PowBackward1": lambda p, x: torch.pow(x, p.x),
    "PreluKernel": lambda p, x: F.prelu(x, p.bias),
    "RsubBackward0": lambda p, x: torch.rsub(x, p.x, alpha=2),
    "RsubBackward1": lambda _, x: 1 - x,
    "RsubBackward1 of twice": lambda _, x: torch.rsub(x, 3, alpha=2),
    "Stack": lambda p, x: torch.stack([x, p.x], -1),
    "Stack outside": lambda p, x: torch.stack([x, p.table[:, :1].expand(16, 8, 8, 8)], 1),
    "Sub": lambda p, x: torch.sub(x, p.x, alpha=2),
    "Sub from a tensor": lambda p, x: p.frozen - x,
    "Sub outside": lambda _, x: x - 1,
    "Where": lambda p, x: torch.where(p.x > 0, x, p.x),
    "Where as a method": lambda p, x: p.mask.where(p.mask > 0, x),
    "Where outside": lambda p, x: torch.where(p.mask > 0, x, -1e9),
    "Xlogy": lambda p, x: torch.xlogy(x, p.x),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_recipe_repeats_its_operator(name: str) -> None:
    check_recipe(name, EXAMPLES[name])
