"""Operators on one tensor: every recipe repeats its operator to the bit."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.memory.execute.recipes.probe import Function, as_complex, check_recipe

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs, "Clone": torch.clone, "Cos": torch.cos, "Erf": torch.erf, "Exp": torch.exp,
    "Expm1": torch.expm1, "Hardsigmoid": F.hardsigmoid, "Hardswish": F.hardswish,
    "Log": lambda x: torch.log(x * x), "Log1P": lambda x: torch.log1p(x * x), "LogSigmoid": F.logsigmoid,
    "Mish": F.mish, "Neg": torch.neg, "Reciprocal": torch.reciprocal, "Relu": torch.relu,
    "Rsqrt": lambda x: torch.rsqrt(x * x), "Sigmoid": torch.sigmoid, "Silu": F.silu, "Sin": torch.sin,
    "Sqrt": lambda x: torch.sqrt(x * x), "Tanh": torch.tanh, "Acos": torch.acos, "Asin": torch.asin,
    "Asinh": torch.asinh, "Atan": torch.atan, "Atanh": torch.atanh, "Ceil": torch.ceil, "Cosh": torch.cosh,
    "Digamma": torch.digamma, "Erfc": torch.erfc, "Erfinv": torch.erfinv, "Exp2": torch.exp2, "Floor": torch.floor,
    "Frac": torch.frac, "Lgamma": torch.lgamma, "Log10": torch.log10, "Log2": torch.log2, "Round": torch.round,
    "Sign": torch.sign, "Sinc": torch.sinc, "Sinh": torch.sinh, "Tan": torch.tan, "Trunc": torch.trunc,
}  # fmt: skip

EXAMPLES: dict[str, Function] = {
    "Acosh": lambda _, x: torch.acosh(1 / x),
    "Alias": lambda _, x: torch.ops.aten.alias(x),
    "Amax": lambda _, x: x.amax((1,)),
    "Amin": lambda _, x: x.amin((1,), keepdim=True),
    "Angle": lambda p, x: as_complex(p, x).angle(),
    "Celu": lambda _, x: F.celu(x, 0.7),
    "ClampMax": lambda _, x: torch.clamp_max(x, 0.5),
    "ClampMin": lambda _, x: torch.clamp_min(x, 0.5),
    "Conj": lambda p, x: as_complex(p, x).conj(),
    "Cummax": lambda _, x: x.cummax(-1)[0],
    "Cummin": lambda _, x: x.cummin(1)[0],
    "Cumprod": lambda _, x: x.cumprod(-1),
    "Cumsum": lambda _, x: x.cumsum(-1),
    "DivBackward1": lambda _, x: torch.ops.aten.div.Scalar(x, 3),
    "Elu": lambda _, x: F.elu(x, 0.7),
    "Gelu": lambda _, x: F.gelu(x, approximate="tanh"),
    "Glu": lambda _, x: F.glu(x, 1),
    "Hardshrink": lambda _, x: F.hardshrink(x, 0.4),
    "Hardtanh": lambda _, x: F.relu6(x),
    "Kthvalue": lambda _, x: x.kthvalue(2, 1, keepdim=True)[0],
    "LeakyRelu": lambda _, x: F.leaky_relu(x, 0.2),
    "LinalgVectorNorm": lambda _, x: x.norm(3, dim=1, keepdim=True),
    "LogSoftmax": lambda _, x: x.log_softmax(1),
    "Logcumsumexp": lambda _, x: x.logcumsumexp(-2),
    "Logit": lambda _, x: torch.logit(x, 0.2),
    "Logsumexp": lambda _, x: x.repeat(1, 1, 4, 1).logsumexp((1,)),
    "Max": lambda _, x: x.max(1)[0],
    "Mean": lambda _, x: x.repeat(4, 1, 1, 4).mean((1,), keepdim=True),
    "MedianBackward1": lambda _, x: x.median(-1, keepdim=True)[0],
    "Min": lambda _, x: x.min(2, keepdim=True)[0],
    "Mode": lambda _, x: x.mode(1)[0],
    "MulBackward1": lambda _, x: torch.ops.aten.mul.Scalar(x, 3),
    "NanToNum": lambda p, x: torch.nan_to_num(x.masked_fill(p.mask > 0, math.inf), posinf=1.0, nan=2.0),
    "Pow": lambda _, x: x.pow(3),
    "PowBackward2": lambda _, x: torch.pow(2, x),
    "ProdBackward1": lambda _, x: x.prod(1),
    "SafeSoftmax": lambda _, x: torch.ops.aten._safe_softmax(x, 1),
    "Softmax": lambda _, x: x.softmax(-2),
    "Softplus": lambda _, x: F.softplus(x, 2.0),
    "Softshrink": lambda _, x: F.softshrink(x, 0.4),
    "Sort": lambda _, x: torch.sort(x, 1, descending=True)[0],
    "SortBackward1": lambda _, x: torch.sort(x, dim=1, stable=True)[0],
    "Std": lambda _, x: x.std(1),
    "StdMean": lambda _, x: torch.std_mean(x, 1)[0],
    "Sum": lambda _, x: x.sum(1),
    "Topk": lambda _, x: x.topk(3, 1)[0],
    "Var": lambda _, x: x.var(1, correction=0),
    "VarMean": lambda _, x: torch.var_mean(x, 1, keepdim=True)[1],
}  # fmt: skip
EXAMPLES |= {name: lambda _, x, f=f: f(x) for name, f in UNARY.items()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_recipe_repeats_its_operator(name: str) -> None:
    check_recipe(name, EXAMPLES[name])
