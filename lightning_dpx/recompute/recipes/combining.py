"""Recipes of operators on two or more inputs."""

from functools import partial
from typing import Any

import torch

from lightning_dpx.recompute.recipes.registry import aten, recipe, signed


@recipe("AddBackward0")
def _add(node: Any) -> Any:
    add = torch.add if node.alpha == 1 else partial(torch.add, alpha=node.alpha)
    return add, [node.edge(0), node.edge(1)]


@recipe("SubBackward0")
def _sub(node: Any) -> Any:
    return partial(torch.sub, alpha=node.alpha), [node.edge(0), node.edge(1)]


@recipe("MulBackward0")
def _mul(node: Any) -> Any:
    return torch.mul, [node.saved("self", edge=0), node.saved("other", edge=1)]


@recipe("DivBackward0")
def _div(node: Any) -> Any:
    return torch.div, [node.saved("self", edge=0), node.saved("other", edge=1)]


@recipe("AddcmulBackward0")
def _addcmul(node: Any) -> Any:
    return partial(torch.addcmul, value=node.value), [
        node.edge(0),
        node.saved("tensor1", edge=1),
        node.saved("tensor2", edge=2),
    ]


@recipe("WhereBackward0")
def _where(node: Any) -> Any:
    return torch.where, [node.saved("condition"), node.edge(0), node.edge(1)]


@recipe("CatBackward0")
def _cat(node: Any) -> Any:
    dim = signed(node.dim)
    return (lambda *parts: torch.cat(parts, dim)), [node.edge(index) for index in range(node.num_edges)]


@recipe("StackBackward0")
def _stack(node: Any) -> Any:
    dim = signed(node.dim)
    return (lambda *parts: torch.stack(parts, dim)), [node.edge(index) for index in range(node.num_edges)]


@recipe("PreluKernelBackward0")
def _prelu(node: Any) -> Any:
    return aten._prelu_kernel.default, [node.saved("self", edge=0), node.saved("weight", edge=1)]


@recipe("NativeDropoutBackward0")
def _dropout(node: Any) -> Any:
    scale = 1.0 / (1.0 - node.p) if node.p < 1 else 0.0  # the mask was drawn once and is saved
    return (lambda x, mask: x * mask * scale), [node.edge(0), node.saved("result1")]
