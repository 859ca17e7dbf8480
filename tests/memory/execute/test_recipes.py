"""Every recipe repeats its operator to the bit, and a value that has to be kept says why."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import lightning_dpx as dpx
from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.memory.execute.recipes import RECIPES, NotRecomputable, recipe_for
from lightning_dpx.memory.execute.saved_tensor_hooks import Node, Rematerialisation
from lightning_dpx.memory.execute.values import read
from lightning_dpx.memory.plan.problem import Choice, Planner, Problem
from tests.memory.execute.test_own_backwards import SECOND_ORDER, node_of
from tests.memory.plan.test_planning import _Everything, train

Function = Callable[["Probe", Tensor], Tensor]

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

MORE: dict[str, Function] = {
    "AdaptiveAvgPool2D": lambda _, x: F.adaptive_avg_pool2d(x, 4),
    "Add": lambda p, x: torch.add(x, p.x, alpha=2),
    "Addcmul": lambda p, x: torch.addcmul(x, x, p.x, value=0.5),
    "Addmm": lambda p, x: F.linear(x, p.matrix, p.bias),
    "Alias": lambda _, x: torch.ops.aten.alias(x),
    "AvgPool2D": lambda _, x: F.avg_pool2d(x, 2),
    "Baddbmm": lambda _, x: torch.baddbmm(x[:, 0], x[:, 1], x[:, 2], alpha=0.5),
    "Bmm": lambda _, x: torch.bmm(x[:, 0], x[:, 1]),
    "Cat": lambda p, x: torch.cat([x, p.x], -1),
    "Clamp": lambda _, x: x.clamp(-0.5, 0.5),
    "ConstantPadNd": lambda _, x: F.pad(x, (1, 2)),
    "Convolution": lambda p, x: F.conv2d(x, p.kernel, p.bias, padding=1, stride=2),
    "Cumsum": lambda _, x: x.cumsum(-1),
    "Div": lambda p, x: x / p.x,
    "Elu": lambda _, x: F.elu(x, 0.7),
    "Embedding": lambda p, _: F.embedding(p.indices, p.matrix),
    "Expand": lambda p, _: p.bias.expand(512, 8),
    "Gather": lambda p, x: x.gather(0, p.indices.view(64, 8, 1, 1).expand(-1, -1, 8, 8)[:16] % 16),
    "Gelu": lambda _, x: F.gelu(x, approximate="tanh"),
    "Glu": lambda _, x: F.glu(x, 1),
    "Hardtanh": lambda _, x: F.relu6(x),
    "LeakyRelu": lambda _, x: F.leaky_relu(x, 0.2),
    "LogSoftmax": lambda _, x: x.log_softmax(1),
    "MaxPool2DWithIndices": lambda _, x: F.max_pool2d(x, 2),
    "Mean": lambda _, x: x.repeat(4, 1, 1, 4).mean((1,), keepdim=True),
    "Mm": lambda _, x: x.flatten(1) @ x.flatten(1)[:, :512].T.contiguous() @ x.flatten(1),
    "Mul": lambda p, x: x * p.x,
    "NativeBatchNorm": lambda p, x: F.batch_norm(x, p.running, p.running + 1, p.bias, p.bias, training=True),
    "NativeDropout": lambda _, x: torch.native_dropout(x, 0.3, True)[0],
    "NativeGroupNorm": lambda p, x: F.group_norm(x, 4, p.bias, p.bias, 1e-3),
    "NativeLayerNorm": lambda p, x: F.layer_norm(x, (8,), p.bias, p.bias, 1e-6),
    "Permute": lambda _, x: x.permute(0, 2, 3, 1),
    "PixelShuffle": lambda _, x: F.pixel_shuffle(x, 2),
    "PixelUnshuffle": lambda _, x: F.pixel_unshuffle(x, 2),
    "Pow": lambda _, x: x.pow(3),
    "PreluKernel": lambda p, x: F.prelu(x, p.bias),
    "ReflectionPad2D": lambda _, x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "Repeat": lambda _, x: x.repeat(2, 1, 1, 1),
    "ReplicationPad2D": lambda _, x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "ScaledDotProductFlashAttentionForCpu": lambda _, x: F.scaled_dot_product_attention(x, x.sin(), x, is_causal=True),
    "Select": lambda _, x: x.select(1, -2),
    "Slice": lambda _, x: x[:, 1:-1],
    "Softmax": lambda _, x: x.softmax(-2),
    "Softplus": lambda _, x: F.softplus(x, 2.0),
    "Split": lambda _, x: x.split(3, 1)[1],
    "SplitWithSizes": lambda _, x: x.split([3, 5], -3)[1],
    "Squeeze": lambda _, x: x.unsqueeze(0).squeeze(),
    "Stack": lambda p, x: torch.stack([x, p.x], -1),
    "Sub": lambda p, x: torch.sub(x, p.x, alpha=2),
    "Sum": lambda _, x: x.sum(1),
    "T": lambda _, x: x.flatten(1).t(),
    "ToCopy": lambda _, x: x.to(torch.bfloat16),
    "Transpose": lambda _, x: x.transpose(1, -1),
    "Tril": lambda _, x: x.tril(1),
    "Triu": lambda _, x: x.triu(-1),
    "Unbind": lambda _, x: x.unbind(1)[3],
    "UnsafeSplit": lambda _, x: torch.unsafe_split(x, 3, 1)[0],
    "UnsafeSplitWithSizes": lambda _, x: torch.unsafe_split_with_sizes(x, [2, 6], 1)[1],
    "UnsafeView": lambda _, x: x.transpose(1, 2).flatten(1),
    "Unsqueeze": lambda _, x: x.unsqueeze(2),
    "UpsampleBilinear2D": lambda _, x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "UpsampleNearest2D": lambda _, x: F.interpolate(x, scale_factor=2.0),
    "View": lambda _, x: x.view(64, -1),
    "Where": lambda p, x: torch.where(p.x > 0, x, p.x),
}  # fmt: skip
# as (16, 8, 8, 8), (16, 8, 512) and (2, 8, 8, 8, 8)
_line, _cube = (lambda x: x.flatten(2)), (lambda x: x.view(2, 8, 8, 8, 8))
_complex = lambda p, x: torch.complex(x, p.x)  # noqa: E731
MORE |= {
    "Acosh": lambda _, x: torch.acosh(1 / x),
    "AdaptiveAvgPool3D": lambda _, x: F.adaptive_avg_pool3d(_cube(x), 5),
    "AdaptiveMaxPool2D": lambda _, x: F.adaptive_max_pool2d(x, 5),
    "AdaptiveMaxPool3D": lambda _, x: F.adaptive_max_pool3d(_cube(x), 5),
    "Addcdiv": lambda p, x: torch.addcdiv(x, x, p.x, value=0.5),
    "AffineGridGenerator": lambda _, x: F.affine_grid(x[:, 0, :2, :3], [16, 3, 8, 8], align_corners=True),
    "Amax": lambda _, x: x.amax((1,)),
    "Amin": lambda _, x: x.amin((1,), keepdim=True),
    "Angle": lambda p, x: _complex(p, x).angle(),
    "Atan2": lambda p, x: torch.atan2(x, p.x),
    "AvgPool3D": lambda _, x: F.avg_pool3d(_cube(x), 2, ceil_mode=True),
    "Celu": lambda _, x: F.celu(x, 0.7),
    "ChannelShuffle": lambda _, x: F.channel_shuffle(x, 2),
    "ClampBackward0": lambda p, x: torch.clamp(x, max=p.x),
    "ClampMax": lambda _, x: torch.clamp_max(x, 0.5),
    "ClampMin": lambda _, x: torch.clamp_min(x, 0.5),
    "Col2Im": lambda _, x: F.fold(x.view(16, 8 * 4, 16), (8, 8), 2, stride=2),
    "Complex": _complex,
    "Conj": lambda p, x: _complex(p, x).conj(),
    "Cummax": lambda _, x: x.cummax(-1)[0],
    "Cummin": lambda _, x: x.cummin(1)[0],
    "Cumprod": lambda _, x: x.cumprod(-1),
    "DiagEmbed": lambda _, x: torch.diag_embed(x, 1, -2, -1),
    "Diagonal": lambda _, x: x.repeat(2, 1, 1, 1).diagonal(1, 1, -1),
    "DivBackward1": lambda _, x: torch.ops.aten.div.Scalar(x, 3),
    "FftC2C": lambda p, x: torch.fft.ifft2(_complex(p, x)),
    "FftC2R": lambda p, x: torch.fft.irfft(_complex(p, x), n=9),
    "FftR2C": lambda _, x: torch.fft.rfft(x, norm="ortho"),
    "Flip": lambda _, x: x.flip(1, -1),
    "FractionalMaxPool2D": lambda _, x: F.fractional_max_pool2d(x, 2, output_size=6),
    "FractionalMaxPool3D": lambda _, x: F.fractional_max_pool3d(_cube(x), 2, output_size=6),
    "GridSampler2D": lambda p, x: F.grid_sample(x, p.x[:, :2].permute(0, 2, 3, 1), "bicubic", "border", True),
    "GridSampler3D": lambda p, x: F.grid_sample(_cube(x), _cube(p.x)[..., :3], align_corners=False),
    "Hardshrink": lambda _, x: F.hardshrink(x, 0.4),
    "Hypot": lambda p, x: torch.hypot(x, p.x),
    "Im2Col": lambda _, x: F.unfold(x, 3, padding=1, stride=2),
    "Index": lambda p, x: x[:, p.indices[:16, 0], :, p.indices[:16, 1]],
    "IndexSelect": lambda p, x: x.index_select(1, p.indices[0]),
    "Kthvalue": lambda _, x: x.kthvalue(2, 1, keepdim=True)[0],
    "LerpBackward0": lambda p, x: torch.lerp(x, p.x, 0.3),
    "LerpBackward1": lambda p, x: torch.lerp(x, p.x, p.x.cos()),
    "LinalgCross": lambda p, x: torch.linalg.cross(x[:, :3], p.x[:, :3], dim=1),
    "LinalgVectorNorm": lambda _, x: x.norm(3, dim=1, keepdim=True),
    "Logaddexp": lambda p, x: torch.logaddexp(x, p.x),
    "Logcumsumexp": lambda _, x: x.logcumsumexp(-2),
    "Logit": lambda _, x: torch.logit(x, 0.2),
    "Logsumexp": lambda _, x: x.repeat(1, 1, 4, 1).logsumexp((1,)),
    "MaskedFillBackward1": lambda p, x: x.masked_fill(p.x > 0.5, p.bias[0]),
    "MaskedSelect": lambda _, x: x.masked_select(x > 0.3),
    "Max": lambda _, x: x.max(1)[0],
    "MaxPool3DWithIndices": lambda _, x: F.max_pool3d(_cube(x), 2, stride=1),
    "Maximum": lambda p, x: torch.maximum(x, p.x),
    "MedianBackward1": lambda _, x: x.median(-1, keepdim=True)[0],
    "Min": lambda _, x: x.min(2, keepdim=True)[0],
    "Minimum": lambda p, x: torch.minimum(x, p.x),
    "Mode": lambda _, x: x.mode(1)[0],
    "MulBackward1": lambda _, x: torch.ops.aten.mul.Scalar(x, 3),
    "Mv": lambda p, x: torch.mv(x.reshape(1024, 8), p.bias),
    "Polar": lambda p, x: torch.polar(x, p.x),
    "PowBackward1": lambda p, x: torch.pow(x, p.x),
    "PowBackward2": lambda _, x: torch.pow(2, x),
    "ProdBackward1": lambda _, x: x.prod(1),
    "ReflectionPad1D": lambda _, x: F.pad(_line(x), (1, 2), mode="reflect"),
    "ReflectionPad3D": lambda _, x: F.pad(_cube(x), (1, 2, 1, 1, 1, 1), mode="reflect"),
    "ReplicationPad1D": lambda _, x: F.pad(_line(x), (1, 2), mode="replicate"),
    "ReplicationPad3D": lambda _, x: F.pad(_cube(x), (1, 2, 1, 1, 1, 1), mode="replicate"),
    "Roll": lambda _, x: x.roll((1, -2), (1, -1)),
    "Rot90": lambda _, x: x.rot90(1, (2, 3)),
    "RsubBackward0": lambda p, x: torch.rsub(x, p.x, alpha=2),
    "SafeSoftmax": lambda _, x: torch.ops.aten._safe_softmax(x, 1),
    "Scatter": lambda p, x: x.scatter(1, p.indices.view(16, 4, 8, 1).expand(-1, -1, -1, 8), p.x[:, :4].cos()),
    "Softshrink": lambda _, x: F.softshrink(x, 0.4),
    "Sort": lambda _, x: torch.sort(x, 1, descending=True)[0],
    "SortBackward1": lambda _, x: torch.sort(x, dim=1, stable=True)[0],
    "Std": lambda _, x: x.std(1),
    "StdMean": lambda _, x: torch.std_mean(x, 1)[0],
    "Topk": lambda _, x: x.topk(3, 1)[0],
    "Unfold": lambda _, x: x.unfold(2, 3, 2),
    "UpsampleBicubic2D": lambda _, x: F.interpolate(x, size=13, mode="bicubic"),
    "UpsampleBicubic2DAa": lambda _, x: F.interpolate(x, scale_factor=1.5, mode="bicubic", antialias=True),
    "UpsampleBilinear2DAa": lambda _, x: F.interpolate(x, scale_factor=1.5, mode="bilinear", antialias=True),
    "UpsampleLinear1D": lambda _, x: F.interpolate(_line(x), scale_factor=1.5, mode="linear"),
    "UpsampleNearest1D": lambda _, x: F.interpolate(_line(x), scale_factor=1.5),
    "UpsampleNearest3D": lambda _, x: F.interpolate(_cube(x), scale_factor=1.5),
    "UpsampleNearestExact1D": lambda _, x: F.interpolate(_line(x), scale_factor=1.5, mode="nearest-exact"),
    "UpsampleNearestExact2D": lambda _, x: F.interpolate(x, scale_factor=1.5, mode="nearest-exact"),
    "UpsampleNearestExact3D": lambda _, x: F.interpolate(_cube(x), scale_factor=1.5, mode="nearest-exact"),
    "UpsampleTrilinear3D": lambda _, x: F.interpolate(_cube(x), scale_factor=1.5, mode="trilinear"),
    "Var": lambda _, x: x.var(1, correction=0),
    "VarMean": lambda _, x: torch.var_mean(x, 1, keepdim=True)[1],
    "ViewAsComplex": lambda _, x: torch.view_as_complex(x.reshape(16, 8, 8, 4, 2)),
    "ViewAsReal": lambda p, x: torch.view_as_real(_complex(p, x)),
    "WeightNormInterface": lambda p, x: torch._weight_norm(x, p.bias.view(8, 1, 1, 1).repeat(2, 1, 1, 1), 0),
    "Xlogy": lambda p, x: torch.xlogy(x, p.x),
}  # fmt: skip
# with operands that are not part of the graph
OUTSIDE: dict[str, Function] = {
    "Add": lambda _, x: 1 + x,
    "Add of a mask": lambda p, x: x + p.mask,
    "Add of a frozen parameter": lambda p, x: torch.add(p.frozen, x, alpha=2),
    "Add in place": lambda p, x: x.cos().add_(p.frozen),
    "Add of a view": lambda p, x: x + p.table[:, :8],
    "AddBackward0": lambda p, x: F.linear(x.transpose(1, 2), p.matrix, p.frozen),
    "Addcmul": lambda p, x: torch.addcmul(p.frozen, x, p.x),
    "Addmm": lambda p, x: F.linear(x, p.matrix, p.frozen),
    "Baddbmm": lambda p, x: torch.baddbmm(p.table[:, :8], x[:, 0], x[:, 1], beta=0.5),
    "Cat": lambda p, x: torch.cat([p.table[:, :1].expand(16, 1, 8, 8), x, p.table[:, :1].expand(16, 2, 8, 8)], 1),
    "ConstantPadNd": lambda _, x: F.pad(x, (1, 2), value=3.0),
    "ConstantPadNd of the operator": lambda _, x: torch.constant_pad_nd(x, (1, 2), 3.0),
    "Convolution": lambda p, x: F.conv2d(x, p.kernel, p.frozen),
    "Convolution transposed": lambda p, x: F.conv_transpose2d(x, p.kernel, bias=p.frozen),
    "MaskedFill": lambda p, x: x.masked_fill(p.mask > 0, -1e9),
    "MaskedFill with a tensor": lambda p, x: torch.masked_fill(x, p.mask > 0, p.mask[0, 0]),
    "NanToNum": lambda p, x: torch.nan_to_num(x.masked_fill(p.mask > 0, math.inf), posinf=1.0, nan=2.0),
    "NativeBatchNorm": lambda p, x: F.batch_norm(x, p.running, p.running + 1, p.frozen, p.frozen, training=True),
    "NativeBatchNorm in evaluation": lambda p, x: F.batch_norm(x, p.running, p.running + 1, p.frozen, p.frozen),
    "NativeGroupNorm": lambda p, x: F.group_norm(x, 4, p.bias, p.frozen, 1e-3),
    "NativeLayerNorm": lambda p, x: F.layer_norm(x, (8,), p.frozen, p.frozen, 0.123),
    "NativeLayerNorm without a bias": lambda p, x: F.layer_norm(x, (8,), p.bias),
    "RsubBackward1": lambda _, x: 1 - x,
    "RsubBackward1 of twice": lambda _, x: torch.rsub(x, 3, alpha=2),
    "Stack": lambda p, x: torch.stack([x, p.table[:, :1].expand(16, 8, 8, 8)], 1),
    "Sub": lambda _, x: x - 1,
    "Sub from a tensor": lambda p, x: p.frozen - x,
    "Where": lambda p, x: torch.where(p.mask > 0, x, -1e9),
    "Where as a method": lambda p, x: p.mask.where(p.mask > 0, x),
}  # fmt: skip
FUNCTIONS: dict[str, Function] = {**{name: lambda _, x, f=f: f(x) for name, f in UNARY.items()}, **MORE, **OUTSIDE}
# made by other devices, other builds of torch, or autograd itself
# Views that are made in place, of a tensor that is no view itself.
FUNCTIONS |= {
    "SqueezeBackward3": lambda m, x: x.sum(1, keepdim=True).squeeze_(),
    "SqueezeBackward4": lambda m, x: x.sum(1, keepdim=True).squeeze_(1),
    "SqueezeBackward5": lambda m, x: x.sum(1, keepdim=True).squeeze_((1,)),
    "UnsqueezeBackward1": lambda m, x: (x * 2).unsqueeze_(1),
    "TransposeBackward1": lambda m, x: (x * 2).transpose_(1, 2),
    "TBackward1": lambda m, x: (x.flatten(1) * 2).t_(),
}
ELSEWHERE = {
    "BackwardHookFunctionBackward", "CudnnBatchNormBackward0", "LinearBackward0", "MiopenBatchNormBackward0",
    "ReshapeAliasBackward0", "SqueezeBackward1", "SqueezeBackward2", "ClampBackward1", "MeanBackward1", "SumBackward1",
    "CudnnGridSamplerBackward0", "FusedRmsNormBackward0", "ScaledDotProductCudnnAttentionBackward0",
    "ScaledDotProductEfficientAttentionBackward0", "ScaledDotProductFlashAttentionBackward0",
    "ThnnFusedGruCellBackward0", "ThnnFusedLstmCellBackward0",
    *map(node_of, SECOND_ORDER),
}  # fmt: skip


def _node_name(name: str) -> str:
    first = name.split()[0]
    return first if "Backward" in first else f"{first}Backward0"


class Probe(nn.Module):
    """One operator on (16, 8, 8, 8), followed by one that saves its result."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.x, self.matrix = nn.Parameter(torch.rand(16, 8, 8, 8) + 0.1), nn.Parameter(torch.randn(8, 8))
        self.kernel, self.bias = nn.Parameter(torch.randn(8, 8, 3, 3)), nn.Parameter(torch.rand(8) + 0.5)
        self.frozen = nn.Parameter(torch.rand(8) + 0.5, requires_grad=False)
        self.table = nn.Parameter(torch.rand(1, 12, 8), requires_grad=False)
        self.register_buffer("large", torch.rand(16, 8, 8, 8))
        self.register_buffer("counter", torch.ones(1))
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)))
        self.register_buffer("running", torch.zeros(8))
        self.register_buffer("indices", torch.randint(8, (64, 8)))
        self.function = function
        with torch.no_grad():
            self.weight = nn.Parameter(torch.randn_like(self.result()))

    def result(self) -> Tensor:
        return self.function(self, torch.sin(self.x)).neg()

    def count(self, x: Tensor) -> Tensor:
        result = x + self.counter
        self.counter += 1
        return result

    def forward(self, _: Tensor) -> Tensor:
        result = self.result() * self.weight
        return torch.view_as_real(result) if result.is_complex() else result.float()


