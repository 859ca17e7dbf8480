"""Products of matrices, convolutions and look-ups: every recipe repeats its operator to the bit."""

import pytest
import torch
from torch.nn import functional as F

from tests.memory.execute.recipes.probe import Function, check_recipe

EXAMPLES: dict[str, Function] = {
    "Addmm": lambda p, x: F.linear(x, p.matrix, p.bias),
    "Addmm outside": lambda p, x: F.linear(x, p.matrix, p.frozen),
    "Baddbmm": lambda _, x: torch.baddbmm(x[:, 0], x[:, 1], x[:, 2], alpha=0.5),
    "Baddbmm outside": lambda p, x: torch.baddbmm(p.table[:, :8], x[:, 0], x[:, 1], beta=0.5),
    "Bmm": lambda _, x: torch.bmm(x[:, 0], x[:, 1]),
    "Convolution": lambda p, x: F.conv2d(x, p.kernel, p.bias, padding=1, stride=2),
    "Convolution outside": lambda p, x: F.conv2d(x, p.kernel, p.frozen),
    "Convolution transposed": lambda p, x: F.conv_transpose2d(x, p.kernel, bias=p.frozen),
    "Embedding": lambda p, _: F.embedding(p.indices, p.matrix),
    "Gather": lambda p, x: x.gather(0, p.indices.view(64, 8, 1, 1).expand(-1, -1, 8, 8)[:16] % 16),
    "Index": lambda p, x: x[:, p.indices[:16, 0], :, p.indices[:16, 1]],
    "IndexSelect": lambda p, x: x.index_select(1, p.indices[0]),
    "MaskedSelect": lambda _, x: x.masked_select(x > 0.3),
    "Mm": lambda _, x: x.flatten(1) @ x.flatten(1)[:, :512].T.contiguous() @ x.flatten(1),
    "Mv": lambda p, x: torch.mv(x.reshape(1024, 8), p.bias),
    "Scatter": lambda p, x: x.scatter(1, p.indices.view(16, 4, 8, 1).expand(-1, -1, -1, 8), p.x[:, :4].cos()),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_recipe_repeats_its_operator(name: str) -> None:
    check_recipe(name, EXAMPLES[name])
