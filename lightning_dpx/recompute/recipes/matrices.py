"""Recipes of products, convolutions, tables and attention."""

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from lightning_dpx.recompute.recipes.registry import NotRecomputable, aten, recipe, signed


@recipe("AddmmBackward0")
def _addmm(node: Any) -> Any:
    bias, left, right = node.edge(0), node.saved("mat1", edge=1), node.saved("mat2", edge=2)
    plain = node.alpha == node.beta == 1
    return torch.addmm if plain else partial(torch.addmm, alpha=node.alpha, beta=node.beta), [bias, left, right]


@recipe("MmBackward0")
def _mm(node: Any) -> Any:
    return torch.mm, [node.saved("self", edge=0), node.saved("mat2", edge=1)]


@recipe("BmmBackward0")
def _bmm(node: Any) -> Any:
    return torch.bmm, [node.saved("self", edge=0), node.saved("mat2", edge=1)]


@recipe("BaddbmmBackward0")
def _baddbmm(node: Any) -> Any:
    inputs = [node.edge(0), node.saved("batch1", edge=1), node.saved("batch2", edge=2)]
    return partial(torch.baddbmm, alpha=node.alpha, beta=node.beta), inputs


@recipe("LinearBackward0")
def _linear(node: Any) -> Any:
    inputs = [node.saved("input", edge=0), node.saved("weight", edge=1)]
    return F.linear, [*inputs, node.edge(2)] if node.num_edges > 2 and node.has_edge(2) else inputs


@recipe("ConvolutionBackward0")
def _convolution(node: Any) -> Any:
    inputs = [node.saved("input", edge=0), node.saved("weight", edge=1)]
    rest = node.stride, node.padding, node.dilation, node.transposed, node.output_padding, node.groups
    if node.has_edge(2):
        inputs.append(node.edge(2))
    elif any(node.bias_sym_sizes_opt or ()):
        raise NotRecomputable("a convolution with a frozen bias")
    return (lambda x, weight, bias=None: torch.convolution(x, weight, bias, *rest)), inputs


@recipe("EmbeddingBackward0")
def _embedding(node: Any) -> Any:
    return torch.embedding, [node.edge(0), node.saved("indices")]


@recipe("GatherBackward0")
def _gather(node: Any) -> Any:
    dim = signed(node.dim)
    return (lambda x, index: torch.gather(x, dim, index)), [node.saved("self", edge=0), node.saved("index")]


@recipe("ScaledDotProductFlashAttentionForCpuBackward0")
def _cpu_attention(node: Any) -> Any:
    if node.output or node.dropout_p:
        raise NotRecomputable("attention with dropout draws random numbers")
    is_causal, scale, mask = node.is_causal, node.scale, node.optional("attn_mask")
    operator = aten._scaled_dot_product_flash_attention_for_cpu.default

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        attended: torch.Tensor = operator(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)[0]
        return attended

    inputs = [node.saved("query", edge=0), node.saved("key", edge=1), node.saved("value", edge=2)]
    return attend, inputs if mask is None else [*inputs, mask]
