"""Hooks of parameters see the gradient of all rows, once in a backward, as on one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import places

pytestmark = pytest.mark.usefixtures("hardware")
ROWS = torch.linspace(-2, 2, 24).reshape(8, 3)
OUT_GRADS = torch.linspace(-1, 1, 16).reshape(8, 2)


def clamps(module: nn.Module) -> None:
    module.weight.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))


def divides_by_its_norm(module: nn.Module) -> None:
    module.weight.register_hook(lambda gradient: None)
    module.weight.register_hook(lambda gradient: gradient / gradient.norm())
    module.weight.register_hook(lambda gradient: gradient + 1)


def steps_at_once(module: nn.Module) -> None:
    """Each parameter is updated as soon as its gradient is there, which is then let go of."""

    @torch.no_grad()
    def step(parameter: nn.Parameter) -> None:
        parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def trained(module: nn.Module, backward: Callable[[torch.Tensor, torch.Tensor], Any]) -> list[Any]:
    """What two backwards have left: gradients, and values."""
    device = module.weight.device
    for turn in range(2):
        backward(ROWS.to(device) + turn, OUT_GRADS.to(device))
    left = [*module.parameters(), *(parameter.grad for parameter in module.parameters())]
    return [value if value is None else value.detach().cpu() for value in left]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("is_early", [True, False], ids=["before the group", "after a step"])
@pytest.mark.parametrize("register", [clamps, divides_by_its_norm, steps_at_once])
def test_hooks_are_called_as_on_one_device(
    make_group: Any, register: Callable[[nn.Module], None], is_early: bool, micro_batches: int
) -> None:
    torch.manual_seed(0)
    alone, shared = nn.Linear(3, 2), nn.Linear(3, 2)
    shared.load_state_dict(alone.state_dict())
    register(alone)
    if is_early:
        register(shared)
    group = make_group(shared, places(2), micro_batches=micro_batches, grad_req="add")

    def backward(rows: torch.Tensor, out_grads: torch.Tensor) -> None:
        group.forward(rows)
        group.backward(out_grads)

    if not is_early:
        backward(ROWS.to(places(1)[0]), OUT_GRADS.to(places(1)[0]))
        shared.zero_grad()
        register(shared)
    expected = trained(alone, lambda rows, out_grads: alone(rows).backward(out_grads))
    for found, wanted in zip(trained(shared, backward), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_hook_that_was_removed_is_called_no_more(make_group: Any) -> None:
    module = nn.Linear(3, 2)
    handle = module.weight.register_hook(lambda gradient: gradient * 100)
    group = make_group(module, places(2))
    group.forward(ROWS)
    handle.remove()
    group.forward(ROWS)
    group.backward(OUT_GRADS.to(places(1)[0]))
    torch.testing.assert_close(module.weight.grad.cpu(), OUT_GRADS.T @ ROWS)


def test_an_error_of_a_hook_leaves_the_gradients_of_earlier_steps(make_group: Any) -> None:
    module = nn.Linear(3, 2)
    group = make_group(module, places(2), grad_req="add")

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("of the hook")

    handle = module.weight.register_hook(fail)
    before = module.weight.grad = torch.ones_like(module.weight)
    group.forward(ROWS)
    with pytest.raises(KeyError, match="of the hook"):
        group.backward(OUT_GRADS.to(places(1)[0]))
    assert module.weight.grad is before
    handle.remove()
    group.forward(ROWS)
    group.backward(OUT_GRADS.to(places(1)[0]))
    torch.testing.assert_close(module.weight.grad.cpu(), 1 + OUT_GRADS.T @ ROWS)


def test_hooks_of_parameters_that_no_row_used_are_not_called(make_group: Any) -> None:
    module = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    module.forward = lambda rows: module["used"](rows)  # type: ignore[method-assign]
    called: list[torch.Tensor] = []
    module["unused"].weight.register_hook(called.append)
    group = make_group(module, places(1) * 2)
    group.forward(ROWS)
    group.backward(OUT_GRADS.to(places(1)[0]))
    assert not called
    assert module["unused"].weight.grad is None


def looks_at_all(module: nn.Module, seen: list[Any]) -> None:
    def note(gradients: Any) -> None:
        seen.append(sum(float(gradient.sum()) for gradient in gradients))

    torch.autograd.graph.register_multi_grad_hook(list(module.parameters()), note)


def asks_for_the_end(module: nn.Module, seen: list[Any]) -> None:
    def note(gradient: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: seen.append("end"))

    module.weight.register_hook(note)


def lets_go_of_it(module: nn.Module, seen: list[Any]) -> None:
    def let_go(parameter: nn.Parameter) -> None:
        parameter.grad = None

    module.weight.register_post_accumulate_grad_hook(let_go)
    module.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("after it"))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("register", [looks_at_all, asks_for_the_end, lets_go_of_it])
def test_hooks_are_called_by_a_backward(
    make_group: Any, register: Callable[[nn.Module, list[Any]], None], micro_batches: int
) -> None:
    torch.manual_seed(0)
    alone, shared = nn.Linear(3, 2), nn.Linear(3, 2).to(places(1)[0])
    shared.load_state_dict(alone.state_dict())
    expected: list[Any] = []
    found: list[Any] = []
    register(alone, expected)
    register(shared, found)
    alone(ROWS).backward(OUT_GRADS)
    group = make_group(shared, places(2), micro_batches=micro_batches)
    group.forward(ROWS)
    group.backward(OUT_GRADS.to(places(1)[0]))
    assert found == pytest.approx(expected) if register is looks_at_all else found == expected
    # What was held back is there again.
    group.forward(ROWS)
    group.backward(OUT_GRADS.to(places(1)[0]))
    assert len(found) == 2


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_hook_that_the_forward_registers_sees_all_rows(make_group: Any, micro_batches: int) -> None:
    seen: list[float] = []

    class Hooked(nn.Linear):
        is_hooked = False

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            if not self.is_hooked:
                self.is_hooked = True
                self.bias.register_hook(lambda gradient: seen.append(float(gradient.sum())))
            return super().forward(rows)

    group = make_group(Hooked(3, 2), places(1) * 2 if micro_batches == 1 else places(1), micro_batches=micro_batches)
    group.forward_backward(ROWS, out_grads=OUT_GRADS.to(places(1)[0]) + 1)
    assert seen
    assert seen == pytest.approx([16.0] * len(seen))


def test_gradients_of_earlier_steps_have_no_hooks_called(make_group: Any) -> None:
    module = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2), "fixed": nn.Linear(3, 2)})
    module.forward = lambda rows: module["used"](rows) + module["fixed"](rows)  # type: ignore[method-assign]
    called: list[torch.Tensor] = []
    for name in ("unused", "fixed"):
        module[name].weight.register_hook(called.append)
        module[name].weight.register_post_accumulate_grad_hook(called.append)
    requests = {name: "null" if "fixed" in name else "add" for name, _ in module.named_parameters()}
    group = make_group(module, places(1) * 2, grad_req=requests)
    for name in ("unused", "fixed"):
        module[name].weight.grad = torch.ones_like(module[name].weight)
    group.forward(ROWS)
    group.backward(OUT_GRADS.to(places(1)[0]))
    assert not called


def test_an_error_after_gradients_were_added_leaves_those_of_earlier_steps(make_group: Any) -> None:
    module = nn.Linear(3, 2)
    group = make_group(module, places(2), grad_req="add")

    def fail(parameter: nn.Parameter) -> None:
        raise KeyError("of the hook")

    module.weight.register_post_accumulate_grad_hook(fail)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    group.forward(ROWS)
    with pytest.raises(KeyError, match="of the hook"):
        group.backward(OUT_GRADS.to(places(1)[0]))
    for parameter in module.parameters():
        torch.testing.assert_close(parameter.grad, torch.ones_like(parameter))
