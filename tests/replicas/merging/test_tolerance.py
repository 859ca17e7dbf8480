"""Differences that another order of additions explains, and those that it does not."""

import math

import pytest
import torch

from lightning_dpx.replicas.merging.tolerance import Tolerance, difference

EXACT = Tolerance.of(torch.float64, 1000)


@pytest.mark.parametrize(
    ("one", "two", "apart"),
    [
        (torch.tensor([1.0, 100.0]), torch.tensor([1.001, 100.0]), 1e-5),
        (torch.tensor([math.nan, math.inf]), torch.tensor([math.nan, math.inf]), 0.0),
        (torch.tensor([math.nan]), torch.tensor([1.0]), math.inf),
        (torch.tensor([1]), torch.tensor([2]), math.inf),
        (torch.zeros(2), torch.zeros(3), math.inf),
        (torch.zeros(0), torch.zeros(0), 0.0),
    ],
)
def test_differences_are_relative_to_the_largest_number(one: torch.Tensor, two: torch.Tensor, apart: float) -> None:
    assert difference(one, two, EXACT) == pytest.approx(apart, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("additions", [10, 10_000])
def test_another_order_of_additions_is_within_tolerance(dtype: torch.dtype, additions: int) -> None:
    numbers = torch.randn(additions, generator=torch.Generator().manual_seed(0)).to(dtype)
    forward = torch.zeros((), dtype=dtype)
    for part in numbers.split(7):
        forward = forward + part.sum()
    whole = numbers.sum()
    scale = float(numbers.abs().sum()) / math.sqrt(additions)
    tolerance = Tolerance.of(dtype, additions)
    assert difference(whole, forward, tolerance, scale) <= tolerance.relative
    assert tolerance.relative < 0.5


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e4m3fn, torch.bool, torch.uint8, torch.bfloat16])
def test_numbers_that_torch_does_not_compare_are_compared(dtype: torch.dtype) -> None:
    one = torch.ones(3).to(dtype)
    assert difference(one, one.clone(), Tolerance.of(torch.float32, 1)) == 0.0
    assert difference(one, torch.zeros(3).to(dtype), Tolerance.of(torch.float32, 1)) > 0.5
