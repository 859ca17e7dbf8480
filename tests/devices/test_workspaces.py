"""What libraries keep for each thread that multiplies on a device is taken when asked for, and counted by planners."""

import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_dpx as dpx
from lightning_dpx.devices import keeps_workspaces, take_workspaces
from lightning_dpx.memory.profile import costs, profiler
from lightning_dpx.replicas import replica_set
from lightning_dpx.shifting import apply_shift
from tests.conftest import SIMULATED
from tests.lightning.memory.test_planning import Tower, fit, loader

MIB = 2**20
on_devices = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class _Products(TorchDispatchMode):
    """Notes in which thread a matrix product runs."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.threads.add(threading.current_thread().name)
        return func(*args, **(kwargs or {}))


@on_devices
@pytest.mark.parametrize("grad", [True, False])
def test_the_calling_thread_and_that_of_autograd_multiply(grad: bool) -> None:
    with torch.set_grad_enabled(grad), _Products() as products:
        take_workspaces(torch.device("sim", 0))
    assert threading.current_thread().name in products.threads
    assert len(products.threads) == 2


def test_only_accelerators_whose_libraries_keep_any_are_asked(monkeypatch: Any) -> None:
    assert keeps_workspaces(torch.device("cuda", 1))
    assert not keeps_workspaces(torch.device("cpu"))


@pytest.mark.parametrize(
    ("config", "warn_only", "keeps"),
    [
        (":4096:8", False, True),
        (":16:8", False, True),
        ("", False, False),
        (":0:0", False, False),
        ("", True, True),
        (":0:0", True, True),
    ],
)
def test_where_every_product_is_an_error_there_are_none(
    monkeypatch: Any, config: str, warn_only: bool, keeps: bool
) -> None:
    """What torch takes for repeatable, and whether it raises or warns elsewhere, is what counts."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if config:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        assert keeps_workspaces(torch.device("cuda", 1)) is keeps
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=needs_gpu)])
def test_after_that_a_step_in_the_same_thread_leaves_nothing_more(device: str) -> None:
    found: list[int] = []

    def work() -> None:
        take_workspaces(torch.device(device))
        found.append(torch.cuda.memory_allocated(device))
        rows = torch.randn(64, 64, device=device, requires_grad=True)
        torch.nn.functional.linear(rows, rows, rows[0]).square().sum().backward()
        del rows
        found.append(torch.cuda.memory_allocated(device))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:  # one after the other, but all alive: none takes over what another has left
        thread.start()
        thread.join()
    # Autograd's thread may hold the rows and their gradient for a moment longer; what libraries take is 1 MiB or more.
    slack = MIB // 4
    assert abs(found[0] - found[1]) < slack, "the first"
    assert abs(found[4] - found[5]) < slack, "the last"


@on_devices
@pytest.mark.parametrize("execution", ["inline", "threads"])
def test_they_are_among_what_a_plan_leaves_room_for(monkeypatch: Any, execution: Any) -> None:
    """Two threads that take 1 MiB each for good at their first product, as libraries do on a GPU."""
    device = torch.device("sim", 0)
    sim, kept = torch.get_device_module("sim"), dict[str, torch.Tensor]()

    def take(_device: torch.device) -> None:
        name = threading.current_thread().name
        if name not in kept:
            kept[name] = torch.empty(MIB, dtype=torch.uint8, device=device)

    class Multiplies(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(10)))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            take(device)
            return super().training_step(batch, batch_idx)

        def on_before_zero_grad(self, *_: Any) -> None:
            peaks.append(sim.max_memory_allocated(0) - before)

    for user in (replica_set, profiler):
        monkeypatch.setattr(user, "keeps_workspaces", lambda device: device.type == "sim")
        monkeypatch.setattr(user, "take_workspaces", take)
    # As a real device is timed, and not by its own clock.
    monkeypatch.setattr(costs, "is_modelled", lambda device: False)
    gc.collect()
    before, budget, peaks = sim.memory_allocated(0), 16 * MIB, list[int]()
    strategy = dpx.DPXStrategy(
        parallel_devices=[device] * 2, execution=execution, memory_budget=before + budget, verify="off"
    )
    fit(Multiplies(), loader(1024, batches=3), strategy=strategy, accelerator="sim", devices="auto")
    assert len(kept) == (1 if execution == "inline" else 3), "of the thread that profiles, and of the replicas"
    assert max(peaks[1:]) <= budget


@on_devices
def test_threads_take_them_on_the_devices_of_shifted_parts_too(monkeypatch: Any) -> None:
    taken: set[tuple[str, int]] = set()
    monkeypatch.setattr(replica_set, "keeps_workspaces", lambda device: device.type == "sim")
    monkeypatch.setattr(
        replica_set, "take_workspaces", lambda device: taken.add((threading.current_thread().name, device.index))
    )
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to("sim:0")
    replicas = replica_set.ReplicaSet(module, [torch.device("sim", 0)] * 2, execution="threads")
    for replica in replicas.replicas:
        apply_shift(replica.module, "2", {"sim:0": "sim:1"})
    try:
        replicas.take_workspaces()
    finally:
        replicas.close()
    assert taken == {(f"dpx-lane-{lane}", device) for lane in (0, 1) for device in (0, 1)}
