"""Recipes of pooling, padding and resizing."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from lightning_dpx.memory.execute.recipes.registry import (
    NotRecomputable,
    Recipe,
    argument,
    aten,
    of_saved,
    recipe,
    with_arguments,
)


@recipe("MaxPool2DWithIndicesBackward0")
def _max_pool(node: Any) -> Any:
    if node.output:
        raise NotRecomputable("the indices of max pooling are kept")
    rest = node.kernel_size, node.stride, node.padding, node.dilation, node.ceil_mode
    # The node shows an empty stride where none was given; that means the size of the kernel.
    return (lambda x: F.max_pool2d(x, rest[0], rest[1] or None, *rest[2:])), [node.saved("self", edge=0)]


@recipe("AvgPool2DBackward0")
def _avg_pool(node: Any) -> Any:
    rest = node.kernel_size, node.stride, node.padding, node.ceil_mode, node.count_include_pad, node.divisor_override
    return (lambda x: aten.avg_pool2d(x, *rest)), [node.saved("self", edge=0)]


@recipe("AvgPool3DBackward0")
def _avg_pool_3d(node: Any) -> Any:
    rest = node.kernel_size, node.stride, node.padding, node.ceil_mode, node.count_include_pad, node.divisor_override
    return (lambda x: aten.avg_pool3d(x, *rest)), [node.saved("self", edge=0)]


@recipe("AdaptiveAvgPool2DBackward0")
def _adaptive_avg_pool(node: Any) -> Any:
    size = node.shape[-2:]  # the node does not note it
    return (lambda x: F.adaptive_avg_pool2d(x, size)), [node.saved("self", edge=0)]


@recipe("AdaptiveAvgPool3DBackward0")
def _adaptive_avg_pool_3d(node: Any) -> Any:
    size = node.shape[-3:]  # likewise
    return (lambda x: F.adaptive_avg_pool3d(x, size)), [node.saved("self", edge=0)]


def _pooled(num_dims: int) -> Recipe:
    """The largest numbers stand where the saved indices say: nothing is searched again."""

    # The maxima stand where the indices say. So nothing is searched again, and of fractional
    # pooling, whose windows are random, nothing has to be known.
    def make(node: Any) -> tuple[Callable[..., torch.Tensor], Sequence[Any]]:
        if node.output:
            raise NotRecomputable("the indices of max pooling are kept")
        shape = node.shape

        def select_output(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            return x.flatten(-num_dims).gather(-1, indices.flatten(-num_dims)).view(shape)

        return select_output, [node.saved("self", edge=0), node.saved("result1")]

    return make


recipe("MaxPool3DWithIndicesBackward0", "AdaptiveMaxPool3DBackward0", "FractionalMaxPool3DBackward0")(_pooled(3))
recipe("AdaptiveMaxPool2DBackward0", "FractionalMaxPool2DBackward0")(_pooled(2))


# By the node's name: the operator, its arguments between the size and the scales, and of how many
# dims there is such an operator.
_RESIZED = {
    "Nearest{}D": ("upsample_nearest{}d", (), (1, 2, 3)),
    "NearestExact{}D": ("_upsample_nearest_exact{}d", (), (1, 2, 3)),
    "Linear{}D": ("upsample_linear{}d", ("align_corners",), (1,)),
    "Bilinear{}D": ("upsample_bilinear{}d", ("align_corners",), (2,)),
    "Bilinear{}DAa": ("_upsample_bilinear{}d_aa", ("align_corners",), (2,)),
    "Bicubic{}D": ("upsample_bicubic{}d", ("align_corners",), (2,)),
    "Bicubic{}DAa": ("_upsample_bicubic{}d_aa", ("align_corners",), (2,)),
    "Trilinear{}D": ("upsample_trilinear{}d", ("align_corners",), (3,)),
}
# The scales have other names for every number of dims.
_SCALES = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}

for _name, (_operator, _arguments, _ranks) in _RESIZED.items():
    for _rank in _ranks:
        recipe(f"Upsample{_name.format(_rank)}Backward0")(
            with_arguments(getattr(aten, _operator.format(_rank)).default, "output_size", *_arguments, *_SCALES[_rank])
        )


def _sampled(operator: Callable[..., torch.Tensor]) -> Recipe:
    def make(node: Any) -> tuple[Callable[..., torch.Tensor], Sequence[Any]]:
        rest = node.interpolation_mode, node.padding_mode, node.align_corners
        return (lambda x, grid: operator(x, grid, *rest)), [node.saved("input", edge=0), node.saved("grid", edge=1)]

    return make


recipe("GridSampler2DBackward0")(_sampled(aten.grid_sampler_2d.default))
recipe("GridSampler3DBackward0")(_sampled(aten.grid_sampler_3d.default))
recipe("CudnnGridSamplerBackward0")(of_saved(aten.cudnn_grid_sampler.default, "self", "grid"))
recipe("AffineGridGeneratorBackward0")(with_arguments(aten.affine_grid_generator.default, "size", "align_corners"))


@recipe("ConstantPadNdBackward0")
def _pad(node: Any) -> Any:
    """The node does not note what it fills with."""
    pad = argument(node, "pad")
    # F.pad takes ``None`` for zero, the operator itself does not.
    return (lambda x, value: aten.constant_pad_nd.default(x, pad, value or 0.0)), [node.edge(0), node.constant()]


recipe("ReflectionPad2DBackward0")(with_arguments(aten.reflection_pad2d.default, "padding"))
recipe("ReplicationPad2DBackward0")(with_arguments(aten.replication_pad2d.default, "padding"))
recipe("ReflectionPad1DBackward0")(with_arguments(aten.reflection_pad1d.default, "padding"))
recipe("ReflectionPad3DBackward0")(with_arguments(aten.reflection_pad3d.default, "padding"))
recipe("ReplicationPad1DBackward0")(with_arguments(aten.replication_pad1d.default, "padding"))
recipe("ReplicationPad3DBackward0")(with_arguments(aten.replication_pad3d.default, "padding"))
