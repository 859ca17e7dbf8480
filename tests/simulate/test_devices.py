"""Memory, traffic and the accelerator of simulated devices."""

import gc
import os

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.distributed._tools import MemTracker

import lightning_dpx as dpx
from lightning_dpx.bench.models import MODELS, BenchModel
from lightning_dpx.simulate import Transfer, clear_traffic, traffic
from lightning_dpx.units import parse_bytes
from tests.conftest import SIMULATED, Classifier, assert_equal, make_loader, make_trainer, run, seeded, simulate_room
from tests.lightning.test_strategy import Dropped, TunableData

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)


def test_storages_are_counted_once_and_views_are_free(sim) -> None:
    before = sim.memory_allocated(3)
    sim.reset_peak_memory_stats(3)
    rows = torch.ones(1000, device="sim:3")
    views = rows[10:], rows.view(10, 100).t(), rows.detach()
    assert sim.memory_allocated(3) - before == 4000
    doubled = rows * 2
    assert sim.memory_allocated("sim:3") - before == 8000
    del rows, doubled
    assert sim.memory_allocated(3) - before == 4000, "views keep their storage"
    del views
    assert sim.memory_allocated(3) == before
    assert sim.max_memory_allocated(3) - before == 8000
    assert sim.memory_stats(3)["allocated_bytes.all.peak"] == sim.max_memory_allocated(3)


def test_a_capacity_is_kept_to_and_nothing_is_lost(sim) -> None:
    held = sim.memory_allocated(1)  # what other tests have left
    dpx.simulate(2, memory=["1GB", held + 1000])
    assert sim.mem_get_info(1) == (1000, held + 1000)
    capacity = rf"sim:1 out of memory.*allocate 4000 bytes.*capacity of {held + 1000}"
    with pytest.raises(torch.OutOfMemoryError, match=capacity):
        torch.ones(1000, device="sim:1")
    rows = torch.ones(100, device="sim:1")
    with pytest.raises(torch.OutOfMemoryError):
        torch.outer(rows, rows)
    assert sim.memory_allocated(1) == held + 400
    with pytest.raises(RuntimeError, match="There is no sim:2: 2 devices"):
        torch.ones(1, device="sim:2")


def one_step(model: BenchModel, device: str, batch_size: int, tracker: MemTracker | None = None) -> None:
    torch.manual_seed(0)
    net, (rows, labels) = model.build().to(device), model.make_batch(batch_size)
    rows, labels = rows.to(device), labels.to(device)
    optimizer = torch.optim.Adam(net.parameters(), foreach=False)  # accelerators default to foreach

    def step() -> None:
        nn.functional.cross_entropy(net(rows), labels.flatten()).backward()
        optimizer.step()

    if tracker is None:
        return step()
    tracker.track_external(net, optimizer, rows, labels)
    with tracker:
        return step()


@pytest.mark.parametrize("name", ["deep", "wide", "cnn"])
def test_the_peak_is_that_of_the_memory_tracker(name, sim) -> None:
    tracker = MemTracker()
    one_step(MODELS[name], "cpu", 16, tracker)
    expected = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    before = sim.memory_allocated(1)
    sim.reset_peak_memory_stats(1)
    one_step(MODELS[name], "sim:1", 16)
    assert sim.max_memory_allocated(1) - before == pytest.approx(expected, rel=0.02)


def test_a_step_that_does_not_fit_frees_everything_and_a_smaller_one_trains(sim) -> None:
    model = MODELS["cnn"]
    one_step(model, "sim:0", 4)
    needed = sim.max_memory_allocated(0)
    dpx.simulate(1, memory=2 * needed)
    before = sim.memory_allocated(0)
    with pytest.raises(torch.OutOfMemoryError):
        one_step(model, "sim:0", 32)
    gc.collect()
    # Less where the thread of the device's backward had not yet let go of the last of the step before.
    assert sim.memory_allocated(0) <= before
    one_step(model, "sim:0", 4)
    assert sim.max_memory_allocated(0) <= 2 * needed


def test_the_batch_size_finder_stops_at_the_capacity(sim) -> None:
    simulate_room(20_000, 20_000)
    trainer = make_trainer(max_epochs=1, accelerator="sim", devices=2, strategy=dpx.DPXStrategy())
    found = Tuner(trainer).scale_batch_size(seeded(), datamodule=Big(), max_trials=12, steps_per_trial=1)
    assert 2 <= found < 2**13


