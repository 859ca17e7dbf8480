"""Recipes of the same numbers in other shapes."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from lightning_dpx.memory.execute.recipes.registry import argument, aten, recipe, signed, view, with_arguments


@view("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "UnsqueezeBackward0")
@view("SqueezeBackward1", "SqueezeBackward2")
@view("SqueezeBackward3", "SqueezeBackward4", "SqueezeBackward5", "UnsqueezeBackward1")  # in place
def _reshape(node: Any) -> Any:
    shape = node.shape
    # The node does not tell how a copy lay in memory. One that was made again may lie in another
    # order than the first, and have no view of this shape.
    return (lambda x: x.reshape(shape)), [node.edge(0)]


@view("ExpandBackward0")
def _expand(node: Any) -> Any:
    shape = node.shape
    return (lambda x: x.expand(shape)), [node.edge(0)]


@view("TBackward0", "TBackward1")
def _t(node: Any) -> Any:
    return torch.t, [node.edge(0)]


@view("TransposeBackward0", "TransposeBackward1")
def _transpose(node: Any) -> Any:
    first = signed(node.dim0)
    second = signed(node.dim1)
    return (lambda x: x.transpose(first, second)), [node.edge(0)]


@view("PermuteBackward0")
def _permute(node: Any) -> Any:
    dims = [signed(dim) for dim in node.dims]
    return (lambda x: x.permute(dims)), [node.edge(0)]


@view("SelectBackward0")
def _select(node: Any) -> Any:
    dim = signed(node.dim)
    index = signed(node.index)
    return (lambda x: x.select(dim, index)), [node.edge(0)]


@view("SliceBackward0")
def _slice(node: Any) -> Any:
    dim = signed(node.dim)
    start = node.start
    end = node.end
    step = node.step
    # Either bound may be left out.
    first = None if start is None else signed(start)
    last = None if end is None else signed(end)
    return (lambda x: aten.slice(x, dim, first, last, step)), [node.edge(0)]


@view("SplitBackward0", "UnsafeSplitBackward0")
def _split(node: Any) -> Any:
    dim = signed(node.dim)
    size = node.split_size
    start = size * node.output
    # The last part may be shorter than the others, and the node notes their size only.
    length = min(size, node.self_sym_sizes[dim] - start)
    return _part(dim, start, length), [node.edge(0)]


@view("SplitWithSizesBackward0", "UnsafeSplitWithSizesBackward0")
def _split_with_sizes(node: Any) -> Any:
    dim = signed(node.dim)
    sizes = list(node.split_sizes)
    part = node.output
    return _part(dim, sum(sizes[:part]), sizes[part]), [node.edge(0)]


@lru_cache(maxsize=4096)
def _part(dim: int, start: int, length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Remembered, because unrolled cells ask for the same few parts thousands of times."""
    return lambda x: x.narrow(dim, start, length)


@view("UnbindBackward0")
def _unbind(node: Any) -> Any:
    dim = signed(node.dim)
    part = node.output
    return (lambda x: x.select(dim, part)), [node.edge(0)]


@view("BackwardHookFunctionBackward")
def _hooked(node: Any) -> Any:
    # Modules with full backward hooks pass inputs and outputs through this function, as they are.
    return (lambda x: x), [node.edge(node.output)]


@recipe("ToCopyBackward0", "CloneBackward0")
def _copy(node: Any) -> Any:
    """The node does not tell how the copy lies in memory; the copy itself does, where it is saved."""
    shape = node.shape
    dtype = node.dtype
    device = node.device
    stride = node.saved_strides
    # Without ``copy`` a tensor that is so already would be handed out itself.
    if stride is None:
        return (lambda x: x.to(device, dtype, copy=True)), [node.edge(0)]
    return (lambda x: torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(x)), [node.edge(0)]


recipe("TrilBackward0")(with_arguments(aten.tril.default, "diagonal"))
recipe("TriuBackward0")(with_arguments(aten.triu.default, "diagonal"))
recipe("RepeatBackward0")(with_arguments(aten.repeat.default, "repeats"))
recipe("PixelShuffleBackward0")(with_arguments(aten.pixel_shuffle.default, "upscale_factor"))
recipe("PixelUnshuffleBackward0")(with_arguments(aten.pixel_unshuffle.default, "downscale_factor"))
recipe("RollBackward0")(with_arguments(aten.roll.default, "shifts", "dims"))
recipe("FlipBackward0")(with_arguments(aten.flip.default, "dims"))
recipe("Rot90Backward0")(with_arguments(aten.rot90.default, "k", "dims"))
recipe("DiagEmbedBackward0")(with_arguments(aten.diag_embed.default, "offset", "dim1", "dim2"))
recipe("DiagonalBackward0")(with_arguments(aten.diagonal.default, "offset", "dim1", "dim2"))
recipe("UnfoldBackward0")(with_arguments(aten.unfold.default, "dimension", "size", "step"))
recipe("Im2ColBackward0")(with_arguments(aten.im2col.default, "kernel_size", "dilation", "padding", "stride"))
recipe("ChannelShuffleBackward0")(with_arguments(aten.channel_shuffle.default, "groups"))
recipe("ViewAsRealBackward0")(with_arguments(aten.view_as_real.default))
recipe("ViewAsComplexBackward0")(with_arguments(aten.view_as_complex.default))
recipe("FftC2CBackward0")(with_arguments(aten._fft_c2c.default, "dim", "normalization", "forward"))
recipe("FftR2CBackward0")(with_arguments(aten._fft_r2c.default, "dim", "normalization", "onesided"))


@recipe("FftC2RBackward0")
def _complex_to_real(node: Any) -> Any:
    dim = argument(node, "dim")
    normalization = node.normalization
    # 2n real numbers have as many complex ones as 2n + 1, so the input does not tell the size.
    size = node.shape[dim[-1]]
    return (lambda x: aten._fft_c2r.default(x, dim, normalization, size)), [node.edge(0)]


@recipe("Col2ImBackward0")
def _col2im(node: Any) -> Any:
    rest = [argument(node, name) for name in ("kernel_size", "dilation", "padding", "stride")]
    size = node.shape[-2:]  # the node does not note it
    return (lambda x: aten.col2im.default(x, size, *rest)), [node.edge(0)]
