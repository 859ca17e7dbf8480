"""No recipe guesses a constant: those of a step are the ones of that step, whatever the profiled step had."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_dpx as dpx
from tests.memory.steps import DropsEverything

Function = Callable[["Varied", Tensor, Any], Tensor]


class Varied(nn.Module):
    """An operator with a constant, on (16, 8, 8, 8), whose result is saved by the next one alone."""

    def __init__(self, function: Function, constant: Any) -> None:
        super().__init__()
        self.function, self.constant = function, constant
        self.x, self.other = (nn.Parameter(torch.rand(16, 8, 8, 8) + 0.1) for _ in range(2))
        self.matrix, self.kernel = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8, 3, 3))
        self.weight, self.bias = (nn.Parameter(torch.rand(8) + 0.5) for _ in range(2))
        self.register_buffer("mean", torch.rand(8))
        self.register_buffer("mask", torch.rand(16, 8, 8, 8) > 0.5)
        self.register_buffer("indices", torch.randint(8, (16, 8, 8, 8)))

    def forward(self, _: Tensor) -> Tensor:
        result = self.function(self, torch.sin(self.x), self.constant).neg()
        result = torch.view_as_real(result) if result.is_complex() else result
        return (result * torch.linspace(-1, 1, result.shape[-1]).requires_grad_()).float().pow(2)


def _pair(x: Tensor) -> Tensor:
    return x.flatten(1)


def _volume(x: Tensor) -> Tensor:
    return x.view(2, 8, 8, 8, 8)


def _threes(x: Tensor) -> Tensor:
    return x[:9].view(3, -1, 3, 1)[:, :, :, [0, 0, 0]]


_DTYPES = (None, torch.float64)
# What the step was profiled with, then what other steps have.
CONSTANTS: dict[str, tuple[Function, Sequence[Any]]] = {
    "layer norm eps": (
        lambda m, x, c: F.layer_norm(x, (8,), m.weight, m.bias, c), (1e-5, 1e-3, 1e-9, 0.123, 0.0),
    ),
    "layer norm eps of the operator": (lambda m, x, c: torch.layer_norm(x, (8,), eps=c), (1e-5, 0.2)),
    "layer norm default eps": (
        lambda m, x, c: F.layer_norm(x, (8,), **({} if c is None else {"eps": c})), (0.1, None),
    ),
    "layer norm shape": (lambda m, x, c: F.layer_norm(x, x.shape[c:]), (-1, -2, -3)),
    "group norm": (lambda m, x, c: F.group_norm(x, c[0], m.weight, m.bias, c[1]), ((4, 1e-5), (2, 1e-3), (8, 0.1))),
    "batch norm eps": (
        lambda m, x, c: F.batch_norm(x, None, None, m.weight, m.bias, True, eps=c), (1e-5, 1e-3, 0.3),
    ),
    "batch norm in evaluation": (
        lambda m, x, c: F.batch_norm(x, m.mean * c, m.mean + c, m.weight, m.bias, eps=c), (1e-5, 1e-3, 0.3),
    ),
    "batch norm, trained or not": (
        lambda m, x, c: F.batch_norm(x, m.mean.clone(), m.mean + 1, m.weight, m.bias, c), (True, False),
    ),
    "instance norm": (lambda m, x, c: F.instance_norm(x, eps=c), (1e-5, 0.2)),
    "weight norm": (lambda m, x, c: torch._weight_norm(x, x.new_ones(16, 1, 1, 1) * m.weight[0], c), (0,)),
    "dropout": (lambda m, x, c: F.dropout(x, c), (0.1, 0.7, 0.25)),
    "dropout of the operator": (
        lambda m, x, c: torch.native_dropout(x, c[0], c[1])[0], ((0.3, True), (0.3, False), (0.6, True)),
    ),
    "attention": (
        lambda m, x, c: F.scaled_dot_product_attention(x, x.cos(), x, is_causal=c[0], scale=c[1]),
        ((False, None), (True, 0.3), (False, 2.0)),
    ),
    "add": (lambda m, x, c: torch.add(x, m.other, alpha=c), (1, 2, 0.5)),
    "add a number": (lambda m, x, c: x + c, (1, 2.5, True)),
    "add a number in place": (lambda m, x, c: x.cos().add_(c), (1, 2.5)),
    "sub": (lambda m, x, c: torch.sub(x, m.other, alpha=c), (1, 2)),
    "sub a number": (lambda m, x, c: x - c, (1, 2.5)),
    "rsub": (lambda m, x, c: torch.rsub(x, c[0], alpha=c[1]), ((1, 1), (2.5, 3))),
    "rsub of tensors": (lambda m, x, c: torch.rsub(x, m.other, alpha=c), (1, 3)),
    "mul": (lambda m, x, c: x * c, (2, 0.3, 1.5)),
    "mul a scalar": (lambda m, x, c: torch.ops.aten.mul.Scalar(x, c), (2, 0.3)),
    "mul a complex number": (lambda m, x, c: x * c, (2.0, 2j, 1 + 3j)),
    "div": (lambda m, x, c: x / c, (2, 0.3)),
    "div a scalar": (lambda m, x, c: torch.ops.aten.div.Scalar(x, c), (2, 0.3)),
    "div of a number": (lambda m, x, c: c / x, (2, 0.3)),
    "addcmul": (lambda m, x, c: torch.addcmul(x, x, m.other, value=c), (1, 0.5)),
    "addcdiv": (lambda m, x, c: torch.addcdiv(x, x, m.other, value=c), (1, 0.5)),
    "lerp": (lambda m, x, c: torch.lerp(x, m.other, c), (0.1, 0.9)),
    "masked fill": (lambda m, x, c: x.masked_fill(m.mask, c), (-1e9, 3, 0.5)),
    "where": (lambda m, x, c: torch.where(m.mask, x, c), (-1e9, 3, 0.5)),
    "nan to num": (lambda m, x, c: torch.nan_to_num(x.where(m.mask, torch.nan), c), (0.0, 2.0)),
    "cat": (lambda m, x, c: torch.cat([x, m.other], c), (1, -1, 0)),
    "stack": (lambda m, x, c: torch.stack([x, m.other], c), (1, -1, 0)),
    "cross": (lambda m, x, c: torch.linalg.cross(_threes(x), _threes(m.other), dim=c), (0, 2, -1)),
    "clamp": (lambda m, x, c: x.clamp(*c), ((-0.5, 0.5), (0.1, 0.3), (None, 0.2), (0.4, None))),
    "clamp min": (lambda m, x, c: x.clamp_min(c), (0.2, 0.4)),
    "clamp max": (lambda m, x, c: x.clamp_max(c), (0.2, 0.4)),
    "clamp by tensors": (
        lambda m, x, c: torch.clamp(x, **{c: m.other}), ("min", "max"),
    ),
    "addmm": (
        lambda m, x, c: torch.addmm(m.bias, x.view(-1, 8), m.matrix, alpha=c[0], beta=c[1]), ((1, 1), (2, 3), (1, 0.5)),
    ),
    "baddbmm": (
        lambda m, x, c: torch.baddbmm(x[:, 0], x[:, 1], x[:, 2], alpha=c[0], beta=c[1]), ((1, 1), (2, 3)),
    ),
    "convolution": (
        lambda m, x, c: F.conv2d(x, m.kernel, m.bias, **c),
        ({"padding": 1}, {"stride": 2}, {"dilation": 2}, {"padding": "same"}),
    ),
    "grouped convolution": (
        lambda m, x, c: F.conv2d(x, m.kernel[:, : 8 // c], groups=c), (1, 2, 4),
    ),
    "transposed convolution": (
        lambda m, x, c: F.conv_transpose2d(x, m.kernel, m.bias, stride=2, output_padding=c), (0, 1),
    ),
    "gather": (lambda m, x, c: x.gather(c, m.indices), (1, 2, -1)),
    "index select": (lambda m, x, c: x.index_select(c, m.indices[0, 0, 0]), (1, 2, -1)),
    "index": (lambda m, x, c: x[c], ((slice(None), slice(1, 3)), (slice(None), 2), ([0, 3, 5],))),
    "scatter": (lambda m, x, c: x.scatter(c, m.indices, m.other.cos()), (1, 2, -1)),
    "gelu": (lambda m, x, c: F.gelu(x, approximate=c), ("none", "tanh")),
    "leaky relu": (lambda m, x, c: F.leaky_relu(x - 0.5, c), (0.01, 0.3)),
    "elu": (lambda m, x, c: F.elu(x - 0.5, c), (1.0, 0.3)),
    "selu": (lambda m, x, c: (F.selu if c else F.elu)(x - 0.5), (True, False)),
    "celu": (lambda m, x, c: F.celu(x - 0.5, c), (1.0, 0.3)),
    "softplus": (lambda m, x, c: F.softplus(x, *c), ((1, 20), (3, 1))),
    "hardtanh": (lambda m, x, c: F.hardtanh(x, *c), ((-1, 1), (0.1, 0.4))),
    "hardshrink": (lambda m, x, c: F.hardshrink(x, c), (0.2, 0.5)),
    "softshrink": (lambda m, x, c: F.softshrink(x, c), (0.2, 0.5)),
    "logit": (lambda m, x, c: torch.logit(x, c), (0.1, 0.3)),
    "pow": (lambda m, x, c: x.pow(c), (2, 3, 0.5)),
    "pow of a number": (lambda m, x, c: torch.pow(c, x), (2, 3.5)),
    "glu": (lambda m, x, c: F.glu(x, c), (1, -1)),
    "cumsum": (lambda m, x, c: x.cumsum(c), (1, -1)),
    "cumsum in another dtype": (lambda m, x, c: x.bfloat16().cumsum(1, dtype=c), (None, torch.float32)),
    "cumprod": (lambda m, x, c: x.cumprod(c), (1, -1)),
    "cumprod in another dtype": (lambda m, x, c: x.bfloat16().cumprod(1, dtype=c), (None, torch.float32)),
    "logcumsumexp": (lambda m, x, c: x.logcumsumexp(c), (1, -1)),
    "softmax": (lambda m, x, c: x.softmax(c), (1, -1)),
    "softmax in another dtype": (lambda m, x, c: x.bfloat16().softmax(1, dtype=c), (None, torch.float32)),
    "log softmax": (lambda m, x, c: x.log_softmax(c), (1, -1)),
    "safe softmax": (lambda m, x, c: torch.ops.aten._safe_softmax(x, *c), ((1,), (-1,), (1, torch.float64))),
    "amax": (lambda m, x, c: x.amax(*c), ((1, True), (2, False), (-1, True))),
    "amin": (lambda m, x, c: x.amin(*c), ((1, True), (2, False))),
    "logsumexp": (lambda m, x, c: x.logsumexp(*c), ((1, True), (2, False))),
    "prod": (lambda m, x, c: x.prod(*c), ((1, True), (2, False))),
    "prod in another dtype": (lambda m, x, c: x.prod(1, dtype=c), _DTYPES),
    "norm": (lambda m, x, c: torch.linalg.vector_norm(x, c[0], 1, c[1]), ((2, True), (3, False), (1, True))),
    "norm in another dtype": (lambda m, x, c: torch.linalg.vector_norm(x, 2, 1, dtype=c), _DTYPES),
    "mean": (lambda m, x, c: x.mean(*c), ((1, True), ((2,), False), (-1, True))),
    "mean in another dtype": (lambda m, x, c: x.bfloat16().repeat(4, 1, 1, 1).mean(1, dtype=c), (None, torch.float32)),
    "sum": (lambda m, x, c: x.sum(*c), ((1, True), ((2,), False), (-1, True))),
    "sum in another dtype": (lambda m, x, c: x.bfloat16().repeat(4, 1, 1, 1).sum(1, dtype=c), (None, torch.float32)),
    "var": (lambda m, x, c: x.var(1, correction=c), (0, 1, 3)),
    "std": (lambda m, x, c: x.std(1, correction=c), (0, 1, 3)),
    "var mean": (lambda m, x, c: torch.var_mean(x, 1, correction=c[0])[c[1]], ((0, 0), (2, 0), (1, 1))),
    "std mean": (lambda m, x, c: torch.std_mean(x, 1, correction=c[0])[c[1]], ((0, 0), (2, 0), (1, 1))),
    "sort": (lambda m, x, c: torch.sort(x, c[0], descending=c[1])[0], ((1, True), (2, False))),
    "topk": (lambda m, x, c: x.topk(c[0], c[1], largest=c[2])[0], ((3, 1, True), (2, -1, False))),
    "max": (lambda m, x, c: x.max(*c)[0], ((1,), (2, True))),
    "median": (lambda m, x, c: x.median(*c)[0], ((1,), (2, True))),
    "kthvalue": (lambda m, x, c: x.kthvalue(*c)[0], ((2, 1), (5, -1, True))),
    "cummax": (lambda m, x, c: x.cummax(c)[0], (1, -1)),
    "max pool": (lambda m, x, c: F.max_pool2d(x, **c), ({"kernel_size": 2}, {"kernel_size": 3, "stride": 1})),
    "max pool 3d": (lambda m, x, c: F.max_pool3d(_volume(x), c, 1), (2, 3)),
    "adaptive max pool": (lambda m, x, c: F.adaptive_max_pool2d(x, c), (5, (3, 7))),
    "avg pool": (
        lambda m, x, c: F.avg_pool2d(x, 3, 1, 1, **c),
        ({}, {"count_include_pad": False}, {"divisor_override": 5}, {"ceil_mode": True}),
    ),
    "avg pool 3d": (lambda m, x, c: F.avg_pool3d(_volume(x), 3, 1, 1, **c), ({}, {"count_include_pad": False})),
    "adaptive avg pool": (lambda m, x, c: F.adaptive_avg_pool2d(x, c), (5, (3, 7))),
    "interpolate": (
        lambda m, x, c: F.interpolate(x, **c),
        (
            {"scale_factor": 2.0, "mode": "bilinear"},
            {"size": 13, "mode": "bilinear", "align_corners": True},
            {"scale_factor": 1.3, "mode": "bilinear", "recompute_scale_factor": True},
        ),
    ),
    "interpolate nearest": (lambda m, x, c: F.interpolate(x, **c), ({"scale_factor": 1.7}, {"size": (9, 17)})),
    "grid sample": (
        lambda m, x, c: F.grid_sample(x, m.other[..., :2], **c),
        (
            {"align_corners": False},
            {"align_corners": True, "padding_mode": "border"},
            {"mode": "nearest", "align_corners": False, "padding_mode": "reflection"},
        ),
    ),
    "affine grid": (
        lambda m, x, c: F.affine_grid(x[:, 0, :2, :3], [16, 8, 9, 9], align_corners=c), (False, True),
    ),
    "pad": (lambda m, x, c: F.pad(x, c[0], value=c[1]), (((1, 1), 0.0), ((1, 2), 3.0), ((0, 1, 1, 0), -1.0))),
    "pad by reflection": (lambda m, x, c: F.pad(x, c, mode="reflect"), ((1, 1, 1, 1), (2, 1, 0, 1))),
    "pad by replication": (lambda m, x, c: F.pad(x, c, mode="replicate"), ((1, 1, 1, 1), (2, 1, 0, 1))),
    "tril": (lambda m, x, c: x.tril(c), (0, -2, 1)),
    "triu": (lambda m, x, c: x.triu(c), (0, -2, 1)),
    "repeat": (lambda m, x, c: x.repeat(c), ((1, 2, 1, 1), (2, 1, 1, 2))),
    "pixel shuffle": (lambda m, x, c: F.pixel_shuffle(x.repeat(1, 2, 1, 1), c), (2, 4)),
    "pixel unshuffle": (lambda m, x, c: F.pixel_unshuffle(x, c), (2, 4)),
    "roll": (lambda m, x, c: x.roll(*c), ((1, 1), ((2, -1), (2, 3)))),
    "flip": (lambda m, x, c: x.flip(c), ((1,), (-1, 2))),
    "rot90": (lambda m, x, c: x.rot90(*c), ((1, (2, 3)), (3, (1, 2)))),
    "diagonal": (lambda m, x, c: x.diagonal(*c), ((0, 2, 3), (1, 1, -1), (-2, 1, 2))),
    "diag embed": (lambda m, x, c: torch.diag_embed(x[:, 0], *c), ((0,), (1,), (-2, 0, 1))),
    "unfold": (lambda m, x, c: x.unfold(*c), ((2, 3, 2), (-1, 4, 1))),
    "im2col": (lambda m, x, c: F.unfold(x, 3, **c), ({}, {"stride": 2}, {"padding": 1, "dilation": 2})),
    "col2im": (lambda m, x, c: F.fold(x.view(16, 8, 64), c, (2, 1), stride=(4, 1), padding=0), ((30, 8), (32, 8))),
    "channel shuffle": (lambda m, x, c: torch.channel_shuffle(x, c), (2, 4)),
    "fft": (lambda m, x, c: torch.fft.fft(x, norm=c[0], dim=c[1]), (("ortho", -1), (None, 1))),
    "rfft": (lambda m, x, c: torch.fft.rfft(x, norm=c[0], dim=c[1]), (("ortho", -1), (None, 1))),
    "irfft": (lambda m, x, c: torch.fft.irfft(torch.complex(x, x), n=c), (14, 13, 9)),
    "view": (lambda m, x, c: x.cos().view(c), ((16, -1), (64, 128))),
    "expand": (lambda m, x, c: m.bias.exp().expand(*c, 8), ((512,), (16, 64))),
    "transpose": (lambda m, x, c: x.transpose(*c), ((1, 2), (-1, 1))),
    "permute": (lambda m, x, c: x.permute(c), ((0, 2, 3, 1), (0, -1, 1, 2))),
    "select": (lambda m, x, c: x.select(*c), ((1, 2), (2, -3))),
    "slice": (lambda m, x, c: x[:, c], (slice(1, -1), slice(None, 6, 2), slice(-5, None))),
    "split": (lambda m, x, c: x.split(c[0], c[1])[c[2]], ((3, 1, 1), (5, 2, 0), ([3, 5], -1, 1))),
    "unbind": (lambda m, x, c: x.unbind(c[0])[c[1]], ((1, 3), (-1, 0))),
    "to": (lambda m, x, c: x.to(c), (torch.bfloat16, torch.float64)),
    "clone": (
        lambda m, x, c: x.transpose(1, 2).clone(memory_format=c), (torch.preserve_format, torch.contiguous_format),
    ),
}  # fmt: skip


def _step(module: nn.Module, seed: int) -> list[Tensor]:
    module.zero_grad()
    torch.manual_seed(seed)
    module(torch.ones(1)).sum().backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_those_of_the_step(name: str) -> None:
    function, constants = CONSTANTS[name]
    torch.manual_seed(0)
    module = Varied(function, constants[0])
    plain = copy.deepcopy(module)
    plan = dpx.search_plan(module, torch.ones(1), planner=DropsEverything())
    dropped = {d.operator for d in plan.decisions if d.action == "recompute"}
    assert dropped & {"NegBackward0", "ViewAsRealBackward0"}, "its result was refused"
    applied = dpx.apply_plan(module, plan)
    for step, constant in enumerate((*constants, constants[0])):
        module.constant = plain.constant = constant
        for _ in range(2):  # the first may find that operands have to be noted again, and keep what needs them
            applied.values.refused.clear()
            assert all(map(torch.equal, _step(module, step), _step(plain, step))), constant
        assert not applied.not_found, constant


def test_statistics_that_are_written_to_without_a_new_version_are_those_of_the_call() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Sigmoid(), nn.Conv2d(8, 8, 1))
    plain, x = copy.deepcopy(module), torch.randn(16, 8, 8, 8)
    applied = dpx.apply_plan(module, dpx.search_plan(module.eval(), x, planner=DropsEverything()))
    results = []
    for each in (module, plain):
        quiet = each.eval()(x)
        loud = each.train()(x)
        (quiet.pow(2) + loud).sum().backward()
        results.append([p.grad for p in each.parameters()])
    assert all(map(torch.equal, *results))
    assert not applied.not_found
