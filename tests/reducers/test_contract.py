"""What every registered reducer must do; a new entry is tested by existing."""

import pytest
import torch

from lightning_dpx.reducers import REDUCERS, make_reducer
from lightning_dpx.simulate import clear_traffic, traffic
from tests.conftest import SIMULATED, places
from tests.reducers.sim_grads import SIZE, sim_grads

CPU = torch.device("cpu")
HERE = [name for name in REDUCERS if name != "nccl"]  # the same contract for NCCL is marked gpu, below


def devices_of(num_replicas: int) -> list[torch.device]:
    return [torch.device(place) for place in places(num_replicas)]


def make_grads(devices: list[torch.device]) -> list[list[torch.Tensor | None]]:
    """Dense of three dtypes, complex, channels last, empty, unused on replica 0, unused everywhere, and sparse."""
    generator = torch.Generator().manual_seed(len(devices))

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rows: list[list[torch.Tensor | None]] = []
    for k, device in enumerate(devices):
        row: list[torch.Tensor | None] = [
            randn(64, 33),
            randn(700).double(),
            randn(8, 3).bfloat16(),
            torch.complex(randn(5), randn(5)),
            randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last),
            randn(0, 3),
            randn(5) if k else None,
            None,
            randn(129),
        ]
        row = [None if gradient is None else gradient.to(device) for gradient in row]
        if device.type == "cpu":
            row.append(torch.sparse_coo_tensor([[k % 3]], randn(1, 2), (3, 2), check_invariants=True))
        rows.append(row)
    return rows


def expected_sums(num_replicas: int, device: torch.device) -> list[torch.Tensor | None]:
    columns = zip(*make_grads([torch.device(device.type, k) for k in range(num_replicas)]), strict=True)
    sums: list[torch.Tensor | None] = []
    for column in columns:
        present = [g.cpu().to_dense() if g.layout != torch.strided else g.cpu() for g in column if g is not None]
        wide = [g.float() if g.dtype == torch.bfloat16 else g for g in present]
        sums.append(torch.stack(wide).sum(0).to(present[0].dtype) if present else None)
    return sums


def check(result: list[torch.Tensor | None], again: list[torch.Tensor | None], num_replicas: int, kind: str) -> None:
    expected = expected_sums(num_replicas, torch.device(kind))
    for total, repeated, reference in zip(result, again, expected, strict=True):
        if reference is None:
            assert total is None
            continue
        assert total.dtype == reference.dtype
        dense, dense_again = (t.to_dense() if t.layout != torch.strided else t for t in (total, repeated))
        torch.testing.assert_close(
            dense.cpu(), reference, rtol=1e-6 if reference.dtype != torch.bfloat16 else 1e-2, atol=1e-6
        )
        assert torch.equal(dense, dense_again)


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("num_replicas", range(1, 9))
def test_equals_the_plain_sum_and_itself_on_the_owners(name: str, num_replicas: int, hardware: str) -> None:
    devices = devices_of(num_replicas)
    reducer = make_reducer(name, devices)
    grads = make_grads(devices)
    owners = reducer.owners([0 if g is None else g.numel() for g in grads[-1]])
    result, again = (reducer.reduce(make_grads(devices), owners=owners) for _ in range(2))
    check(result, again, num_replicas, hardware)
    for total, owner in zip(result, owners, strict=True):
        assert total is None or total.device == devices[owner] or hardware == "cpu"
    assert result[4].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_all_reduce_gives_every_replica_the_sums(name: str, num_replicas: int, hardware: str) -> None:
    devices = devices_of(num_replicas)
    result, again = (make_reducer(name, devices).all_reduce(make_grads(devices)) for _ in range(2))
    for device, row, repeated in zip(devices, result, again, strict=True):
        check(row, repeated, num_replicas, hardware)
        assert all(total is None or total.device == device for total in row)


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("name", HERE)
def test_average_divides_by_the_number_of_replicas(name: str) -> None:
    devices = devices_of(2)

    def grads() -> list[list[torch.Tensor | None]]:
        return [[torch.full((2,), float(k), device=device)] for k, device in zip((1, 3), devices, strict=True)]

    assert make_reducer(name, devices).reduce(grads(), average=True)[0].tolist() == [2, 2]
    assert [row[0].tolist() for row in make_reducer(name, devices).all_reduce(grads(), average=True)] == [[2, 2]] * 2


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_summed_in_float32(name: str, dtype: torch.dtype) -> None:
    devices = devices_of(4)
    large = [[torch.tensor([4e4, 1.0], device=device).to(dtype)] for device in devices]
    total = make_reducer(name, devices).reduce(large, average=True)[0]
    assert total.dtype == dtype
    assert total.tolist() == torch.tensor([4e4, 1.0]).to(dtype).tolist(), "a sum of halves overflows at 65504"
    infinite = [
        [torch.tensor([float("inf") if k == 1 else 1.0], device=device).to(dtype)] for k, device in enumerate(devices)
    ]
    assert make_reducer(name, devices).reduce(infinite)[0].isinf().all(), "an infinity reaches the scaler"


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
@pytest.mark.parametrize("name", HERE)
def test_the_communication_dtype_halves_the_traffic_and_sums_stay_wide(name: str) -> None:
    devices = [torch.device("sim", index) for index in range(4)]

    def moved(dtype: torch.dtype | None) -> tuple[int, torch.Tensor]:
        grads = [[torch.full((4096,), 1 + 2**-7, device=device)] for device in devices]
        clear_traffic()
        total = make_reducer(name, devices, dtype).reduce(grads)[0]
        return sum(transfer.num_bytes for transfer in traffic()), total

    full, _ = moved(None)
    half, total = moved(torch.bfloat16)
    assert half == full / 2
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.cpu(), torch.full((4096,), 4 * (1 + 2**-7)), rtol=2**-8, atol=0)


@pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
@pytest.mark.parametrize("name", HERE)
def test_no_place_but_the_owner_holds_more_than_its_share(name: str) -> None:
    devices, grads = sim_grads(4)
    sim = torch.get_device_module("sim")
    before = [sim.memory_allocated(k) for k in range(4)]
    for k in range(4):
        sim.reset_peak_memory_stats(k)
    make_reducer(name, devices).reduce(grads)
    for k in range(1, 4):
        extra = (sim.max_memory_allocated(k) - before[k]) / (SIZE * 4)
        packed = name in ("collective", "hierarchical")  # gradients that are no views of a bucket are copied into one
        assert extra <= 0.26 * 2 + (1.0 if packed else 0.0), f"sim:{k}"
