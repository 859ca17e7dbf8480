"""A step that does not fit is profiled on fewer of its rows, and its plan is for all of them; looks for a loss."""

import re
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader

import lightning_dpx as dpx
from lightning_dpx.errors import PlanError
from lightning_dpx.lightning.memory.profiling import profile_slice
from lightning_dpx.replicas import BatchSlice, ReplicaSet
from lightning_dpx.units import parse_bytes
from tests.conftest import SIMULATED, make_trainer, simulate_room

pytestmark = pytest.mark.skipif(bool(SIMULATED), reason=SIMULATED)
ROWS = 32
NARROW = 16
WIDE = 64
ALLOCATED: list[tuple[int, int]] = []  # index of a batch, bytes; likewise
REFUSALS = ContextVar("REFUSALS", default=0)  # no state of a module, which a profile would put back


class Gate(nn.Module):
    """On few rows it saves tensors that are too small for a plan, and on all rows none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(NARROW, WIDE)
        self.outer = nn.Linear(WIDE, NARROW)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrow = x.tanh().sin()
        wide = self.inner(narrow).tanh().sin().cos()
        found: torch.Tensor = self.outer(wide).sigmoid()
        return found


class Gates(LightningModule):
    """Of all rows it needs more than there is, as often as is said."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Gate() for _ in range(6)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (rows,) = batch
        left = REFUSALS.get()
        if left and len(rows) == ROWS:
            REFUSALS.set(left - 1)
            raise torch.OutOfMemoryError("all rows do not fit")
        loss: torch.Tensor = self.net(rows).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Peaks(Callback):
    """Bytes on the first simulated device at a time, step by step."""

    def __init__(self, sim: Any) -> None:
        self._sim = sim
        self.found: list[int] = []
        self.state: dict[str, torch.Tensor] = {}

    def on_train_batch_start(self, *_: Any) -> None:
        self._sim.reset_peak_memory_stats(0)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.found.append(self._sim.max_memory_allocated(0))
        self.state = {name: value.cpu() for name, value in module.state_dict().items()}


def fitted(
    sim: Any, refusals: int = 0, kind: type[Gates] = Gates, sizes: Sequence[int] = (ROWS, ROWS, ROWS), **options: Any
) -> Peaks:
    """What steps on batches (32, 4, 16), or of as many rows as given, take."""
    torch.manual_seed(0)
    peaks = Peaks(sim)
    rows = torch.randn(sum(sizes), 4, NARROW, generator=torch.Generator().manual_seed(0))
    batches: Any = options.pop("batches", None) or [(part,) for part in rows.split(list(sizes))]
    devices = options.pop("devices", 1)
    strategy = dpx.DPXStrategy(**{"micro_batches": 1, **options})
    trainer = make_trainer(max_epochs=1, strategy=strategy, accelerator="sim", devices=devices, callbacks=[peaks])
    token = REFUSALS.set(refusals)
    try:
        trainer.fit(kind(), DataLoader(batches, batch_size=None))
        assert REFUSALS.get() == 0
    finally:
        REFUSALS.reset(token)
    return peaks


def peak_of_fit(sim: Any, refusals: int = 0, **options: Any) -> int:
    """Bytes at a time in steps after the first one."""
    return max(fitted(sim, refusals, **options).found[1:])


@pytest.mark.parametrize("share", [0.8, 0.5, 0.35])
def test_a_plan_from_fewer_rows_is_for_the_values_of_all(share: float, sim: Any, caplog: Any) -> None:
    before = sim.memory_allocated(0)
    budget = before + int(share * (peak_of_fit(sim) - before))
    assert peak_of_fit(sim, 2, memory_budget=budget, plan_cache=False) <= budget
    assert "profiled on 1/4 of the rows, because all did not fit" in caplog.text
    assert "no profiled step had saved" not in caplog.text


def test_a_later_run_that_has_room_for_all_rows_profiles_them(sim: Any, caplog: Any, tmp_path: Any) -> None:
    """Times and what grows otherwise than the rows are guessed from fewer, which is no need there any more."""
    before = sim.memory_allocated(0)
    options = {"memory_budget": before + int(0.6 * (peak_of_fit(sim) - before)), "plan_cache": str(tmp_path)}
    caplog.clear()
    fitted(sim, 2, **options)
    assert "because all did not fit" in caplog.text
    caplog.clear()
    fitted(sim, **options)
    assert "profiles a step on 32 rows" in caplog.text
    assert "because all did not fit" not in caplog.text
    caplog.clear()
    fitted(sim, **options)
    assert "profiles a step" not in caplog.text


