"""A step that is cut and planned: its peak is what was predicted, and its gradients are those of the plan's absence."""

import copy

import pytest
import torch
from torch import Tensor, nn

import lightning_dpx as dpx
from lightning_dpx.memory import MemoryTrace, format_plan

ROWS = 65
CPU = torch.device("cpu")


class MeanOfTower(nn.Module):
    """Rows (B, 32) to a loss, the mean over them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)]
        self.tower = nn.Sequential(*layers)

    def forward(self, rows: Tensor) -> Tensor:
        loss: Tensor = self.tower(rows).pow(2).mean()
        return loss


def run(module: nn.Module, rows: Tensor, number: int) -> tuple[list[Tensor], int]:
    """Gradients and the peak of activations of a step in micro-batches, written by hand."""
    module.zero_grad(set_to_none=True)
    trace = MemoryTrace(CPU)
    with trace:
        for part in rows.tensor_split(number):
            loss = module(part) * (len(part) / len(rows))
            loss.backward()
            del loss
    return [p.grad.clone() for p in module.parameters() if p.grad is not None], trace.peak_of_passing()


@pytest.fixture(scope="module")
def module() -> MeanOfTower:
    return MeanOfTower()


@pytest.fixture(scope="module")
def rows() -> Tensor:
    return torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("share", [0.6, 0.3, 0.15])
def test_the_number_that_is_chosen_fits_and_gives_the_same_bits(
    module: MeanOfTower, rows: Tensor, share: float
) -> None:
    plan = dpx.search_plan(module, rows, budget=share, micro_batches="auto")
    assert plan.budget is not None
    assert plan.peak is not None
    assert plan.peak <= plan.budget
    assert plan.micro_batch_rows == (-(-ROWS // plan.micro_batches) if plan.micro_batches > 1 else 0)
    planned = copy.deepcopy(module)
    dpx.apply_plan(planned, plan)
    run(planned, rows, plan.micro_batches)
    gradients, peak = run(planned, rows, plan.micro_batches)
    assert peak <= plan.budget
    expected, _ = run(module, rows, plan.micro_batches)
    assert all(map(torch.equal, gradients, expected))
    torch.testing.assert_close(gradients, run(module, rows, 1)[0])


def test_a_number_that_is_given_is_planned_for(module: MeanOfTower, rows: Tensor) -> None:
    whole = dpx.search_plan(module, rows, budget=0.3)
    plan = dpx.search_plan(module, rows, budget=whole.budget, micro_batches=4)
    assert (plan.micro_batches, plan.micro_batch_rows) == (4, 17)
    assert plan.unplanned_peak == whole.unplanned_peak
    assert len(plan.names("keep")) > len(whole.names("keep")), "a micro-batch needs less recomputation"
    fewer = dpx.search_plan(module, rows[:2], micro_batches=4)
    assert fewer.micro_batches == 2, "as many as there are rows"


def test_a_plan_says_into_how_many_micro_batches_it_cuts(module: MeanOfTower, rows: Tensor, tmp_path) -> None:
    plan = dpx.search_plan(module, rows, budget=0.3, micro_batches=3)
    assert format_plan(plan).splitlines()[-1].startswith("3 micro-batches of 22 rows, ")
    plan.save(tmp_path / "plan.yaml")
    assert dpx.MemoryPlan.load(tmp_path / "plan.yaml") == plan
    text = (tmp_path / "plan.yaml").read_text()
    (tmp_path / "edited.yaml").write_text(text.replace("micro_batches: 3", "micro_batches: 2"))
    assert dpx.MemoryPlan.load(tmp_path / "edited.yaml").peak is None, "predicted for another number"


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "two", None])
def test_what_is_no_number_of_micro_batches_is_refused(module: MeanOfTower, rows: Tensor, number: object) -> None:
    with pytest.raises(dpx.ConfigurationError, match=r"micro_batches=.* is not allowed; give a positive number"):
        dpx.search_plan(module, rows, micro_batches=number)  # type: ignore[arg-type]


def test_a_number_can_only_be_chosen_for_a_budget(module: MeanOfTower, rows: Tensor) -> None:
    with pytest.raises(dpx.ConfigurationError, match='micro_batches="auto" needs a budget'):
        dpx.search_plan(module, rows, micro_batches="auto")


@pytest.fixture(scope="module")
def normed() -> nn.Sequential:
    """Rows (B, 16) to (B, 16); batch norm takes no single row."""
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))


@pytest.mark.parametrize("number", [1000, 33])
def test_micro_batches_of_fewer_rows_than_a_step_runs_on_are_refused(normed: nn.Module, number: int) -> None:
    told = (
        f"micro_batches={number} cuts 64 rows into parts of 1 rows, and on those the step raises ValueError: Expected"
    )
    with pytest.raises(dpx.PlanError, match=told) as caught:
        dpx.search_plan(normed, torch.randn(64, 16), micro_batches=number, progress=False)
    assert isinstance(caught.value.__cause__, ValueError)


def test_no_number_is_chosen_with_fewer_rows_than_a_step_runs_on(normed: nn.Module) -> None:
    plan = dpx.search_plan(normed, torch.randn(64, 16), budget=0.1, micro_batches="auto", progress=False)
    assert 2 <= plan.micro_batch_rows < 16
    for rows in (3, 4, 8):
        with pytest.raises(dpx.BudgetError):
            dpx.search_plan(normed, torch.randn(rows, 16), budget=0.1, micro_batches="auto", progress=False)
