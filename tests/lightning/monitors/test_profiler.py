"""The profiler sees the operators of replicas in threads, which torch's alone does not."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.profilers import PyTorchProfiler

import lightning_dpx as dpx
from tests.conftest import make_loader, make_trainer, seeded


def products_of(profiler: PyTorchProfiler) -> int:
    strategy: Any = dpx.DPXStrategy(execution="threads")
    options = {"strategy": strategy, "devices": 2, "profiler": profiler, "max_epochs": 1, "limit_val_batches": 0}
    make_trainer(**options, limit_train_batches=4).fit(seeded(), make_loader(), make_loader())
    assert profiler.function_events is not None
    return sum(event.name == "aten::addmm" for event in profiler.function_events)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_it_sees_every_replica(tmp_path: Path) -> None:
    alone = products_of(PyTorchProfiler(tmp_path, "alone", export_to_chrome=False))
    ours = products_of(dpx.DPXProfiler(tmp_path, "ours", row_limit=-1))
    # The very first step takes turns in the calling thread, to see whether it draws random numbers.
    assert ours >= 2 * 2 * 4, "of the recorded steps two are whole, on two replicas that multiply four times"
    assert alone < ours // 2
    assert "aten::addmm" in (tmp_path / "fit-ours.txt").read_text()
    assert list(tmp_path.glob("*.pt.trace.json"))
