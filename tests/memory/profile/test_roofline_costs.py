"""A step that runs here is priced for another device."""

import torch

from lightning_dpx.memory.profile.roofline import rates_of
from lightning_dpx.memory.profile.roofline_costs import RatedTrace, RooflineCosts

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def test_seconds_are_those_of_the_other_device() -> None:
    x = torch.ones(64, 64)
    with RatedTrace(CPU, GPU) as trace:
        out = x @ x
    assert trace.seconds == rates_of(GPU).seconds(torch.ops.aten.mm.default, (x, x), {}, out)
    # Bytes of tensors are the same everywhere.
    assert trace.live == out.nbytes


def test_copies_take_what_the_link_of_the_other_device_takes() -> None:
    costs = RooflineCosts(CPU, GPU)
    x = torch.ones(1024)
    assert costs.copy_seconds(x) == x.nbytes / rates_of(GPU).host_bytes
    assert costs.offloading_room() == 0
    assert costs.offloads
    assert not RooflineCosts(CPU, CPU).offloads
