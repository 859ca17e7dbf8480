"""Times of operators on a device that is not there: arithmetic or bytes, whichever is longer."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lightning_dpx.memory.profile.roofline import RATES, OperatorSeconds, Rates, rates_of

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


def test_an_unknown_accelerator_counts_as_a_gpu() -> None:
    assert rates_of(torch.device("cuda:2")) is RATES["cuda"] is rates_of(torch.device("xpu"))
    assert rates_of(torch.device("cpu")) is RATES["cpu"]
