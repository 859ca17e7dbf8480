"""Recipes of operators on one input, element by element or along a dim."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from lightning_dpx.memory.execute.recipes.registry import Recipe, argument, aten, recipe, signed, with_arguments

# By node: what it repeats. The input comes along the edge: some of these nodes save their result in
# place of it (relu, exp), some save nothing (neg).
_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Silu": F.silu, "Mish": F.mish, "Exp": torch.exp,
    "Expm1": torch.expm1, "Log": torch.log, "Log1P": torch.log1p, "Sqrt": torch.sqrt, "Rsqrt": torch.rsqrt,
    "Sin": torch.sin, "Cos": torch.cos, "Erf": torch.erf, "Neg": torch.neg, "Abs": torch.abs,
    "Reciprocal": torch.reciprocal, "Hardswish": F.hardswish, "Hardsigmoid": F.hardsigmoid, "LogSigmoid": F.logsigmoid,
    "Alias": torch.clone, "Log2": torch.log2, "Log10": torch.log10, "Exp2": torch.exp2,
    "Tan": torch.tan, "Sinh": torch.sinh, "Cosh": torch.cosh, "Asin": torch.asin, "Acos": torch.acos,
    "Atan": torch.atan, "Asinh": torch.asinh, "Acosh": torch.acosh, "Atanh": torch.atanh, "Erfc": torch.erfc,
    "Erfinv": torch.erfinv, "Lgamma": torch.lgamma, "Digamma": torch.digamma, "Sinc": torch.sinc,
    "Sign": torch.sign, "Floor": torch.floor, "Ceil": torch.ceil, "Trunc": torch.trunc, "Frac": torch.frac,
    "Round": torch.round, "Angle": torch.angle, "Conj": torch.conj_physical,
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
recipe("ClampMinBackward0")(with_arguments(aten.clamp_min.default, "min"))
recipe("ClampMaxBackward0")(with_arguments(aten.clamp_max.default, "max"))
recipe("CeluBackward0")(with_arguments(aten.celu.default, "alpha"))
recipe("HardshrinkBackward0")(with_arguments(aten.hardshrink.default, "lambd"))
recipe("SoftshrinkBackward0")(with_arguments(aten.softshrink.default, "lambd"))
recipe("LogitBackward0")(with_arguments(aten.logit.default, "eps"))
recipe("MulBackward1")(with_arguments(aten.mul.Scalar, "other"))
recipe("DivBackward1")(with_arguments(aten.div.Scalar, "other"))
recipe("PowBackward0")(with_arguments(aten.pow.Tensor_Scalar, "exponent"))


def _along_dim(operator: Callable[..., torch.Tensor]) -> Recipe:
    def make(node: Any) -> tuple[Callable[..., torch.Tensor], Sequence[Any]]:
        dim = signed(node.dim)
        dtype = node.dtype
        # Another dtype was asked for as an argument, which converts before it sums.
        return (lambda x: operator(x.to(dtype), dim)), [node.edge(0)]

    return make


recipe("GluBackward0")(_along_dim(aten.glu.default))
recipe("CumsumBackward0")(_along_dim(aten.cumsum.default))
recipe("CumprodBackward0")(_along_dim(aten.cumprod.default))


def _softmax(operator: Callable[..., torch.Tensor]) -> Recipe:
    def make(node: Any) -> tuple[Callable[..., torch.Tensor], Sequence[Any]]:
        dim = signed(node.dim)
        dtype = node.dtype
        # A wider result was asked for as an argument, which converts before it sums.
        return (lambda x: operator(x if x.dtype == dtype else x.to(dtype), dim, False)), [node.edge(0)]

    return make


recipe("SoftmaxBackward0")(_softmax(aten._softmax.default))
recipe("LogSoftmaxBackward0")(_softmax(aten._log_softmax.default))


@recipe("SafeSoftmaxBackward0")
def _safe_softmax(node: Any) -> Any:
    dim = signed(node.dim)
    dtype = node.dtype
    return (lambda x: aten._safe_softmax.default(x, dim, dtype)), [node.edge(0)]


@recipe("NanToNumBackward0")
def _nan_to_num(node: Any) -> Any:
    # The call has noted what nan, inf and -inf become.
    inputs = [node.saved("self", edge=0), *(node.constant(index) for index in range(3))]
    return aten.nan_to_num.default, inputs


@recipe("PowBackward2")
def _power_of_number(node: Any) -> Any:
    base = node.self  # a number
    return (lambda x: torch.pow(base, x)), [node.saved("exponent", edge=0)]


# ---- along a dim ----

recipe("LogcumsumexpBackward0")(with_arguments(aten.logcumsumexp.default, "dim"))
recipe("AmaxBackward0")(with_arguments(aten.amax.default, "dim", "keepdim"))
recipe("AminBackward0")(with_arguments(aten.amin.default, "dim", "keepdim"))
recipe("LogsumexpBackward0")(with_arguments(aten.logsumexp.default, "dim", "keepdim"))


def _reduced(operator: Callable[..., torch.Tensor], *arguments: str) -> Recipe:
    """A recipe of one tensor that is reduced in the dtype of the result."""
    # A dtype that was asked for is not noted by the node, and converts before it reduces.

    def make(node: Any) -> tuple[Callable[..., torch.Tensor], Sequence[Any]]:
        given = [argument(node, name) for name in arguments]
        dtype = node.dtype

        def reduce(x: torch.Tensor) -> torch.Tensor:
            # A norm of complex numbers is real, but torch takes only complex dtypes for them.
            wanted = None if x.is_complex() else dtype
            return operator(x, *given, dtype=wanted)

        return reduce, [node.edge(0)]

    return make


recipe("ProdBackward1")(_reduced(aten.prod.dim_int, "dim", "keepdim"))
recipe("LinalgVectorNormBackward0")(_reduced(aten.linalg_vector_norm.default, "ord", "dim", "keepdim"))
recipe("MeanBackward1")(_reduced(aten.mean.dim, "dim", "keepdim"))
recipe("SumBackward1")(_reduced(aten.sum.dim_IntList, "dim", "keepdim"))


def _spread(operator: Callable[..., Any]) -> Recipe:
    def make(node: Any) -> tuple[Callable[..., torch.Tensor], Sequence[Any]]:
        rest = {name: argument(node, name) for name in ("dim", "correction", "keepdim")}
        output = node.output

        def spread(x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor | Sequence[torch.Tensor] = operator(x, **rest)
            if isinstance(result, torch.Tensor):
                return result
            selected: torch.Tensor = result[output]
            return selected

        return spread, [node.edge(0)]

    return make


recipe("VarBackward0")(_spread(torch.var))
recipe("StdBackward0")(_spread(torch.std))
recipe("VarMeanBackward0")(_spread(torch.var_mean))
recipe("StdMeanBackward0")(_spread(torch.std_mean))


@recipe("SortBackward0", "SortBackward1", "TopkBackward0", "CummaxBackward0", "CumminBackward0")
@recipe("MaxBackward0", "MinBackward0", "MedianBackward1", "KthvalueBackward0", "ModeBackward0")
def _selected(node: Any) -> Any:
    """The values stand where the saved indices say: nothing is searched again."""
    dim = argument(node, "dim")
    ndim = len(node.shape)

    def select_output(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        # Without keepdim the indices lack the dim that they are about.
        if x.ndim == ndim:
            return x.gather(dim, indices)
        return x.gather(dim, indices.unsqueeze(dim)).squeeze(dim)

    return select_output, [node.edge(0), node.saved("indices")]
