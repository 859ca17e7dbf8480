"""Every recipe repeats its operator to the bit, and a value that has to be kept says why."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.recompute.planner import Choice, Planner, Problem
from lightning_dpx.recompute.recipes import RECIPES
from tests.recompute.test_planning import _Everything, train

Function = Callable[["Probe", Tensor], Tensor]

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs, "Clone": torch.clone, "Cos": torch.cos, "Erf": torch.erf, "Exp": torch.exp,
    "Expm1": torch.expm1, "Hardsigmoid": F.hardsigmoid, "Hardswish": F.hardswish,
    "Log": lambda x: torch.log(x * x), "Log1P": lambda x: torch.log1p(x * x), "LogSigmoid": F.logsigmoid,
    "Mish": F.mish, "Neg": torch.neg, "Reciprocal": torch.reciprocal, "Relu": torch.relu,
    "Rsqrt": lambda x: torch.rsqrt(x * x), "Sigmoid": torch.sigmoid, "Silu": F.silu, "Sin": torch.sin,
    "Sqrt": lambda x: torch.sqrt(x * x), "Tanh": torch.tanh,
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
FUNCTIONS: dict[str, Function] = {**{name: lambda _, x, f=f: f(x) for name, f in UNARY.items()}, **MORE}
# made by other devices, other builds of torch, or autograd itself
ELSEWHERE = {
    "BackwardHookFunctionBackward", "CudnnBatchNormBackward0", "LinearBackward0", "MiopenBatchNormBackward0",
    "ReshapeAliasBackward0", "SqueezeBackward1", "SqueezeBackward2", "ClampBackward1", "MeanBackward1", "SumBackward1",
}  # fmt: skip


class Probe(nn.Module):
    """One operator on (16, 8, 8, 8), followed by one that saves its result."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.x, self.matrix = nn.Parameter(torch.rand(16, 8, 8, 8) + 0.1), nn.Parameter(torch.randn(8, 8))
        self.kernel, self.bias = nn.Parameter(torch.randn(8, 8, 3, 3)), nn.Parameter(torch.rand(8) + 0.5)
        self.register_buffer("running", torch.zeros(8))
        self.register_buffer("indices", torch.randint(8, (64, 8)))
        self.function = function
        with torch.no_grad():
            self.weight = nn.Parameter(torch.randn_like(self.result()))

    def result(self) -> Tensor:
        return self.function(self, torch.sin(self.x)).neg()

    def forward(self, _: Tensor) -> Tensor:
        return (self.result() * self.weight).float()


def test_every_recipe_has_an_example() -> None:
    names = {f"{name}Backward0" for name in FUNCTIONS} | ELSEWHERE
    assert set(RECIPES) <= names


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_recipe_repeats_its_operator(name: str) -> None:
    torch.manual_seed(0)
    module = Probe(FUNCTIONS[name])
    node = module.result().grad_fn
    assert node is not None
    source = node.next_functions[0][0]
    made_by = source.name() if source is not None else ""
    assert made_by.startswith(f"{name}Backward") or (name == "Addmm" and made_by == "ViewBackward0"), made_by
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
        (lambda _, x: x + 1, "input 1 of AddBackward0 is not part of the graph"),
        (lambda p, x: F.linear(x, p.matrix, p.bias.detach()), "input 0 of AddmmBackward0 is not part of the graph"),
        (lambda p, x: F.layer_norm(x, (8,), p.bias, None), "a weight and no bias"),
        (lambda _, x: F.layer_norm(x, (8,), eps=0.123), "an eps that is none of"),
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
