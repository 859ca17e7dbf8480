"""How the output of an operator is computed again, from the node that autograd made for its backward.

One recipe per node name. A recipe looks at the node once, in the forward, and returns a function of tensors together
with where these tensors come from: saved by the node itself, or the outputs of the nodes before it. It must not hold on
to the node. It repeats the very operator on the very inputs, so the result is the same bits; planning checks that.

    @recipe("GeluBackward0")
    def _gelu(node):
        return partial(F.gelu, approximate=node.approximate), [node.saved("self", edge=0)]

``node.saved(name)`` is an input that the operator kept, ``node.edge(i)`` the i-th input along the graph, and any other
attribute an argument that is no tensor. A recipe that cannot work for this call raises :class:`NotRecomputable`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

Recipe = Callable[[Any], tuple[Callable[..., torch.Tensor], Sequence[Any]]]
RECIPES: dict[str, Recipe] = {}
VIEWS: set[str] = set()  # names among them: nothing is allocated, and it is done again for everybody who looks
aten = torch.ops.aten


class NotRecomputable(Exception):  # noqa: N818  it is an answer more than an error
    """The value must be kept; says why."""


def recipe(*names: str) -> Callable[[Recipe], Recipe]:
    """Registers a recipe for the outputs of the autograd nodes called ``names``."""

    def add(function: Recipe) -> Recipe:
        for name in names:
            if RECIPES.setdefault(name, function) is not function:
                raise ValueError(f"There is a recipe for {name} already.")
        return function

    return add


def view(*names: str) -> Callable[[Recipe], Recipe]:
    """Likewise, for nodes that show their only input in another shape."""
    VIEWS.update(names)
    return recipe(*names)


def recipe_for(name: str) -> Recipe:
    """The recipe for nodes of this name.

    Raises:
        NotRecomputable: there is none.
    """
    found = RECIPES.get(name)
    if found is None:
        raise NotRecomputable(f"there is no recipe for {name}")
    return found


def _signed(number: int) -> int:
    """Nodes show negative dims as unsigned 64-bit numbers."""
    return number - 2**64 if number >= 2**63 else number


# ---- one input, element by element ----

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


def _with_arguments(operator: Callable[..., torch.Tensor], *arguments: str) -> Recipe:
    """Of one tensor and what the node noted of the other arguments, in the operator's order."""

    def make(node: Any) -> tuple[Callable[..., torch.Tensor], Sequence[Any]]:
        given = [getattr(node, argument) for argument in arguments]
        given = [_signed(value) if type(value) is int else value for value in given]
        return (lambda x: operator(x, *given)), [node.edge(0)]

    return make


recipe("GeluBackward0")(
    lambda node: (partial(F.gelu, approximate=node.approximate), [node.saved("self", edge=0)])
)  # fmt: skip
recipe("LeakyReluBackward0")(_with_arguments(aten.leaky_relu.default, "negative_slope"))
recipe("EluBackward0")(_with_arguments(aten.elu.default, "alpha", "scale", "input_scale"))
recipe("SoftplusBackward0")(_with_arguments(aten.softplus.default, "beta", "threshold"))
recipe("HardtanhBackward0")(_with_arguments(aten.hardtanh.default, "min_val", "max_val"))
recipe("ClampBackward1")(_with_arguments(aten.clamp.default, "min", "max"))
recipe("PowBackward0")(_with_arguments(aten.pow.Tensor_Scalar, "exponent"))
recipe("TrilBackward0")(_with_arguments(aten.tril.default, "diagonal"))
recipe("TriuBackward0")(_with_arguments(aten.triu.default, "diagonal"))
recipe("RepeatBackward0")(_with_arguments(aten.repeat.default, "repeats"))
recipe("ConstantPadNdBackward0")(_with_arguments(aten.constant_pad_nd.default, "pad"))
recipe("PixelShuffleBackward0")(_with_arguments(aten.pixel_shuffle.default, "upscale_factor"))
recipe("PixelUnshuffleBackward0")(_with_arguments(aten.pixel_unshuffle.default, "downscale_factor"))
recipe("ReflectionPad2DBackward0")(_with_arguments(aten.reflection_pad2d.default, "padding"))
recipe("ReplicationPad2DBackward0")(_with_arguments(aten.replication_pad2d.default, "padding"))


