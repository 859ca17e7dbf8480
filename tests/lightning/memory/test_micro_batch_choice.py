"""``micro_batches="auto"``: what the first batch decides, and what its rehearsal takes back."""

import gc
import json
import re
import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_dpx as dpx
from lightning_dpx.lightning.memory import loss_probe, profiling, slice_timing
from lightning_dpx.lightning.rehearsal import verification
from lightning_dpx.memory import Planner
from lightning_dpx.memory.plan.problem import Choice, Problem
from lightning_dpx.python_objects.trial_garbage import TrialGarbage
from tests.conftest import MakesParametersAnew, StepsByHand, make_trainer

ROWS = 512
UNPLANNED = 880_000  # bytes, about, of the activations of a step on all rows
HALF = UNPLANNED // 2
SEEN: SimpleQueue[int] = SimpleQueue()  # rows of steps: where no rehearsal looks for Python state


class KeepsAll(Planner):
    """Computes nothing again, so that only micro-batches can meet a budget."""

    name = "keeps all"

    def choose(self, problem: Problem, budget: int | None) -> Choice:
        return Choice()


class Tower(LightningModule):
    """Rows (B, 16) to a loss, the mean over them."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        norms = [nn.BatchNorm1d(64) if norm else nn.Identity() for _ in range(4)]
        blocks = [nn.Sequential(nn.Linear(16, 64), one, nn.Tanh(), nn.Linear(64, 16)) for one in norms]
        self.net = nn.Sequential(*blocks)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_step == 2:  # the first step is also profiled and rehearsed, the second looked at again
            SEEN.put(len(batch))
        loss = self.net(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        SEEN.put(-len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(StepsByHand, Tower):
    """The same, optimized by hand."""


class KeepsPlan(Callback):
    """Which the strategy forgets when fit ends."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        (self.plan, _profile), *_others = trainer.strategy.memory_plans.values()


class OverAllRows(Tower):
    """The spread of its outputs, which no mean over slices gives."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        return {"rows": self.net(batch).mean(1)}

    def training_step_end(self, outputs: Any) -> torch.Tensor:
        loss: torch.Tensor = outputs["rows"].std()
        return loss


class OverAllRowsAtOnce(OverAllRows):
    """The same in Lightning's own words, which has no such hook."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return OverAllRows.training_step_end(self, super().training_step(batch, batch_idx))

    training_step_end = None  # type: ignore[assignment]


def seen_rows() -> list[int]:
    """Of the third training step, and of evaluation as negative numbers."""
    return [SEEN.get() for _ in range(SEEN.qsize())]


def fitted(module: LightningModule, devices: int = 1, **options: Any) -> dict[str, torch.Tensor]:
    rows = torch.randn(3 * ROWS, 16, generator=torch.Generator().manual_seed(1))
    trainer_options: dict[str, Any] = {"accelerator": options.pop("accelerator", "cpu"), "max_epochs": 1}
    trainer_options["callbacks"] = options.pop("callbacks", [])
    if options:
        trainer_options["strategy"] = dpx.DPXStrategy(plan_cache=False, **options)
    trainer = make_trainer(devices=devices, **trainer_options)
    trainer.fit(module, DataLoader(rows, ROWS), DataLoader(rows[:ROWS], ROWS))
    seen = {**module.state_dict(), "loss": trainer.callback_metrics["loss"]}
    return {name: value.detach().cpu().clone() for name, value in seen.items()}


def static_bytes(module: nn.Module) -> int:
    """Parameters, buffers and gradients; SGD has no state."""
    return 2 * sum(p.nbytes for p in module.parameters()) + sum(b.nbytes for b in module.buffers())


def options_for(module: nn.Module, activations: int, **more: Any) -> dict[str, Any]:
    return {"memory_budget": static_bytes(module) + activations, "micro_batches": "auto", "planner": KeepsAll(), **more}