def test_a_later_run_without_room_for_all_rows_finds_what_fewer_have_shown(
    sim: Any, caplog: Any, tmp_path: Any
) -> None:
    taken = peak_of_fit(sim) - sim.memory_allocated(0)
    for _ in range(2):
        simulate_room(int(0.75 * taken))
        caplog.clear()
        budget = sim.memory_allocated(0) + int(0.6 * taken)
        fitted(sim, memory_budget=budget, plan_cache=str(tmp_path))
    assert "because all did not fit" in caplog.text
    assert "profiles a step" not in caplog.text


@pytest.mark.parametrize(("rows", "tried"), [(16, [16, 2]), (20, [20, 2, 2]), (64, [64, 8, 2])])
def test_each_number_of_fewer_rows_is_tried_once(rows: int, tried: list[int]) -> None:
    """Of each pair the smaller one comes first, and does not fit either: (2, 4) of 16, (2, 5) and (2, 4) of 20."""
    replicas = ReplicaSet(Gates(), [torch.device("cpu")])
    found: list[int] = []

    def run(module: Any, batch: Any, num_rows: int) -> torch.Tensor:
        found.append(num_rows)
        raise torch.OutOfMemoryError

    with pytest.raises(PlanError, match=f"Not even 4 of {rows} rows fit"):
        profile_slice(replicas, BatchSlice(replicas.root, rows, torch.ones(rows, NARROW)), run)
    assert found == tried


def smallest_budget(sim: Any, kind: type[Gates], **options: Any) -> int:
    """Bytes that a refusal names."""
    with pytest.raises(dpx.BudgetError) as refused:
        fitted(sim, kind=kind, memory_budget=sim.memory_allocated(0) + 500_000, plan_cache=False, **options)
    least = re.search(r"it must allow at least ([\d.]+ \w+)", "".join(refused.value.__notes__))
    assert least is not None
    return parse_bytes("least", least[1])


class Watched(Gates):
    """Notes what is allocated at the end of every forward, of the run or of a profile: most is there then."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if loss.device.type == "sim":
            ALLOCATED.append((batch_idx, torch.sim.memory_allocated(loss.device)))  # type: ignore[attr-defined]
        return loss


@pytest.mark.parametrize("micro_batches", [1, "auto"])
@pytest.mark.parametrize("rows", [40, 96])
def test_a_larger_batch_that_comes_later_is_profiled_within_the_budget(micro_batches: Any, rows: int, sim: Any) -> None:
    """Of the first one nothing is known before it is run; what it took tells how many rows of the next ones fit."""
    before = sim.memory_allocated(0)
    sizes = (16, 16, rows, rows)
    budget = before + int(0.5 * (max(fitted(sim, sizes=sizes).found) - before))
    ALLOCATED.clear()
    fitted(sim, kind=Watched, sizes=sizes, memory_budget=budget, micro_batches=micro_batches, plan_cache=False)
    assert {index for index, _ in ALLOCATED} == {0, 1, 2, 3}
    assert max(taken for index, taken in ALLOCATED if index) <= budget


class Graph:
    """Nodes, of which no part would do for a step."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device, **_: Any) -> "Graph":
        """On another device."""
        return Graph(self.nodes.to(device))


class OfGraphs(Watched):
    """Steps on whole graphs."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step((batch.nodes,), batch_idx)


def test_a_slightly_larger_batch_that_cannot_be_cut_is_planned_in_proportion(sim: Any, caplog: Any) -> None:
    before = sim.memory_allocated(0)
    sizes = (ROWS, ROWS, ROWS + 4, ROWS + 4)
    graphs = [Graph(torch.randn(size, 4, NARROW)) for size in sizes]
    budget = before + int(0.6 * (max(fitted(sim, sizes=sizes).found) - before))
    ALLOCATED.clear()
    fitted(sim, kind=OfGraphs, batches=graphs, memory_budget=budget, plan_cache=False)
    assert {index for index, _ in ALLOCATED} == {0, 1, 2, 3}
    assert max(taken for index, taken in ALLOCATED if index) <= budget
    assert "in proportion to an earlier batch" in caplog.text
