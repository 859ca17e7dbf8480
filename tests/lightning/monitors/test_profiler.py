"""The profiler sees the operators of replicas in threads, which torch's alone does not."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.profilers import PyTorchProfiler

import lightning_dpx as dpx
from tests import programs
from tests.conftest import make_loader, make_trainer, seeded


def products_of(profiler: PyTorchProfiler) -> int:
    # The check before the first step, and those later on, run in the calling thread.
    strategy: Any = dpx.DPXStrategy(execution="threads", verify="off")
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


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("profiler", [PyTorchProfiler, dpx.DPXProfiler])
def test_memory_is_planned_and_steps_are_checked_beside_a_profiler(tmp_path: Path, profiler, caplog) -> None:
    # The sanity check runs the hooks of the profiler before a step is copied.
    strategy: Any = dpx.DPXStrategy(memory_budget="1GiB", execution="inline", plan_cache=False)
    trainer = make_trainer(strategy=strategy, devices=2, profiler=profiler(tmp_path, "p"), num_sanity_val_steps=1)
    trainer.fit(seeded(), make_loader(), make_loader())
    assert "memory of cpu" in caplog.text
    assert "was not checked" not in caplog.text


def test_it_takes_what_lightnings_takes(tmp_path: Path) -> None:
    assert dpx.DPXProfiler(tmp_path, "p", record_module_names=False, profile_memory=True) is not None


FAILING = """
import sys
import lightning_dpx as dpx
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

class Fails(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise ValueError("of the step")
        return super().training_step(batch, batch_idx)

# Names of the program, which live as long as it does.
model = Fails()
profiler = dpx.DPXProfiler(sys.argv[1], "p")
options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(strategy="dpx", accelerator="cpu", devices=2, profiler=profiler, max_epochs=1, **options)
trainer.fit(model)
"""


def test_a_fit_that_fails_ends_with_its_error(tmp_path: Path) -> None:
    ended = programs.run("-c", FAILING, tmp_path)
    # Not by a signal: a process that crashes has a negative status.
    assert ended.returncode == 1, ended.stderr
    assert "ValueError: of the step" in ended.stderr