def _along_dim(operator: Callable[..., torch.Tensor]) -> Recipe:
    def make(node: Any) -> tuple[Callable[..., torch.Tensor], Sequence[Any]]:
        dim, dtype = _signed(node.dim), node.dtype
        return (lambda x: operator(x, dim).to(dtype)), [node.edge(0)]

    return make


recipe("GluBackward0")(_along_dim(aten.glu.default))
recipe("CumsumBackward0")(_along_dim(aten.cumsum.default))


def _softmax(operator: Callable[..., torch.Tensor]) -> Recipe:
    def make(node: Any) -> tuple[Callable[..., torch.Tensor], Sequence[Any]]:
        dim, dtype = _signed(node.dim), node.dtype
        # a wider result was asked for as an argument, which converts before it sums
        return (lambda x: operator(x if x.dtype == dtype else x.to(dtype), dim, False)), [node.edge(0)]

    return make


recipe("SoftmaxBackward0")(_softmax(aten._softmax.default))
recipe("LogSoftmaxBackward0")(_softmax(aten._log_softmax.default))


@recipe("MeanBackward1")
def _mean(node: Any) -> Any:
    dims, keepdim = [_signed(dim) for dim in node.dim or ()], node.keepdim
    return (lambda x: x.mean(dims, keepdim)), [node.edge(0)]


@recipe("SumBackward1")
def _sum(node: Any) -> Any:
    dims, keepdim = [_signed(dim) for dim in node.dim or ()], node.keepdim
    return (lambda x: x.sum(dims, keepdim)), [node.edge(0)]


# ---- two or more inputs ----


@recipe("AddBackward0")
def _add(node: Any) -> Any:
    add = torch.add if node.alpha == 1 else partial(torch.add, alpha=node.alpha)
    return add, [node.edge(0), node.edge(1)]


@recipe("SubBackward0")
def _sub(node: Any) -> Any:
    return partial(torch.sub, alpha=node.alpha), [node.edge(0), node.edge(1)]


@recipe("MulBackward0")
def _mul(node: Any) -> Any:
    return torch.mul, [node.saved("self", edge=0), node.saved("other", edge=1)]


@recipe("DivBackward0")
def _div(node: Any) -> Any:
    return torch.div, [node.saved("self", edge=0), node.saved("other", edge=1)]


@recipe("AddcmulBackward0")
def _addcmul(node: Any) -> Any:
    return partial(torch.addcmul, value=node.value), [
        node.edge(0),
        node.saved("tensor1", edge=1),
        node.saved("tensor2", edge=2),
    ]


@recipe("WhereBackward0")
def _where(node: Any) -> Any:
    return torch.where, [node.saved("condition"), node.edge(0), node.edge(1)]


@recipe("CatBackward0")
def _cat(node: Any) -> Any:
    dim = _signed(node.dim)
    return (lambda *parts: torch.cat(parts, dim)), [node.edge(index) for index in range(node.num_edges)]


@recipe("StackBackward0")
def _stack(node: Any) -> Any:
    dim = _signed(node.dim)
    return (lambda *parts: torch.stack(parts, dim)), [node.edge(index) for index in range(node.num_edges)]


@recipe("PreluKernelBackward0")
def _prelu(node: Any) -> Any:
    return aten._prelu_kernel.default, [node.saved("self", edge=0), node.saved("weight", edge=1)]


@recipe("NativeDropoutBackward0")
def _dropout(node: Any) -> Any:
    scale = 1.0 / (1.0 - node.p) if node.p < 1 else 0.0  # the mask was drawn once and is saved
    return (lambda x, mask: x * mask * scale), [node.edge(0), node.saved("result1")]


# ---- matrices, convolutions, tables ----


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
    dim = _signed(node.dim)
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


# ---- norms ----