def test_every_recipe_has_an_example() -> None:
    names = {_node_name(name) for name in FUNCTIONS} | ELSEWHERE
    assert set(RECIPES) <= names


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_recipe_repeats_its_operator(name: str) -> None:
    torch.manual_seed(0)
    module = Probe(FUNCTIONS[name])
    node = module.result().grad_fn
    assert node is not None
    source = node.next_functions[0][0]
    made_by = source.name() if source is not None else ""
    wanted = _node_name(name)[:-1]
    assert made_by.startswith(wanted) or (wanted == "AddmmBackward" and made_by == "ViewBackward0"), made_by
    plan = dpx.search_plan(module, torch.ones(1), planner=_Everything())
    assert "NegBackward0" in {d.operator for d in plan.decisions if d.action == "recompute"}, "its result was refused"
    torch.manual_seed(0)
    plain = Probe(FUNCTIONS[name])
    plain.load_state_dict(module.state_dict())
    applied = dpx.apply_plan(module, plan)
    assert all(map(torch.equal, train(module, torch.ones(1)), train(plain, torch.ones(1))))
    assert not applied.not_found


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda _, x: torch.special.i0(x), "no recipe for I0Backward0"),
        (lambda _, x: torch.ops.aten.add(x, 1), "an operand of AddBackward0 is not part of the graph"),
        (lambda _, x: x + torch.ones(1, 8, 8, 8), "an operand outside of the graph is gone"),
        (lambda p, x: p.count(x), "an operand outside of the graph was changed in place"),
        (lambda p, x: x + p.large, "an operand outside of the graph is as large as the result"),
        (lambda p, x: F.group_norm(x, 4, p.bias, None), "a norm with a weight and no bias"),
        (
            lambda _, x: torch.native_layer_norm(x, (8,), None, None, 0.1)[0],
            "an operand of NativeLayerNormBackward0 is",
        ),
    ],
)
def test_what_has_no_recipe_is_kept_and_says_why(function: Function, why: str) -> None:
    torch.manual_seed(0)
    module = Probe(function)
    seen: list[str] = []

    class Look(Planner):
        name = "look"

        def choose(self, problem: Problem, budget: int | None) -> Choice:
            seen.extend(value.refused for value in problem.profile.values)
            return Choice(frozenset(problem.droppable))

    plan = dpx.search_plan(module, torch.ones(1), planner=Look())
    assert any(why in refused for refused in seen), set(seen)
    plain = Probe(function)
    plain.load_state_dict(module.state_dict())
    dpx.apply_plan(module, plan)
    assert all(map(torch.equal, train(module, torch.ones(1)), train(plain, torch.ones(1))))


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
        values = Rematerialisation(CallNames(nn.Identity()))
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
    _check_on_a_gpu(Attention().cuda().bfloat16(), x, "ScaledDotProduct")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["lstm", "gru", "rms norm"])
def test_fused_cells_and_norms_on_a_gpu(kind: str) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru, self.norm = nn.LSTMCell(64, 64), nn.GRUCell(64, 64), nn.RMSNorm(64)

        def forward(self, x: Tensor) -> Tensor:
            h = c = x
            for _ in range(3):
                if kind == "lstm":
                    h, c = self.lstm(x, (h, c))
                else:
                    h = self.gru(x, h) if kind == "gru" else torch.sin(self.norm(h))
            return h * c.cos()

    node = {"lstm": "ThnnFusedLstmCell", "gru": "ThnnFusedGruCell", "rms norm": "FusedRmsNorm"}[kind]
    _check_on_a_gpu(Cell().cuda(), torch.rand(64, 64, device="cuda", requires_grad=True), node)


def _check_on_a_gpu(module: nn.Module, x: Tensor, operator: str) -> None:
    plain = copy.deepcopy(module)
    plan = dpx.search_plan(module, x, planner=_Everything())
    applied = dpx.apply_plan(module, plan)
    for one, other in zip(train(module, x), train(plain, x), strict=True):
        torch.testing.assert_close(one, other)
    assert not applied.not_found
    assert any(d.operator.startswith(operator) for d in plan.decisions if d.action == "recompute")