@pytest.fixture(scope="module")
def one_device() -> dict[str, torch.Tensor]:
    return fitted(Tower())


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def test_a_step_that_does_not_fit_is_cut(one_device, caplog) -> None:
    seen_rows()
    module = Tower()
    caplog.set_level("INFO")
    torch.testing.assert_close(fitted(module, **options_for(module, HALF)), one_device)
    rows = seen_rows()
    trained = [one for one in rows if one > 0]
    assert sum(trained) == ROWS
    assert len(trained) > 1
    assert -ROWS in rows, "evaluation keeps nothing for backward, so it fits"
    assert f"{len(trained)} micro-batches of {trained[0]} rows, no values recomputed: " in said(caplog)
    assert "as on one device" in said(caplog)


def test_a_batch_that_is_larger_than_those_that_were_cut_is_profiled_in_micro_batches(caplog) -> None:
    """In one piece a look at it takes several times the budget: what had to be cut has no room for that."""
    sizes = (ROWS, 5 * ROWS // 4, 4 * ROWS)
    module = Tower()
    options = options_for(module, HALF)
    caplog.set_level("INFO")
    trainer = make_trainer(devices=1, max_epochs=1, strategy=dpx.DPXStrategy(plan_cache=False, **options))
    batches: Any = [torch.randn(rows, 16) for rows in sizes]
    data = DataLoader(batches, batch_size=None)
    trainer.fit(module, data, data)
    whole, *parts = [int(rows) for rows in re.findall(r"profiles a step on (\d+) rows", said(caplog))]
    assert whole == ROWS
    assert max(parts) < ROWS
    cut = [int(number) for number in re.findall(r"(\d+) micro-batches of", said(caplog))]
    assert cut[0] < cut[-1], "the largest is cut further"


class LeavesGarbage(Callback):
    """Leaves a tensor in a reference cycle before the first step, and looks whether it is there after it."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: torch.Tensor, index: int) -> None:
        if index == 0:
            cycle: list[Any] = [torch.ones(4)]
            self.left = weakref.ref(cycle[0])
            cycle.append(cycle)
            gc.collect()  # what has outlived one search is old, and looked for in no short one

    def on_train_batch_end(self, *_: Any) -> None:
        self.is_there = self.left() is not None


@pytest.mark.usefixtures("no_collection")
def test_no_step_has_garbage_of_before_the_choice_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in reference cycles is in no figure of the host, and yet takes memory in every later step."""
    # Tests leave what was imported out of searches, and trials then search all that is left: as in a program of a
    # user's they search their own.
    gc.unfreeze()
    own = TrialGarbage()
    for trial in (loss_probe, profiling, slice_timing, verification):
        monkeypatch.setattr(trial, "TRIAL_GARBAGE", own)
    module = Tower()
    garbage = LeavesGarbage()
    fitted(module, callbacks=[garbage], **options_for(module, HALF))
    assert not garbage.is_there


def test_the_monitor_and_its_page_show_the_number_beside_the_plan(tmp_path, caplog) -> None:
    seen_rows()
    module = Tower()
    page = tmp_path / "report.html"
    file = tmp_path / "memory.json"
    monitor = dpx.DeviceMemoryMonitor(save_to=file, report=page, every_n_steps=1)
    caplog.set_level("INFO")
    fitted(module, callbacks=[monitor], **options_for(module, HALF))
    trained = [one for one in seen_rows() if one > 0]
    head = f"{len(trained)} micro-batches of {trained[0]} rows, no values recomputed: "
    assert re.search(re.escape(head) + r"\d\.\d\d x, peak \d+\.\d of \d+\.\d KiB", said(caplog))
    assert [one.micro_batches for one in monitor.last.values()] == [len(trained)]
    assert {row["micro_batches"] for row in json.loads(file.read_text())} == {len(trained)}
    _title, heads, row = monitor.format_table().splitlines()[:3]
    assert heads.split()[-1] == "micro-batches"
    assert row.split()[-1] == str(len(trained))
    assert head in page.read_text()


def test_a_saved_plan_cuts_as_it_says(one_device, tmp_path, caplog) -> None:
    seen_rows()
    module = Tower()
    kept = KeepsPlan()
    fitted(module, callbacks=[kept], **options_for(module, HALF))
    trained = [one for one in seen_rows() if one > 0]
    plan = kept.plan
    plan.save(tmp_path / "plan.yaml")
    assert f"micro_batches: {len(trained)}\n" in (tmp_path / "plan.yaml").read_text()
    caplog.set_level("INFO")
    torch.testing.assert_close(fitted(Tower(), plan=str(tmp_path / "plan.yaml")), one_device)
    assert [one for one in seen_rows() if one > 0] == trained
    assert f"follows the given plan; {len(trained)} micro-batches of {trained[0]} rows" in said(caplog)
    with pytest.warns(UserWarning, match=rf"plan is for {len(trained)} micro-batches of every slice, and \[9\] are"):
        fitted(Tower(), plan=plan, micro_batches=9)
    # All rows at once are another step than that of a micro-batch, and exceed its budget.
    with (
        pytest.warns(UserWarning, match=r"micro-batches of .* rows.*, and SingleDeviceStrategy cuts no batches"),
        pytest.warns(UserWarning, match="it is another step than the planned one, or a larger one"),
    ):
        fitted(Tower(), callbacks=[dpx.ActivationPlanner(plan=plan)])


def test_a_step_that_fits_stays_in_one_piece_and_is_profiled_once(one_device, caplog) -> None:
    seen_rows()
    module = Tower()
    caplog.set_level("INFO")
    seen = fitted(module, **options_for(module, 8 * UNPLANNED))
    assert all(torch.equal(value, one_device[name]) for name, value in seen.items())
    assert [rows for rows in seen_rows() if rows > 0] == [ROWS]
    assert said(caplog).count("profiles a step") == 1


def test_an_evaluation_that_takes_nothing_is_not_said_to_exceed_a_budget_without_room() -> None:
    with pytest.raises(dpx.BudgetError, match="what is there beside activations"):
        fitted(Tower(), **options_for(Tower(), 1000))


class Norm(Tower):
    """The norm of what all rows give."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx).sqrt()


def test_a_refusal_says_what_a_step_needs_whose_micro_batches_do_not_stay() -> None:
    """A check would find that they are not what one device gives."""
    with pytest.raises(dpx.BudgetError, match=r"In \d+ micro-batches") as error:
        fitted(Norm(), **options_for(Tower(), 34_000))
    notes = "\n".join(error.value.__notes__)
    in_one_piece = re.search(r"In one piece a step needs ([\d.]+ [KM]iB): micro-batches stay only where", notes)
    assert in_one_piece is not None
    fitted(Norm(), memory_budget=in_one_piece[1], micro_batches="auto")


def test_without_a_budget_there_is_nothing_to_choose_for(one_device) -> None:
    seen_rows()
    seen = fitted(Tower(), micro_batches="auto")
    assert all(torch.equal(value, one_device[name]) for name, value in seen.items())
    assert [rows for rows in seen_rows() if rows > 0] == [ROWS]


def test_batch_norm_keeps_the_step_in_one_piece(caplog) -> None:
    module = Tower(norm=True)
    caplog.set_level("INFO")
    with pytest.raises(dpx.BudgetError):  # with this planner, only micro-batches would have met it
        fitted(module, **options_for(module, HALF))
    assert "not what one device gives: net.0.1, net.1.1, net.2.1 would normalize by micro-batch" in said(caplog)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_loss_over_all_rows_is_cut_in_two_passes(devices, caplog) -> None:
    seen_rows()
    module = OverAllRows()
    caplog.set_level("INFO")
    options = options_for(module, HALF, execution="inline")
    torch.testing.assert_close(fitted(module, devices, **options), fitted(OverAllRowsAtOnce()))
    trained = [rows for rows in seen_rows() if rows > 0]
    found = re.search(r"(\d+) micro-batches of (\d+) rows, no values recomputed: (\d\.\d\d) x", said(caplog))
    assert found is not None
    assert max(rows for rows in trained if rows < ROWS) == int(found[2])
    assert float(found[3]) > 1.05, "every forward runs twice"
    assert "every micro-batch runs forward twice" in said(caplog)


def test_steps_that_cannot_be_cut_further_say_why(caplog) -> None:
    kind, why = ByHand, "they optimize by hand"
    module = kind()
    caplog.set_level("INFO")
    start = "training steps stay whole, where micro-batches may be faster: "
    roomy = options_for(module, 8 * UNPLANNED)
    torch.testing.assert_close(fitted(module, **roomy), fitted(kind()))
    assert start not in said(caplog), "where everything fits there would be none"
    tight = options_for(module, HALF, planner="auto")
    torch.testing.assert_close(fitted(kind(), **tight), fitted(kind()))
    assert start + why in said(caplog)


class CopiesItself(Tower):
    """Its copies are faithful, but can share no parameters."""

    def __init__(self) -> None:
        super().__init__()
        first = MakesParametersAnew(16, 64)
        first.load_state_dict(self.net[0][0].state_dict())
        self.net[0][0] = first


def test_a_module_whose_copies_share_no_parameters_is_not_cut_and_says_so(one_device) -> None:
    module = CopiesItself()
    with pytest.raises(dpx.BudgetError) as refused:  # with this planner, only micro-batches would have met it
        fitted(module, **options_for(module, HALF))
    assert "stay whole: Micro-batches cannot share parameter net.0.0.weight" in refused.value.__notes__[-1]
    # A plan, of any cost, does.
    options = options_for(CopiesItself(), UNPLANNED * 3 // 4, planner="auto")
    torch.testing.assert_close(fitted(CopiesItself(), **options), one_device)


def test_times_that_are_measured_decide_nothing_where_runs_shall_be_the_same(one_device, caplog) -> None:
    module = Tower()
    caplog.set_level("INFO")
    torch.use_deterministic_algorithms(True)
    try:
        seen = fitted(module, **options_for(module, HALF, planner="auto"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(value, one_device[name]) for name, value in seen.items())
    assert "stay whole, where micro-batches may be faster: deterministic algorithms are asked for" in said(caplog)


def test_what_no_rehearsal_looks_at_is_not_cut(caplog) -> None:
    module = Tower(norm=True)
    caplog.set_level("INFO")
    seen = fitted(module, **options_for(module, UNPLANNED, planner="auto", verify="off"))
    expected = fitted(Tower(norm=True))
    assert all(torch.equal(value, expected[name]) for name, value in seen.items())
    assert "where micro-batches may be faster: verify='off' leaves out the rehearsal" in said(caplog)


def test_a_budget_alone_has_the_number_chosen(one_device) -> None:
    seen_rows()
    module = Tower()
    options = options_for(module, HALF)
    del options["micro_batches"]
    torch.testing.assert_close(fitted(module, **options), one_device)
    assert len([rows for rows in seen_rows() if rows > 0]) > 1
    with pytest.raises(dpx.BudgetError):  # 1 that is named stays
        fitted(Tower(), **options, micro_batches=1)


def test_an_example_batch_decides_at_setup(one_device, caplog) -> None:
    seen_rows()
    module = Tower()
    caplog.set_level("INFO")
    options = options_for(module, HALF, example_batch=torch.randn(ROWS, 16))
    torch.testing.assert_close(fitted(module, **options), one_device)
    assert len([rows for rows in seen_rows() if rows > 0]) > 1
    assert "as on one device" in said(caplog), "its first batch is rehearsed all the same"
    assert "; made from example_batch, before any batch" in said(caplog)


class Weighted(Tower):
    """Its loss is no mean over rows."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx).sqrt()


def test_what_was_decided_at_setup_is_taken_back_by_the_rehearsal(caplog) -> None:
    module = Weighted()
    caplog.set_level("INFO")
    example = torch.randn(ROWS, 16)
    seen = fitted(module, **options_for(module, HALF, planner="auto", example_batch=example))
    expected = fitted(Weighted())
    assert all(torch.equal(value, expected[name]) for name, value in seen.items())


class NeedsAllRows(Tower):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch.view(-1, ROWS, 16).flatten(0, 1), batch_idx)