@recipe("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0")
def _batch_norm(node: Any) -> Any:
    """Scales and shifts with the statistics of then: nothing is reduced, and no running statistic is updated again.

    The operator's own inference path does that, with a variance of one and the saved inverse deviation in the weight;
    on the host it then rounds exactly as it did in training.
    """
    if node.output:
        raise NotRecomputable("only the first output of batch norm is computed again")
    names = ("result1", "result2") if hasattr(node, "result1") else ("save_mean", "save_var")
    parameters = [node.edge(1), node.edge(2)] if node.has_edge(1) and node.has_edge(2) else None
    if parameters is None and node.optional("weight") is not None:
        raise NotRecomputable("batch norm with a frozen weight or bias")
    affine = parameters or []
    if getattr(node, "training", True):

        def scale(x: torch.Tensor, mean: torch.Tensor, inverse: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
            weight, bias = affine if affine else (torch.ones_like(inverse), torch.zeros_like(inverse))
            one = torch.ones_like(inverse)
            return torch.native_batch_norm(x, inverse * weight, bias, mean, one, False, 0.0, 0.0)[0]

        return scale, [node.saved("input", edge=0), node.saved(names[0]), node.saved(names[1]), *affine]
    eps = node.eps if hasattr(node, "eps") else node.epsilon

    def infer(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
        weight, bias = affine if affine else (None, None)
        return torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]

    return infer, [node.saved("input", edge=0), node.saved("running_mean"), node.saved("running_var"), *affine]


@recipe("NativeGroupNormBackward0")
def _group_norm(node: Any) -> Any:
    if node.output:
        raise NotRecomputable("only the first output of group norm is computed again")
    rest = node.N, node.C, node.HxW, node.group, node.eps
    inputs = [node.saved("input", edge=0)]
    if node.has_edge(1) and node.has_edge(2):
        inputs += [node.edge(1), node.edge(2)]
    elif node.optional("weight") is not None:
        raise NotRecomputable("group norm with a frozen weight or bias")
    return (lambda x, weight=None, bias=None: torch.native_group_norm(x, weight, bias, *rest)[0]), inputs


@recipe("NativeLayerNormBackward0")
def _layer_norm(node: Any) -> Any:
    """The node does not note eps, so the one that gives the saved inverse deviations is looked for."""
    if node.output:
        raise NotRecomputable("only the first output of layer norm is computed again")
    x, inverse, shape = node.saved("input", edge=0), node.saved("result2"), list(node.normalized_shape)
    affine = [entry for name in ("weight", "bias") if (entry := node.optional(name)) is not None]
    inputs = [x, inverse, *affine]
    if len(affine) == 1:
        raise NotRecomputable("layer norm with a weight and no bias")
    key = node.leaf(1)

    def normalise(x: torch.Tensor, inverse: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
        eps = _KNOWN_EPS[key] if key is not None and key in _KNOWN_EPS else None
        if eps is None:
            eps = _find_eps(x, shape, inverse)
            if key is not None:
                _KNOWN_EPS[key] = eps
        weight, bias = affine if affine else (None, None)
        return torch.native_layer_norm(x, shape, weight, bias, eps)[0]

    return normalise, inputs


_LIKELY_EPS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 1e-4, 1e-7, 1e-10, 1e-9, 1e-2, 1e-1, 0.0)
_KNOWN_EPS = WeakTensorKeyDictionary()  # by the layer's weight


def _find_eps(x: torch.Tensor, shape: list[int], inverse: torch.Tensor) -> float:
    rows = x.reshape(-1, *x.shape[x.ndim - len(shape) :])[:4]
    expected = inverse.reshape(-1)[:4]
    for eps in _LIKELY_EPS:
        if torch.equal(torch.native_layer_norm(rows, shape, None, None, eps)[2].reshape(-1), expected):
            return eps
    raise NotRecomputable(f"a layer norm over {shape} with an eps that is none of {_LIKELY_EPS}")


# ---- other shapes of the same numbers ----


@view("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "UnsqueezeBackward0")
@view("SqueezeBackward1", "SqueezeBackward2")
def _reshape(node: Any) -> Any:
    shape = node.shape
    return (lambda x: x.reshape(shape)), [node.edge(0)]


@view("ExpandBackward0")
def _expand(node: Any) -> Any:
    shape = node.shape
    return (lambda x: x.expand(shape)), [node.edge(0)]


@view("TBackward0")
def _t(node: Any) -> Any:
    return torch.t, [node.edge(0)]


@view("TransposeBackward0")
def _transpose(node: Any) -> Any:
    first, second = _signed(node.dim0), _signed(node.dim1)
    return (lambda x: x.transpose(first, second)), [node.edge(0)]


@view("PermuteBackward0")
def _permute(node: Any) -> Any:
    dims = [_signed(dim) for dim in node.dims]
    return (lambda x: x.permute(dims)), [node.edge(0)]


@view("SelectBackward0")
def _select(node: Any) -> Any:
    dim, index = _signed(node.dim), _signed(node.index)
    return (lambda x: x.select(dim, index)), [node.edge(0)]


@view("SliceBackward0")
def _slice(node: Any) -> Any:
    dim, start, end, step = _signed(node.dim), node.start, node.end, node.step
    first, last = (None if bound is None else _signed(bound) for bound in (start, end))
    return (lambda x: aten.slice(x, dim, first, last, step)), [node.edge(0)]


@view("SplitBackward0", "UnsafeSplitBackward0")
def _split(node: Any) -> Any:
    dim, size, part = _signed(node.dim), node.split_size, node.output
    return _part(dim, size * part, node.shape[dim]), [node.edge(0)]  # the last part may be shorter than the others


@view("SplitWithSizesBackward0", "UnsafeSplitWithSizesBackward0")
def _split_with_sizes(node: Any) -> Any:
    dim, sizes, part = _signed(node.dim), list(node.split_sizes), node.output
    return _part(dim, sum(sizes[:part]), sizes[part]), [node.edge(0)]


@lru_cache(maxsize=4096)
def _part(dim: int, start: int, length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Remembered, because unrolled cells ask for the same few parts thousands of times."""
    return lambda x: x.narrow(dim, start, length)


@view("UnbindBackward0")
def _unbind(node: Any) -> Any:
    dim, part = _signed(node.dim), node.output
    return (lambda x: x.select(dim, part)), [node.edge(0)]


@view("BackwardHookFunctionBackward")
def _hooked(node: Any) -> Any:
    return (lambda x: x), [node.edge(node.output)]


@recipe("ToCopyBackward0")
def _convert(node: Any) -> Any:
    dtype, device = node.dtype, node.device
    return (lambda x: x.to(device, dtype)), [node.edge(0)]


# ---- pooling and resizing ----


@recipe("MaxPool2DWithIndicesBackward0")
def _max_pool(node: Any) -> Any:
    if node.output:
        raise NotRecomputable("the indices of max pooling are kept")
    rest = node.kernel_size, node.stride, node.padding, node.dilation, node.ceil_mode
    return (lambda x: F.max_pool2d(x, rest[0], rest[1] or None, *rest[2:])), [node.saved("self", edge=0)]


@recipe("AvgPool2DBackward0")
def _avg_pool(node: Any) -> Any:
    rest = node.kernel_size, node.stride, node.padding, node.ceil_mode, node.count_include_pad, node.divisor_override
    return (lambda x: aten.avg_pool2d(x, *rest)), [node.saved("self", edge=0)]


@recipe("AdaptiveAvgPool2DBackward0")
def _adaptive_avg_pool(node: Any) -> Any:
    size = node.shape[-2:]
    return (lambda x: F.adaptive_avg_pool2d(x, size)), [node.saved("self", edge=0)]


@recipe("UpsampleNearest2DBackward0")
def _upsample_nearest(node: Any) -> Any:
    rest = node.output_size, node.scales_h, node.scales_w
    return (lambda x: aten.upsample_nearest2d(x, *rest)), [node.edge(0)]


@recipe("UpsampleBilinear2DBackward0")
def _upsample_bilinear(node: Any) -> Any:
    rest = node.output_size, node.align_corners, node.scales_h, node.scales_w
    return (lambda x: aten.upsample_bilinear2d(x, *rest)), [node.edge(0)]