class Big(TunableData):
    def train_dataloader(self):
        return make_loader(num_rows=8192, batch_size=self.batch_size)

    val_dataloader = train_dataloader


def test_copies_are_counted_by_route_and_maker(sim) -> None:
    clear_traffic()
    here = torch.ones(100, device="sim:1")
    for _ in range(3):
        here.to("sim:2")
    here.cpu()
    here.to("sim:1")
    by_route = {(str(transfer.source), str(transfer.target)): transfer for transfer in traffic()}
    assert set(by_route) == {("sim:1", "sim:2"), ("sim:1", "cpu")}
    transfer = by_route["sim:1", "sim:2"]
    assert isinstance(transfer, Transfer)
    assert (transfer.num_copies, transfer.num_bytes) == (3, 1200)
    assert transfer.maker.endswith("test_devices.test_copies_are_counted_by_route_and_maker")


def test_a_step_broadcasts_small_parameters_together_and_once_per_replica(sim) -> None:
    model = seeded()
    options = {"accelerator": "sim", "devices": 3, "strategy": dpx.DPXStrategy(verify="off"), "max_epochs": 1}
    trainer = make_trainer(limit_train_batches=4, limit_val_batches=0, **options)
    clear_traffic()
    trainer.fit(model, make_loader(num_rows=64), make_loader())
    followed = [transfer for transfer in traffic() if transfer.maker.startswith("replicas.parameter_copies")]
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert {(str(t.source), str(t.target), t.num_copies, t.num_bytes) for t in followed} == {
        ("sim:0", "sim:1", 4, 4 * size),
        ("sim:0", "sim:2", 4, 4 * size),
    }


@pytest.mark.parametrize("execution", ["inline", "threads", "auto"])
def test_dropout_is_reproducible(execution, sim) -> None:
    def weights() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Dropped()
        options = {"accelerator": "sim", "devices": 4, "strategy": dpx.DPXStrategy(execution=execution)}
        return run(model, **options)

    first = weights()
    for _ in range(2):
        assert_equal(weights(), first, bitwise=True)


@pytest.mark.parametrize(
    ("devices", "expected"), [(2, [0, 1]), ("2", [0, 1]), ([1, 3], [1, 3]), ("1,3", [1, 3]), (-1, list(range(8)))]
)
def test_the_accelerator_takes_devices_as_lightning_does(devices, expected, sim) -> None:
    trainer = make_trainer(accelerator="sim", devices=devices, strategy="dpx")
    assert trainer.strategy.parallel_devices == [torch.device("sim", index) for index in expected]


def test_other_devices_than_there_are_and_other_strategies_are_refused(sim) -> None:
    with pytest.raises(MisconfigurationException, match="there are 0 to 7"):
        make_trainer(accelerator="sim", devices=[8], strategy="dpx")
    with pytest.raises(MisconfigurationException, match="Use strategy='dpx'"):
        run(Classifier(), accelerator="sim", devices=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_devices": 0}, "num_devices=0 is not allowed; give 1 to 16"),
        ({"num_devices": 2, "memory": ["1GiB"]}, "memory has 1 entries for 2 devices"),
        ({"memory": "much"}, "memory='much' is not allowed"),
        ({"memory": 0.5}, r"memory=0\.5 is not allowed"),
        ({"num_devices": True}, "num_devices=True is not allowed"),
        ({"speed": None}, "speed=None is not allowed"),
        ({"num_devices": 2, "speed": [1, "x"]}, r"speed=\[1, 'x'\] is not allowed"),
    ],
)
def test_bad_numbers_are_refused(options, message) -> None:
    with pytest.raises(dpx.ConfigurationError, match=message):
        dpx.simulate(**options)


def test_sizes_as_text() -> None:
    sizes = [parse_bytes("memory", text) for text in (1, "10", "2KiB", "1.5 MiB", "2GB", "1TiB")]
    assert sizes == [1, 10, 2048, 1.5 * 2**20, 2 * 10**9, 2**40]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_integers_are_counted_as_on_a_gpu(dtype: torch.dtype, sim) -> None:
    experts = torch.tensor([0, 1, 1, 3, 3, 3], dtype=dtype, device="sim:1")
    counts = torch.histc(experts, bins=4, min=0, max=3)
    assert counts.device == experts.device
    assert counts.dtype == dtype
    assert counts.tolist() == [1, 2, 0, 3]


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_real_gpus_are_hidden_from_tests_on_simulated_ones(variable: str) -> None:
    """Whatever the shell has set: torch for AMD's reads a variable of its own first."""
    assert os.environ[variable] == ""
