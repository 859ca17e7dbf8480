"""An offloaded tensor: its values are elsewhere until they are fetched, once."""

import gc

import pytest
import torch

from lightning_dpx.devices import OffloadedTensor
from tests.conftest import SIMULATED, sim_device

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
SIZE = 4096  # floats


def test_the_memory_is_free_until_the_values_are_fetched_and_again_after_their_release(sim) -> None:
    tensor = torch.arange(SIZE, dtype=torch.float32, device=sim_device(1))
    held = sim.memory_allocated(1)
    offloaded = OffloadedTensor(tensor, torch.device("cpu"))
    offloaded.free_original()
    del tensor
    gc.collect()
    assert sim.memory_allocated(1) == held - SIZE * 4
    offloaded.start_fetch()
    fetched = offloaded.fetch()
    assert offloaded.fetch() is fetched, "once"
    assert (fetched.device, fetched[-1].item()) == (sim_device(1), SIZE - 1)
    del fetched
    offloaded.release()
    assert sim.memory_allocated(1) == held - SIZE * 4
    assert offloaded.fetch()[1].item() == 1, "the values stay offloaded"


def test_a_device_may_hold_what_the_host_offloads() -> None:
    offloaded = OffloadedTensor(torch.ones(3), sim_device(1))
    assert offloaded.fetch().device == torch.device("cpu")


MATRIX = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    ("view", "strides"),
    [
        (lambda matrix: matrix, (6, 1)),
        (lambda matrix: matrix.T, (1, 6)),
        (lambda matrix: matrix.chunk(2, -1)[1], (4, 1)),
        (lambda matrix: matrix[:, ::2].T, (2, 6)),
        (lambda matrix: matrix[:, :4:3], (4, 2)),
        (lambda matrix: matrix[:, 1:2].expand(4, 5), (2, 0)),
        (lambda matrix: matrix[1].expand(3, 2, 6), (0, 0, 1)),
        (lambda matrix: matrix[0, 0].expand(7), (0,)),
        (lambda matrix: matrix[:, :0], (2, 1)),
        (lambda matrix: matrix[:, None, 2], (2, 6)),
    ],
    ids=[
        "dense", "transposed", "half", "every other", "two apart", "column repeated", "row repeated", "number repeated",
        "empty", "one alone",
    ],
)  # fmt: skip
def test_what_comes_back_has_gaps_where_it_had_them_and_small_ones(view, strides: tuple[int, ...]) -> None:
    tensor = view(MATRIX.to(sim_device(1)))
    offloaded = OffloadedTensor(tensor, torch.device("cpu"))
    fetched = offloaded.fetch()
    assert torch.equal(fetched.cpu(), tensor.cpu())
    assert fetched.stride() == strides


def test_a_row_of_each_sample_comes_back_without_the_memory_of_all_rows(sim) -> None:
    offloaded = OffloadedTensor(torch.ones(8, 100, 64, device=sim_device(1))[:, 0], torch.device("cpu"))
    offloaded.free_original()
    held = sim.memory_allocated(1)
    fetched = offloaded.fetch()
    assert fetched.shape == (8, 64)
    assert sim.memory_allocated(1) - held <= 8 * 68 * 4


@pytest.mark.parametrize(
    ("storage", "shape", "strides", "found"),
    [
        ((2, 128, 768), (2, 4, 128, 64), (98304, 64, 768, 1), (33792, 64, 264, 1)),
        ((2, 129, 136), (2, 129, 129), (17544, 136, 1), (17544, 136, 1)),
        ((64, 7), (64, 5), (7, 1), (6, 1)),
    ],
    ids=["packed attention", "padded bias", "not aligned"],
)
def test_rows_that_were_aligned_come_back_aligned(storage, shape, strides, found) -> None:
    """Kernels of attention load 16 bytes at a time, and refuse rows that begin in between."""
    tensor = torch.randn(storage).bfloat16().to(sim_device(1)).as_strided(shape, strides)
    fetched = OffloadedTensor(tensor, torch.device("cpu")).fetch()
    assert fetched.stride() == found
    assert torch.equal(fetched.cpu(), tensor.cpu())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_ragged_tensors_are_offloaded(layout: torch.layout) -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 3)], layout=layout)
    fetched = OffloadedTensor(ragged, torch.device("cpu")).fetch()
    for one, other in zip(fetched.unbind(), ragged.unbind(), strict=True):
        assert torch.equal(one, other)


def test_windows_that_overlap_come_back_with_their_values() -> None:
    windows = MATRIX.flatten().to(sim_device(1)).unfold(0, 5, 2)
    assert torch.equal(OffloadedTensor(windows, torch.device("cpu")).fetch().cpu(), windows.cpu())


def test_rows_that_repeat_are_away_once(sim) -> None:
    held = sim.memory_allocated(1)
    rows = torch.ones(1, SIZE).expand(50, SIZE)
    offloaded = OffloadedTensor(rows, sim_device(1))
    assert sim.memory_allocated(1) == held + SIZE * 4
    assert offloaded.fetch().shape == rows.shape