def test_a_step_that_fewer_rows_do_not_run_stays_in_one_piece(one_device, caplog, monkeypatch) -> None:
    monkeypatch.setenv("LIGHTNING_DPX_TIMING", "full")  # else a step with a plan is taken for as fast as any cut
    trained = fitted(NeedsAllRows(), **options_for(Tower(), HALF, planner="auto"))
    torch.testing.assert_close(trained, one_device)
    told = r"stay whole, where micro-batches may be faster: on \d+ of its 512 rows a step raises RuntimeError"
    assert re.search(told, said(caplog))


class NeedsAQuarter(Tower):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if len(batch) < ROWS // 4:
            raise ValueError("too few rows")
        return super().training_step(batch, batch_idx)


def test_a_step_that_needs_some_rows_is_cut_into_as_many_and_planned(one_device, caplog) -> None:
    """Of as few rows as fit without a plan the step fails, and in one piece no plan is enough."""
    caplog.set_level("INFO")
    options = options_for(Tower(), int(0.22 * UNPLANNED), planner="auto")
    trained = fitted(NeedsAQuarter(), **options)
    torch.testing.assert_close(trained, one_device)
    assert re.search(r"[234] micro-batches of \d+ rows", said(caplog)), "which of them, is a matter of measured times"


def test_devices_of_unequal_budgets_have_unequal_numbers(sim, one_device, caplog) -> None:
    seen_rows()
    module = Tower()
    static = 2 * static_bytes(module)  # with the reduction
    caplog.set_level("INFO")
    budget = {"sim:0": static + 8 * UNPLANNED, "sim:1": static + HALF // 3}
    seen = fitted(module, 2, accelerator="sim", **{**options_for(module, 0), "memory_budget": budget})
    torch.testing.assert_close(seen, one_device)
    trained = [rows for rows in seen_rows() if rows > 0]
    assert sum(trained) == ROWS
    assert max(trained) == ROWS // 2, "the first device's slice stays in one piece"
    assert len(trained) > 2, "the second one's is cut"
    assert "micro-batches of" in said(caplog)


@pytest.mark.parametrize("number", ["many", 0, [1, 0], 2.0])
def test_what_is_no_number_is_refused(number) -> None:
    with pytest.raises(dpx.ConfigurationError, match="micro_batches"):
        dpx.DPXStrategy(micro_batches=number, memory_budget="1GiB")


class Grows(Tower):
    """A batch size that a finder may set."""

    batch_size = ROWS // 4
    num_rows = 2 * ROWS

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(self.num_rows, 16), self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(torch.randn(1, 16))


class Endless(Grows):
    def train_dataloader(self) -> Any:
        return DataLoader(EndlessRows(), self.batch_size)


class EndlessRows(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(16)


@pytest.mark.parametrize("mode", ["power", "binsearch"])
@pytest.mark.parametrize(("kind", "max_trials", "found"), [(Grows, 25, 2 * ROWS), (Endless, 5, 4 * ROWS)])
def test_a_search_for_the_largest_batch_ends_where_nothing_bounds_it(
    kind, max_trials, found, mode, caplog, tmp_path
) -> None:
    module = kind()
    finder = BatchSizeFinder(mode=mode, steps_per_trial=1, init_val=ROWS // 4, max_trials=max_trials, margin=0.0)
    strategy = dpx.DPXStrategy(plan_cache=False, **options_for(module, UNPLANNED))
    caplog.set_level("INFO")
    trainer = make_trainer(
        strategy=strategy, callbacks=[finder], max_steps=1, accelerator="cpu", default_root_dir=tmp_path
    )
    trainer.fit(module)
    assert module.batch_size == found
    assert said(caplog).count("memory no longer bounds the batch") == 1
    assert re.search(r"[2-9] micro-batches of \d+ rows", said(caplog))


class WithTable(Tower):
    """A buffer of which every micro-batch has its own copy."""

    def __init__(self, size: int = 75_000) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(size))


def test_micro_batches_are_chosen_for_the_room_that_copies_of_buffers_leave(sim: Any) -> None:
    """Two of them would fit, and their buffers would not."""
    plan = KeepsPlan()
    seen = Peaks(sim)
    budget = sim.memory_allocated(0) + 300_000 + 100_000 + int(0.8 * UNPLANNED)
    fitted(WithTable(), accelerator="sim", memory_budget=budget, callbacks=[plan, seen])
    assert plan.plan.micro_batches == 1
    assert not plan.plan.keeps_all
    assert max(seen.peaks[1:]) <= budget


def test_of_several_devices_the_first_keeps_buffers_in_one_piece_as_well(sim: Any, caplog: Any) -> None:
    """Beside two tables and what one was before the step there is room for two micro-batches, and for no other number.

    All rows at once take more than a table less leaves, and a third one needs more for its table than it saves.
    """
    seen = Peaks(sim)
    each = UNPLANNED // 2
    module = WithTable(int(0.3 * each) // 4)
    parameters = sum(parameter.nbytes for parameter in module.parameters())
    budget = sim.memory_allocated(0) + 3 * module.table.nbytes + 3 * parameters + int(0.57 * each)
    strategy = dpx.DPXStrategy(memory_budget=budget, planner=KeepsAll(), plan_cache=False)
    # No validation: its check has more tables for a moment than the budget has room for.
    options = {"limit_val_batches": 0, "max_epochs": 1, "callbacks": [seen]}
    loader = DataLoader(torch.randn(3 * ROWS, 16), ROWS)
    make_trainer(accelerator="sim", devices=2, strategy=strategy, **options).fit(module, loader, loader)
    assert "2 micro-batches of 128 rows" in said(caplog)
    assert max(seen.peaks[1:]) <= budget


class SeesGradients(Callback):
    """Looks at the gradients of the step before, which lie aside for it while micro-batches run."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.found.append(sum(parameter.grad is not None for parameter in module.parameters()))


class Wide(LightningModule):
    """Rows (B, 16), which take much less than the parameters do."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())]
        self.net = nn.Sequential(nn.Linear(16, 64), *layers)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("callbacks", [[], [SeesGradients]], ids=["unseen", "seen"])
def test_gradients_that_lie_aside_for_a_hook_are_planned_for(callbacks: Any, sim: Any) -> None:
    torch.manual_seed(0)
    seen = Peaks(sim)
    module = Wide()
    parameters = sum(parameter.nbytes for parameter in module.parameters())
    budget = sim.memory_allocated(0) + 3 * parameters + 600_000
    strategy = dpx.DPXStrategy(memory_budget=budget, micro_batches=2, plan_cache=False)
    looks = [kind() for kind in callbacks]
    trainer = make_trainer(accelerator="sim", devices=1, strategy=strategy, callbacks=[seen, *looks], max_epochs=1)
    trainer.fit(module, DataLoader(torch.randn(3 * ROWS, 16), ROWS))
    assert max(seen.peaks[1:]) <= budget
    # Before the first step there are none; then the hook finds those of all parameters.
    assert all(look.found == [0, 18, 18] for look in looks)


class Peaks(Callback):
    """Bytes on the first simulated device at a time, step by step."""

    def __init__(self, sim: Any) -> None:
        self._sim = sim
        self.peaks: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._sim.reset_peak_memory_stats(0)

    def on_train_batch_end(self, *_: Any) -> None:
        self.peaks.append(self._sim.max_memory_allocated(0))


def test_the_snapshot_of_buffers_is_planned_for_before_it_is_there(sim: Any) -> None:
    plan = KeepsPlan()
    seen = Peaks(sim)
    budget = sim.memory_allocated(0) + 3 * 300_000 + 100_000 + int(0.4 * UNPLANNED)
    options = {"memory_budget": budget, "micro_batches": 2, "verify": "off"}
    fitted(WithTable(), accelerator="sim", callbacks=[plan, seen], **options)
    assert not plan.plan.keeps_all
    assert max(seen.peaks[1:]) <= budget
