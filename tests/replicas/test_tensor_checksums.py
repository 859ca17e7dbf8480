from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.replicas.tensor_checksums import checksums


def test_a_checksum_sees_a_single_bit_and_no_order() -> None:
    one = torch.tensor([1.0, 2.0, 3.0])
    assert checksums([one, one.flip(0)]) == checksums([one.flip(0), one])
    other = one.clone()
    other.view(torch.int32)[1] += 1
    assert checksums([one]) != checksums([other])
    assert checksums([torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.bool)])[1] == 2
    assert checksums([]) == []


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_checksums_take_little_beside_the_activations_of_a_step(memory_format: torch.memory_format) -> None:
    large = torch.ones(64, 64, 16, 16).to(memory_format=memory_format)
    assert peak_of_passing(lambda: checksums([large])) < large.nbytes / 8
    assert checksums([large]) == checksums([large.contiguous()])


def test_checksums_of_large_tensors_see_a_single_bit() -> None:
    large = torch.arange(2**21, dtype=torch.float32)
    before = checksums([large])
    large.view(torch.int32)[-1] += 1
    assert checksums([large])[0] == before[0] + 1


class Sums(TorchDispatchMode):
    """Counts additions."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += any(name in func.name() for name in ("sum", "add", "zeros"))
        return func(*args, **(kwargs or {}))


def test_checksums_of_small_tensors_take_one_sum_each() -> None:
    with Sums() as sums:
        checksums([torch.arange(16.0) for _ in range(10)])
    assert sums.number == 10
