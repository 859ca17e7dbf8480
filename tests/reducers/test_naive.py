"""Plain sums, whose order of additions never changes."""

import pytest
import torch

from lightning_dpx.reducers import make_reducer
from lightning_dpx.simulate import clear_traffic, traffic
from tests.conftest import SIMULATED


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
def test_parameters_are_dealt_to_the_devices_from_the_last_and_added_in_replica_order() -> None:
    devices = [torch.device("sim", index) for index in range(2)]
    large = [[torch.tensor([1e8]), torch.tensor([2.0])], [torch.tensor([-1e8]), torch.tensor([3.0])]]
    grads = [[value.to(device) for value in row] for row, device in zip(large, devices, strict=True)]
    clear_traffic()
    assert [total.item() for total in make_reducer("naive", devices).reduce(grads)] == [0, 5]
    crossed = {(copy.source.index, copy.target.index): copy.num_bytes for copy in traffic()}
    assert crossed == {(0, 1): 4, (1, 0): 8}, "the last is summed on the first device, the sum of the other comes back"


def test_the_bits_are_those_of_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [[torch.randn(100, generator=generator)] for _ in range(5)]
    expected = grads[0][0].clone()
    for row in grads[1:]:
        expected += row[0]
    total = make_reducer("naive", [torch.device("cpu")] * 5).reduce(grads)[0]
    assert torch.equal(total, expected)
