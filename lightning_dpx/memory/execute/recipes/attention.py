"""Recipes of fused attention, one node for each kernel that torch may choose.

All of them save query, key and value, and the random state that a dropout inside of the kernel started from. That state
is on the device, and to start from it again would mean to wait for it: with dropout the output is kept.
"""

from typing import Any

import torch

from lightning_dpx.memory.execute.recipes.registry import NotRecomputable, aten, recipe


def _inputs(node: Any) -> list[Any]:
    """Query, key and value.

    Raises:
        NotRecomputable: the node draws random numbers, or another output than the first is asked for.
    """
    if node.dropout_p:  # see the module's docstring
        raise NotRecomputable("attention with dropout draws random numbers")
    if node.output:
        raise NotRecomputable("only the first output of attention is computed again")
    return [node.saved("query", edge=0), node.saved("key", edge=1), node.saved("value", edge=2)]


@recipe("ScaledDotProductFlashAttentionForCpuBackward0")
def _on_the_host(node: Any) -> Any:
    inputs = _inputs(node)
    is_causal = node.is_causal
    scale = node.scale
    mask = node.optional("attn_mask")
    operator = aten._scaled_dot_product_flash_attention_for_cpu.default

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        attended: torch.Tensor = operator(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)[0]
        return attended

    return attend, inputs if mask is None else [*inputs, mask]


@recipe("ScaledDotProductFlashAttentionBackward0")
def _flash(node: Any) -> Any:
    inputs = _inputs(node)
    is_causal = node.is_causal
    scale = node.scale
    operator = aten._scaled_dot_product_flash_attention.default
    # Without dropout, and without the mask of it that the operator can return for debugging.
    return (lambda q, k, v: operator(q, k, v, 0.0, is_causal, False, scale=scale)[0]), inputs


@recipe("ScaledDotProductEfficientAttentionBackward0")
def _efficient(node: Any) -> Any:
    return _biased(node, aten._scaled_dot_product_efficient_attention.default)


@recipe("ScaledDotProductCudnnAttentionBackward0")
def _cudnn(node: Any) -> Any:
    return _biased(node, aten._scaled_dot_product_cudnn_attention.default)


def _biased(node: Any, operator: Any) -> Any:
    """The two kernels that take a bias on the scores, with the same arguments."""
    inputs = _inputs(node)
    is_causal = node.is_causal
    scale = node.scale
    bias = node.optional("attn_bias")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        # With the log-sum-exp, which the forward asked for as well, for its backward.
        attended: torch.Tensor = operator(q, k, v, bias, True, 0.0, is_causal, scale=scale)[0]
        return attended

    return attend, inputs if bias is None else [*inputs, bias]
