"""What a step returns beside its loss is there until its end, and counts; budgets are kept by the allocator's account.

That account is not the planner's: raw events of ``torch.profiler`` round whole steps (bench/allocations.py).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_dpx as dpx
from lightning_dpx.bench.allocations import peak_of_passing
from lightning_dpx.memory import Profile, plan_profile, planned, profile_step
from lightning_dpx.memory.profile.held_output import HeldOutput

ROWS = 64
WIDTH = 64
CPU = torch.device("cpu")
Made = tuple[Tensor, list[Tensor]]


class Layers(nn.Module):
    """Rows (B, 64) to the outputs of six layers, and of a seventh that the loss does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.beside = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        hidden = []
        for layer in self.layers:
            x = torch.tanh(layer(x).sin())
            hidden.append(x)
        return x.square().mean(), hidden


def loss_alone(module: Layers, loss: Tensor, hidden: list[Tensor]) -> Any:
    return {"loss": loss}


def saved_tensors(module: Layers, loss: Tensor, hidden: list[Tensor]) -> Any:
    return {"loss": loss, "hidden": hidden}


def detached_views(module: Layers, loss: Tensor, hidden: list[Tensor]) -> Any:
    return {"loss": loss, "first": {"rows": tuple(one[:1].detach() for one in hidden)}}


def copies(module: Layers, loss: Tensor, hidden: list[Tensor]) -> Any:
    return {"loss": loss, "softmax": torch.cat(hidden).detach().softmax(-1)}


def graph_of_its_own(module: Layers, loss: Tensor, hidden: list[Tensor]) -> Any:
    return {"loss": loss, "beside": module.beside(hidden[0]).sin().cos().exp()}


KINDS = [loss_alone, saved_tensors, detached_views, copies, graph_of_its_own]
Returns = Callable[[Layers, Tensor, list[Tensor]], Any]


def step_of(returns: Returns) -> tuple[Layers, Callable[[], Any]]:
    torch.manual_seed(0)
    module = Layers()
    rows = torch.randn(ROWS, WIDTH)
    return module, lambda: returns(module, *module(rows))


def peak_of_step(module: Layers, step: Callable[[], Any]) -> tuple[int, list[Tensor]]:
    """Of a step whose output is held until its end, as Lightning holds it; and the gradients."""
    module.zero_grad()

    def run() -> None:
        with planned(module):
            output = step()
        output["loss"].backward()

    peak = peak_of_passing(run)
    return peak, [parameter.grad for parameter in module.layers.parameters() if parameter.grad is not None]


def loss_in(output: Any) -> Tensor:
    loss: Tensor = output["loss"]
    return loss


def profiled(module: Layers, step: Callable[[], Any], *, is_merged: bool = False) -> Profile:
    module.zero_grad()
    return profile_step(module, HeldOutput(step, loss_in, is_merged=is_merged), CPU)


@pytest.mark.parametrize("returns", KINDS)
def test_budgets_are_kept_whatever_a_step_returns(returns: Returns) -> None:
    module, step = step_of(returns)
    peak_of_step(module, step)  # what libraries keep from their first call on is no part of a step
    unplanned, expected = peak_of_step(module, step)
    profile = profiled(module, step)
    assert profile.peak == pytest.approx(unplanned, rel=0.002)
    for share in (0.8, 0.0):
        try:
            plan = plan_profile(module, profile, int(share * unplanned) or 1)
        except dpx.BudgetError as error:
            plan = plan_profile(module, profile, error.smallest)
        dpx.apply_plan(module, plan)
        peak, found = peak_of_step(module, step)
        dpx.remove_plan(module)
        assert peak <= 1.002 * (plan.budget or 0)
        assert all(map(torch.equal, found, expected))


def test_dropping_what_is_returned_makes_no_room() -> None:
    """Memory that is saved and returned counts once, and there is no plan that drops it."""
    module, step = step_of(saved_tensors)
    hidden = 6 * ROWS * WIDTH * 4
    profile = profiled(module, step)
    assert profile.returned == profile.merged == hidden + 4  # the loss
    with pytest.raises(dpx.BudgetError) as refused:
        plan_profile(module, profile, 1)
    assert (refused.value.smallest or 0) > hidden
    assert profile.peak < profiled(*step_of(copies)).peak


def test_a_view_holds_its_whole_memory() -> None:
    profile = profiled(*step_of(detached_views))
    assert profile.returned == 6 * ROWS * WIDTH * 4 + 4
    assert profile.merged == 6 * WIDTH * 4 + 4


def test_what_is_merged_goes_after_the_forward() -> None:
    module, step = step_of(copies)
    held = profiled(module, step)
    merged = profiled(module, step, is_merged=True)
    assert merged.returned == held.returned
    first = merged.forward_events
    assert merged.curve[first] == merged.curve[first + 1] + merged.returned - 4


def test_nothing_is_held_beyond_a_step() -> None:
    module, step = step_of(copies)
    held = HeldOutput(step, loss_in)
    trace = dpx.memory.MemoryTrace(CPU)
    with trace:
        held()
        assert held.bytes_in(trace) == (6 * ROWS * WIDTH * 4 + 4, 6 * ROWS * WIDTH * 4 + 4)
        held.end()
        assert held.bytes_in(trace) == (0, 0)
    run = HeldOutput(step, loss_in)
    profile_step(module, run, CPU)
    with trace:
        assert run.bytes_in(trace) == (0, 0)


def test_steps_by_hand_hold_nothing_after_them() -> None:
    module, step = step_of(copies)

    def by_hand() -> Any:
        output = step()
        output["loss"].backward()
        return output

    profile = profile_step(module, HeldOutput(by_hand, lambda _: None), CPU)
    assert profile.peak == profiled(*step_of(copies)).peak


class Refusing(Tensor):
    """Allows no function, not even attributes."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise TypeError(f"{func} is refused.")


def in_itself(found: Tensor) -> list[Any]:
    held: list[Any] = [found, {"numbers": [3, 4], "found": (found,)}]
    held.append(held)
    return held


def nested_deeply(found: Tensor) -> Any:
    held: Any = found
    for _ in range(5000):
        held = [held]
    return held


@pytest.mark.parametrize(
    ("held", "times"),
    [
        (in_itself, 2),
        (nested_deeply, 1),
        (lambda found: found.as_subclass(Refusing), 1),
        (lambda found: [found, nn.LazyLinear(2).weight, found.to_sparse()], 1),
    ],
    ids=["in itself", "deep", "refusing", "lazy"],
)
def test_all_that_one_device_may_return_is_looked_at(held: Callable[[Tensor], Any], times: int) -> None:
    trace = dpx.memory.MemoryTrace(CPU)
    run = HeldOutput(lambda: held(torch.ones(8, 4)), lambda _: None)
    with trace:
        run()
        assert run.bytes_in(trace) == (128, times * 128)
