"""Pooling, sampling and padding: every recipe repeats its operator to the bit."""

import pytest
import torch
from torch.nn import functional as F

from tests.memory.execute.recipes.probe import Function, check_recipe, cube, line

EXAMPLES: dict[str, Function] = {
    "AdaptiveAvgPool2D": lambda _, x: F.adaptive_avg_pool2d(x, 4),
    "AdaptiveAvgPool3D": lambda _, x: F.adaptive_avg_pool3d(cube(x), 5),
    "AdaptiveMaxPool2D": lambda _, x: F.adaptive_max_pool2d(x, 5),
    "AdaptiveMaxPool3D": lambda _, x: F.adaptive_max_pool3d(cube(x), 5),
    "AffineGridGenerator": lambda _, x: F.affine_grid(x[:, 0, :2, :3], [16, 3, 8, 8], align_corners=True),
    "AvgPool2D": lambda _, x: F.avg_pool2d(x, 2),
    "AvgPool3D": lambda _, x: F.avg_pool3d(cube(x), 2, ceil_mode=True),
    "ConstantPadNd": lambda _, x: F.pad(x, (1, 2)),
    "ConstantPadNd of the operator": lambda _, x: torch.constant_pad_nd(x, (1, 2), 3.0),
    "ConstantPadNd outside": lambda _, x: F.pad(x, (1, 2), value=3.0),
    "FractionalMaxPool2D": lambda _, x: F.fractional_max_pool2d(x, 2, output_size=6),
    "FractionalMaxPool3D": lambda _, x: F.fractional_max_pool3d(cube(x), 2, output_size=6),
    "GridSampler2D": lambda p, x: F.grid_sample(x, p.x[:, :2].permute(0, 2, 3, 1), "bicubic", "border", True),
    "GridSampler3D": lambda p, x: F.grid_sample(cube(x), cube(p.x)[..., :3], align_corners=False),
    "MaxPool2DWithIndices": lambda _, x: F.max_pool2d(x, 2),
    "MaxPool3DWithIndices": lambda _, x: F.max_pool3d(cube(x), 2, stride=1),
    "ReflectionPad1D": lambda _, x: F.pad(line(x), (1, 2), mode="reflect"),
    "ReflectionPad2D": lambda _, x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "ReflectionPad3D": lambda _, x: F.pad(cube(x), (1, 2, 1, 1, 1, 1), mode="reflect"),
    "ReplicationPad1D": lambda _, x: F.pad(line(x), (1, 2), mode="replicate"),
    "ReplicationPad2D": lambda _, x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "ReplicationPad3D": lambda _, x: F.pad(cube(x), (1, 2, 1, 1, 1, 1), mode="replicate"),
    "UpsampleBicubic2D": lambda _, x: F.interpolate(x, size=13, mode="bicubic"),
    "UpsampleBicubic2DAa": lambda _, x: F.interpolate(x, scale_factor=1.5, mode="bicubic", antialias=True),
    "UpsampleBilinear2D": lambda _, x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "UpsampleBilinear2DAa": lambda _, x: F.interpolate(x, scale_factor=1.5, mode="bilinear", antialias=True),
    "UpsampleLinear1D": lambda _, x: F.interpolate(line(x), scale_factor=1.5, mode="linear"),
    "UpsampleNearest1D": lambda _, x: F.interpolate(line(x), scale_factor=1.5),
    "UpsampleNearest2D": lambda _, x: F.interpolate(x, scale_factor=2.0),
    "UpsampleNearest3D": lambda _, x: F.interpolate(cube(x), scale_factor=1.5),
    "UpsampleNearestExact1D": lambda _, x: F.interpolate(line(x), scale_factor=1.5, mode="nearest-exact"),
    "UpsampleNearestExact2D": lambda _, x: F.interpolate(x, scale_factor=1.5, mode="nearest-exact"),
    "UpsampleNearestExact3D": lambda _, x: F.interpolate(cube(x), scale_factor=1.5, mode="nearest-exact"),
    "UpsampleTrilinear3D": lambda _, x: F.interpolate(cube(x), scale_factor=1.5, mode="trilinear"),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_recipe_repeats_its_operator(name: str) -> None:
    check_recipe(name, EXAMPLES[name])
