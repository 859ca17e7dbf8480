"""The throughput monitor sees what every replica does, on any strategy, and leaves no trace in the other steps."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.simulate import simulate
from tests.conftest import SIMULATED, assert_equal, make_loader, make_trainer, places, run, seeded

sim_only = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)


@pytest.mark.usefixtures("hardware")
def test_rows_shares_and_times_of_every_replica(execution: str) -> None:
    monitor = dpx.DeviceThroughputMonitor(table=False)
    strategy = dpx.DPXStrategy(execution=execution, workload=[3, 1])
    trainer = make_trainer(strategy=strategy, devices=2, callbacks=[monitor], limit_train_batches=2, max_epochs=1)
    trainer.fit(seeded(), make_loader(), make_loader())
    assert [work.samples for work in monitor.last] == [12, 4]
    assert [work.share_pct for work in monitor.last] == [75, 25]
    assert [work.device for work in monitor.last] == [str(torch.device(place)) for place in places(2)]
    for work in monitor.last:
        assert work.forward_ms > 0
        assert work.backward_ms > 0
        assert 0 <= work.idle_pct < 100
    assert monitor.samples_per_second > 0


@sim_only
def test_the_slow_device_idles_less() -> None:
    """Time is modelled: device 1 has a quarter of the speed of device 0, and both get as many rows."""

    class Wide(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            pl_module.net = nn.Sequential(nn.Linear(8, 4096), nn.Tanh(), nn.Linear(4096, 3))

    simulate(2, speed=[1.0, 0.25])
    try:
        monitor = dpx.DeviceThroughputMonitor(table=False)
        options = {"accelerator": "sim", "limit_train_batches": 2, "max_epochs": 1, "callbacks": [Wide(), monitor]}
        make_trainer(strategy="dpx", devices=2, **options).fit(seeded(), make_loader(), make_loader())
    finally:
        simulate(8)
    fast, slow = monitor.last
    assert slow.forward_ms > 3 * fast.forward_ms
    assert fast.idle_pct > slow.idle_pct + 30


@pytest.mark.parametrize(("accelerator", "is_modelled"), [pytest.param("sim", True, marks=sim_only), ("cpu", False)])
def test_a_rate_in_modelled_time_says_so(accelerator: str, is_modelled: bool, caplog: Any) -> None:
    with caplog.at_level("INFO"):
        make_trainer(
            strategy="dpx", accelerator=accelerator, devices=2, max_steps=2, callbacks=[dpx.DeviceThroughputMonitor()]
        ).fit(seeded(), make_loader(), make_loader())
    title = next(record.message for record in caplog.records if "work of the last step" in record.message).splitlines()[
        0
    ]
    assert title.endswith("samples/s in the modelled time of simulated devices") == is_modelled


@pytest.mark.parametrize("strategy", ["auto", "dpx"])
def test_one_device_is_one_replica(strategy: str) -> None:
    monitor = dpx.DeviceThroughputMonitor(table=False)
    own = {} if strategy == "auto" else {"strategy": strategy}
    make_trainer(callbacks=[monitor], limit_train_batches=2, max_epochs=1, **own).fit(
        seeded(), make_loader(), make_loader()
    )
    (work,) = monitor.last
    assert (work.device, work.samples, work.share_pct) == ("cpu", 16, 100)
    assert work.forward_ms > 0 < work.backward_ms


def test_merged_replicas_count_as_the_one_that_works() -> None:
    monitor = dpx.DeviceThroughputMonitor(table=False)
    strategy = dpx.DPXStrategy()
    trainer = make_trainer(strategy=strategy, devices=4, callbacks=[monitor], limit_train_batches=2, max_epochs=1)
    trainer.fit(seeded(), make_loader(), make_loader())
    assert [work.samples for work in monitor.last] == [16, 0, 0, 0]
    assert monitor.last[0].forward_ms > 0
    assert monitor.last[3].idle_pct == 100


def test_files_logs_table_and_pace(tmp_path: Path, caplog: Any) -> None:
    monitor = dpx.DeviceThroughputMonitor(save_to=tmp_path / "work.csv", every_n_steps=3)
    logger = CSVLogger(tmp_path, name="", version="")
    strategy = dpx.DPXStrategy(execution="inline")
    with caplog.at_level("INFO"):
        make_trainer(strategy=strategy, devices=2, callbacks=[monitor], logger=logger, log_every_n_steps=1).fit(
            seeded(), make_loader(), make_loader()
        )
    with (tmp_path / "work.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["replica"]) for row in rows] == [
        (str(step), str(replica)) for step in (0, 1, 2, 5) for replica in range(2)
    ]
    assert "waiting_ms" not in rows[0], "there is no other process"
    assert monitor.waiting_ms is None
    with (tmp_path / "metrics.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row["dpx/throughput/samples_per_second"]]
    assert len(logged) == 4
    assert float(logged[0]["dpx/throughput/replica1/share_pct"]) == 50
    table = next(record.message for record in caplog.records if "work of the last step" in record.message)
    assert table.splitlines()[1].split()[:3] == ["replica", "device", "samples"]


@pytest.mark.usefixtures("hardware")
def test_watching_changes_nothing(execution: str) -> None:
    options = {"devices": 3}
    monitors = [dpx.DeviceThroughputMonitor(table=False), dpx.DeviceMemoryMonitor(table=False)]
    watched = run(seeded(), strategy=dpx.DPXStrategy(execution=execution), callbacks=monitors, **options)
    assert_equal(watched, run(seeded(), strategy=dpx.DPXStrategy(execution=execution), **options), bitwise=True)


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_bad_arguments(value: Any) -> None:
    with pytest.raises(dpx.ConfigurationError, match=r"every_n_steps=.* is not allowed; give a positive integer"):
        dpx.DeviceThroughputMonitor(every_n_steps=value)
    with pytest.raises(dpx.ConfigurationError, match=r"save_to='work\.txt' is not allowed"):
        dpx.DeviceThroughputMonitor(save_to="work.txt")
