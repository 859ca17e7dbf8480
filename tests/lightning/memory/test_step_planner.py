"""Planning at setup, from ``example_batch``; and that a run is as without it."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import lightning_dpx as dpx
from tests.conftest import assert_equal, make_trainer
from tests.lightning.memory.test_example_input import Watched, refused, rows, told, watched
from tests.lightning.memory.test_planning import MIB, fit, loader

# The tower counts what every replica sees.
pytestmark = pytest.mark.filterwarnings("ignore:dpx. .*_step on .* is not what it is on one device.*self.seen")


def test_an_example_batch_that_cannot_fit_is_refused_before_data_are_loaded() -> None:
    error = refused(watched(), memory_budget="2.125MiB", example_batch=rows(256))
    assert "smallest that can is" in str(error)
    assert any("at setup, where memory is planned from example_batch" in note for note in error.__notes__)


def batches(*sizes: int) -> DataLoader[Any]:
    made: Any = [rows(size) for size in sizes]
    return DataLoader(made, batch_size=None)


def test_the_plan_of_an_example_batch_is_kept_until_a_batch_is_larger(caplog: Any) -> None:
    sizes = (64, 128, 256, 150)
    with caplog.at_level("INFO"):
        strategy = dpx.DPXStrategy(memory_budget="4.5MiB", example_batch=rows(128))
        ours = fit(watched(), batches(*sizes), strategy=strategy)
    assert_equal(ours, fit(watched(), batches(*sizes), strategy="dpx"), bitwise=True)
    first, second = told(caplog, "memory of cpu")
    assert "; made from example_batch, before any batch" in first
    assert "example_batch" not in second
    assert sum("profiles a step on" in record.message for record in caplog.records) == 2


def test_planning_at_setup_changes_nothing_in_the_run() -> None:
    """Random numbers, batch norm, what the step appends, and which replicas a short batch goes to."""
    options: dict[str, Any] = {"execution": "inline", "memory_budget": "6MiB"}
    model = watched(dropout=0.2)
    ours = fit(model, loader(128), strategy=dpx.DPXStrategy(**options, example_batch=rows(256)), devices=2)
    theirs = fit(watched(dropout=0.2), loader(128), strategy=dpx.DPXStrategy(**options), devices=2)
    assert_equal(ours, theirs, bitwise=True)
    assert sum(model.seen) == 2 * 128


def test_an_example_without_a_budget_is_refused() -> None:
    with pytest.raises(dpx.ConfigurationError, match="example_batch is what a plan is made from; give memory_budget"):
        dpx.DPXStrategy(example_batch=rows(4))


def test_a_step_that_needs_what_later_hooks_do_says_so() -> None:
    class Late(Watched):
        def on_train_start(self) -> None:
            self.factor = 2.0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) * self.factor

    torch.manual_seed(0)
    with pytest.raises(AttributeError, match="factor") as error:
        fit(Late(), strategy=dpx.DPXStrategy(memory_budget="4.5MiB", example_batch=rows(256)))
    assert any("before on_fit_start and on_train_start" in note for note in error.value.__notes__)
    fit(Late(), strategy=dpx.DPXStrategy(memory_budget="4.5MiB"))


# ---- on simulated devices ----


def test_evaluation_plans_nothing(sim: Any, caplog: Any) -> None:
    with caplog.at_level("INFO"):
        strategy = dpx.DPXStrategy(memory_budget="1MiB", example_batch=rows(256))
        make_trainer(strategy=strategy, accelerator="sim").validate(watched(), loader(64))
    assert not told(caplog, "memory of")


def test_memory_that_others_took_since_is_noticed(sim: Any, caplog: Any) -> None:
    """A hook puts 768 KiB on the device after setup: the plan is made anew from the same profile."""
    held: list[torch.Tensor] = []

    class Greedy(Watched):
        def on_fit_start(self) -> None:
            held.append(torch.ones(3 * 2**16, device="sim:0"))

    torch.manual_seed(0)
    model = Greedy(dropout=0.0)
    sim.reset_peak_memory_stats(0)
    with caplog.at_level("INFO"):
        strategy = dpx.DPXStrategy(memory_budget="4.5MiB", example_batch=rows(256))
        ours = fit(model, strategy=strategy, accelerator="sim")
    assert len(told(caplog, "memory of sim:0")) == 2
    assert len(told(caplog, "profiles a step")) == 1
    assert sim.max_memory_allocated(0) <= 4.5 * MIB
    held.clear()
    assert_equal(ours, fit(watched(dropout=0.0), strategy="dpx", accelerator="sim"), bitwise=True)


def test_shifts_auto_wait_for_the_first_batch(sim: Any, caplog: Any) -> None:
    dpx.simulate(2, memory=["4MiB", "15MiB"])
    strategy = dpx.DPXStrategy(shifts="auto", memory_budget="2.75MiB", example_batch=rows(256))
    with caplog.at_level("INFO"):
        fit(watched(dropout=0.0), strategy=strategy, accelerator="sim")
    assert all("example_batch" not in line for line in told(caplog, "memory of"))
    assert told(caplog, "shifts sim:0 -> sim:1")
