"""What the backend of simulated devices tells of them: threads, clocks, memory, generators."""

import threading
from collections.abc import Callable

import pytest
import torch

import lightning_dpx as dpx
from tests import programs
from tests.conftest import SIMULATED

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)


def test_backward_runs_in_one_thread_per_device(sim) -> None:
    seen: dict[str, int] = {}

    class Witness(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            return rows.clone()

        @staticmethod
        def backward(ctx, grad):
            seen[str(grad.device)] = threading.get_ident()
            return grad

    rows = [torch.ones(2, device=f"sim:{index}", requires_grad=True) for index in range(3)]
    sum(Witness.apply(row).sum().to("sim:0") for row in rows).backward()
    assert len(set(seen.values())) == 3


def test_too_late_is_said_so_every_time() -> None:
    script = (
        "import torch, lightning_dpx as dpx\n"
        "torch.ones(1, requires_grad=True).sum().backward()\n"
        "for _ in range(2):\n"
        "    try:\n        dpx.simulate(2)\n"
        "    except dpx.UnsupportedError as error:\n        print(error)\n"
    )
    assert programs.printed_by(script).count("must come before the first backward") == 2


def modelled_ms(call: Callable[[], object], device: str) -> float:
    module = torch.get_device_module("sim")
    with module.device(torch.device(device).index):
        start, end = module.Event(), module.Event()
        start.record()
        call()
        end.record()
    return start.elapsed_time(end)


def test_time_is_bytes_over_speed_and_copies_take_the_link(sim) -> None:
    rows = torch.ones(1000, device="sim:0")
    dpx.simulate(2, speed=[1, 0.25])
    slow_rows = rows.to("sim:1")
    fast, slow = modelled_ms(lambda: rows + rows, "sim:0"), modelled_ms(lambda: slow_rows + slow_rows, "sim:1")
    assert fast == pytest.approx(3 * 4000 / 1e11 * 1e3)
    assert slow == pytest.approx(4 * fast)
    assert modelled_ms(lambda: rows.view(10, 100).t(), "sim:0") == 0, "views are free"
    assert modelled_ms(lambda: rows.to("sim:1"), "sim:0") == 0, "and so are copies without a link"
    # As a number of bytes, or as a rate, of bytes or bits.
    for link in ("1MB", "1MB/s", "8Mb/s"):
        dpx.simulate(2, link=link, latency=1e-3)
        for device in ("sim:0", "sim:1"):
            assert modelled_ms(lambda: rows.to("sim:1"), device) == pytest.approx(1 + 4)
    for options, message in (
        ({"link": -1}, "link=-1"),
        ({"link": "1/s"}, "link='1/s'"),
        ({"latency": -1.0}, r"latency=-1\.0"),
    ):
        with pytest.raises(dpx.ConfigurationError, match=message):
            dpx.simulate(2, **options)
