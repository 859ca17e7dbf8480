"""Attention: every recipe repeats its operator to the bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_dpx.memory.execute.graph_tape import Node
from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.memory.execute.recipes import NotRecomputable, recipe_for
from lightning_dpx.memory.execute.saved_tensor_hooks import Rematerialization
from lightning_dpx.memory.execute.values import read
from tests.memory.execute.recipes.probe import Function, check_on_a_gpu, check_recipe

EXAMPLES: dict[str, Function] = {
    "ScaledDotProductFlashAttentionForCpu": lambda _, x: F.scaled_dot_product_attention(x, x.sin(), x, is_causal=True),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_recipe_repeats_its_operator(name: str) -> None:
    check_recipe(name, EXAMPLES[name])


aten = torch.ops.aten


FUSED: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "Flash": lambda q, k, v, p: aten._scaled_dot_product_flash_attention(q, k, v, p, True),
    "Efficient": lambda q, k, v, p: aten._scaled_dot_product_efficient_attention(q, k, v, k @ k.mT, True, p, scale=0.3),
    "Cudnn": lambda q, k, v, p: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, p, scale=0.3),
}


@pytest.mark.parametrize("kernel", FUSED)
def test_fused_attention_finds_what_its_node_saved(kernel: str) -> None:
    """Without numbers: torch makes the nodes of CUDA's kernels on the meta device, too."""
    q, k, v = (torch.rand(2, 4, 64, 16, device="meta", requires_grad=True).sin() for _ in range(3))
    for dropout in (0.0, 0.1):
        values = Rematerialization(CallNames(nn.Identity()))
        with values.active():
            node = FUSED[kernel](q, k, v, dropout)[0].grad_fn
        assert node is not None
        assert node.name() == f"ScaledDotProduct{kernel}AttentionBackward0"
        if dropout:
            with pytest.raises(NotRecomputable, match="attention with dropout draws random numbers"):
                recipe_for(node.name())(Node(values, node, 0, 0))
            continue
        make, inputs = recipe_for(node.name())(Node(values, node, 0, 0))
        assert len(inputs) == (4 if kernel == "Efficient" else 3)
        assert make(*[read(entry) for entry in inputs]).shape == q.shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_fused_attention_on_a_gpu(backend: str) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            with sdpa_kernel(SDPBackend.__members__[backend]):
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
            return out

    x = torch.rand(8, 64, 64, device="cuda", dtype=torch.bfloat16)
    check_on_a_gpu(Attention().cuda().bfloat16(), x, "ScaledDotProduct")
