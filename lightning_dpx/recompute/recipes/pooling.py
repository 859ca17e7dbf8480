"""Recipes of pooling, padding and resizing."""

from typing import Any

from torch.nn import functional as F

from lightning_dpx.recompute.recipes.registry import NotRecomputable, aten, recipe, with_arguments


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


recipe("ConstantPadNdBackward0")(with_arguments(aten.constant_pad_nd.default, "pad"))
recipe("ReflectionPad2DBackward0")(with_arguments(aten.reflection_pad2d.default, "padding"))
recipe("ReplicationPad2DBackward0")(with_arguments(aten.replication_pad2d.default, "padding"))
