"""Recipes of products, convolutions and tables."""

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from lightning_dpx.devices import is_host
from lightning_dpx.memory.execute.recipes.registry import NotRecomputable, aten, recipe, signed


@recipe("AddmmBackward0")
def _addmm(node: Any) -> Any:
    left = node.saved("mat1", edge=1)
    right = node.saved("mat2", edge=2)
    plain = node.alpha == node.beta == 1
    operator = torch.addmm if plain else partial(torch.addmm, alpha=node.alpha, beta=node.beta)
    if node.has_edge(0):
        return operator, [node.edge(0), left, right]
    # Autocast converts a frozen bias before the operator gets it, of which the graph does not know.
    dtype = node.dtype
    return (lambda bias, left, right: operator(bias.to(dtype), left, right)), [node.constant(), left, right]


@recipe("MmBackward0")
def _mm(node: Any) -> Any:
    return torch.mm, [node.saved("self", edge=0), node.saved("mat2", edge=1)]


@recipe("BmmBackward0")
def _bmm(node: Any) -> Any:
    return torch.bmm, [node.saved("self", edge=0), node.saved("mat2", edge=1)]


@recipe("BaddbmmBackward0")
def _baddbmm(node: Any) -> Any:
    inputs = [node.operand(0), node.saved("batch1", edge=1), node.saved("batch2", edge=2)]
    alpha = node.alpha
    beta = node.beta
    dtype = node.dtype

    def multiply(start: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        # Autocast converts an operand outside of the graph, of which the graph does not know.
        return torch.baddbmm(start.to(dtype), left, right, alpha=alpha, beta=beta)

    return multiply, inputs


@recipe("LinearBackward0")
def _linear(node: Any) -> Any:
    inputs = [node.saved("input", edge=0), node.saved("weight", edge=1)]
    dtype = node.dtype
    bias = node.operand(2) if node.num_edges > 2 else None
    if bias is not None:
        inputs.append(bias)

    def apply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, weight, None if bias is None else bias.to(dtype))

    return apply, inputs


@recipe("ConvolutionBackward0")
def _convolution(node: Any) -> Any:
    inputs = [node.saved("input", edge=0), node.saved("weight", edge=1)]
    dtype = node.dtype
    rest = node.stride, node.padding, node.dilation, node.transposed, node.output_padding, node.groups
    # A bias is never saved. The node tells its size, which is [0] where there is none.
    if any(node.bias_sym_sizes_opt or ()):
        inputs.append(node.operand(2))

    def convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        # Convolutions of all kinds, transposed or not, are one operator.
        return torch.convolution(x, weight, None if bias is None else bias.to(dtype), *rest)

    return convolve, inputs


@recipe("EmbeddingBackward0")
def _embedding(node: Any) -> Any:
    # What the node notes beside, such as padding_idx, is for the gradient alone.
    return torch.embedding, [node.edge(0), node.saved("indices")]


@recipe("GatherBackward0")
def _gather(node: Any) -> Any:
    dim = signed(node.dim)
    return (lambda x, index: torch.gather(x, dim, index)), [node.saved("self", edge=0), node.saved("index")]


@recipe("IndexSelectBackward0")
def _index_select(node: Any) -> Any:
    dim = signed(node.dim)
    return (lambda x, index: torch.index_select(x, dim, index)), [node.edge(0), node.saved("index")]


@recipe("IndexBackward0")
def _index(node: Any) -> Any:
    # ``x[:, index]`` has an index for its second dim only; the first entry of the list is ``None``.
    where = node.saved_list("indices")
    places = [place for place, index in enumerate(where) if index is not None]

    def index(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        indices: list[torch.Tensor | None] = [None] * len(where)
        for place, tensor in zip(places, given, strict=True):
            indices[place] = tensor
        picked: torch.Tensor = aten.index.Tensor(x, indices)
        return picked

    return index, [node.edge(0), *(index for index in where if index is not None)]


@recipe("MaskedSelectBackward0")
def _masked_select(node: Any) -> Any:
    return torch.masked_select, [node.saved("self", edge=0), node.saved("mask")]


@recipe("ScatterBackward0")
def _scatter(node: Any) -> Any:
    if not is_host(node.device):
        raise NotRecomputable("of two numbers for one place a device takes any")
    dim = signed(node.dim)
    return (lambda x, index, source: x.scatter(dim, index, source)), [node.edge(0), node.saved("index"), node.edge(1)]


@recipe("MvBackward0")
def _mv(node: Any) -> Any:
    return torch.mv, [node.saved("self", edge=0), node.saved("vec", edge=1)]
