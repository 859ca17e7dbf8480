"""Recipes of operators on one input, element by element or along a dim."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from lightning_dpx.recompute.recipes.registry import Recipe, aten, recipe, signed, with_arguments

_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Silu": F.silu, "Mish": F.mish, "Exp": torch.exp,
    "Expm1": torch.expm1, "Log": torch.log, "Log1P": torch.log1p, "Sqrt": torch.sqrt, "Rsqrt": torch.rsqrt,
    "Sin": torch.sin, "Cos": torch.cos, "Erf": torch.erf, "Neg": torch.neg, "Abs": torch.abs,
    "Reciprocal": torch.reciprocal, "Hardswish": F.hardswish, "Hardsigmoid": F.hardsigmoid, "LogSigmoid": F.logsigmoid,
    "Clone": torch.clone, "Alias": torch.clone,
}  # fmt: skip


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Recipe:
    return lambda node: (function, [node.edge(0)])


for _name, _function in _UNARY.items():
    recipe(f"{_name}Backward0")(_unary(_function))


recipe("GeluBackward0")(
    lambda node: (partial(F.gelu, approximate=node.approximate), [node.saved("self", edge=0)])
)  # fmt: skip
recipe("LeakyReluBackward0")(with_arguments(aten.leaky_relu.default, "negative_slope"))
recipe("EluBackward0")(with_arguments(aten.elu.default, "alpha", "scale", "input_scale"))
recipe("SoftplusBackward0")(with_arguments(aten.softplus.default, "beta", "threshold"))
recipe("HardtanhBackward0")(with_arguments(aten.hardtanh.default, "min_val", "max_val"))
recipe("ClampBackward1")(with_arguments(aten.clamp.default, "min", "max"))
recipe("PowBackward0")(with_arguments(aten.pow.Tensor_Scalar, "exponent"))


def _along_dim(operator: Callable[..., torch.Tensor]) -> Recipe:
    def make(node: Any) -> tuple[Callable[..., torch.Tensor], Sequence[Any]]:
        dim, dtype = signed(node.dim), node.dtype
        return (lambda x: operator(x, dim).to(dtype)), [node.edge(0)]

    return make


recipe("GluBackward0")(_along_dim(aten.glu.default))
recipe("CumsumBackward0")(_along_dim(aten.cumsum.default))


def _softmax(operator: Callable[..., torch.Tensor]) -> Recipe:
    def make(node: Any) -> tuple[Callable[..., torch.Tensor], Sequence[Any]]:
        dim, dtype = signed(node.dim), node.dtype
        # a wider result was asked for as an argument, which converts before it sums
        return (lambda x: operator(x if x.dtype == dtype else x.to(dtype), dim, False)), [node.edge(0)]

    return make


recipe("SoftmaxBackward0")(_softmax(aten._softmax.default))
recipe("LogSoftmaxBackward0")(_softmax(aten._log_softmax.default))


@recipe("MeanBackward1")
def _mean(node: Any) -> Any:
    dims, keepdim = [signed(dim) for dim in node.dim or ()], node.keepdim
    return (lambda x: x.mean(dims, keepdim)), [node.edge(0)]


@recipe("SumBackward1")
def _sum(node: Any) -> Any:
    dims, keepdim = [signed(dim) for dim in node.dim or ()], node.keepdim
    return (lambda x: x.sum(dims, keepdim)), [node.edge(0)]
