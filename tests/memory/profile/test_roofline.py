"""Times of operators on a device that is not there: arithmetic or bytes, whichever is longer."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import lightning_dpx as dpx
from lightning_dpx.memory.profile.roofline import RATES, OperatorSeconds, Rates, rates_of
from tests.conftest import SIMULATED

SLOW = Rates(flops=1e3, bytes=1e6, host_bytes=1e5, start=0.0)


@pytest.mark.parametrize(
    ("run", "seconds"),
    [
        (lambda x: x @ x, 2 * 64**3 / 1e3),
        (lambda x: x + x, 3 * 64 * 64 * 4 / 1e6),
        (lambda x: torch.cat([x, x]), 4 * 64 * 64 * 4 / 1e6),
        (lambda x: x.mul_(2.0), 2 * 64 * 64 * 4 / 1e6),
        (lambda x: x.t()[1:].unsqueeze(0).expand(3, -1, -1), 0.0),
        (lambda x: torch.empty_like(x), 0.0),
        (lambda x: F.scaled_dot_product_attention(*[x.view(1, 4, 64, 16)] * 3), 2 * 2 * 4 * 64 * 64 * 16 / 1e3),
    ],
)
def test_arithmetic_or_bytes(run, seconds: float) -> None:  # type: ignore[no-untyped-def]
    with FakeTensorMode(), OperatorSeconds(SLOW) as costs:
        run(torch.empty(64, 64))
    assert costs.seconds == pytest.approx(seconds)


def test_to_start_an_operator_takes_time_too() -> None:
    with OperatorSeconds(Rates(flops=1e20, bytes=1e20, host_bytes=1e20, start=1.0)) as costs:
        torch.ones(4).add(1).view(2, 2).relu()
    assert costs.seconds == pytest.approx(3.0)


def test_what_an_operator_on_lists_writes_to_counts_as_the_result_of_one_on_a_tensor() -> None:
    left, right = torch.ones(64), torch.ones(64)
    with OperatorSeconds(RATES["cpu"]) as on_lists:
        torch._foreach_add_([left], [right])
    with OperatorSeconds(RATES["cpu"]) as on_tensors:
        left.add_(right)
    assert on_lists.seconds == on_tensors.seconds


def test_an_unknown_accelerator_counts_as_a_gpu() -> None:
    assert rates_of(torch.device("cuda:2")) is RATES["cuda"] is rates_of(torch.device("xpu"))
    assert rates_of(torch.device("cpu")) is RATES["cpu"]


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_a_simulated_device_has_the_rates_of_its_clock() -> None:
    """So what is predicted of it is what its events will measure, and copies cost what they take there."""
    try:
        dpx.simulate(8, speed=[1, *[0.5] * 7], link="2GB/s")
        rates = rates_of(torch.device("sim", 1))
        assert (rates.bytes, rates.host_bytes, rates.start) == (0.5e11, 2e9, 0.0)
        left, right = (torch.randn(64, 64, device="sim:1") for _ in range(2))
        begin, end = (torch.sim.Event(enable_timing=True) for _ in range(2))  # type: ignore[attr-defined]
        begin.record(torch.sim.current_stream("sim:1"))  # type: ignore[attr-defined]
        with OperatorSeconds(rates) as predicted:
            (left @ right).relu()
        end.record(torch.sim.current_stream("sim:1"))  # type: ignore[attr-defined]
        assert predicted.seconds == pytest.approx(begin.elapsed_time(end) / 1e3, rel=1e-6)
    finally:
        dpx.simulate(8)
    assert rates_of(torch.device("sim", 1)).host_bytes == math.inf
