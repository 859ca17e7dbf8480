"""Copies of optimizers act on other parameters, and lead to nothing of the original."""

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from lightning_dpx.lightning.rehearsal.optimizer_copies import attributes_stepped_in, copy_optimizers


class CountingSGD(torch.optim.SGD):
    """Keeps attributes that no state dict has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[int] = []


def parameter() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return parameter


def test_a_copy_steps_the_other_parameters_with_the_state_of_its_original() -> None:
    real, other = parameter(), parameter()
    optimizer = CountingSGD([real], lr=0.5, momentum=0.9)
    optimizer.step()
    optimizer.steps.append(1)
    (copied,), _ = copy_optimizers([optimizer], [], [(real, other)])
    copied.step()
    copied.steps.append(2)
    assert real.tolist() == [0.5, 0.5]
    assert [round(value, 4) for value in other.tolist()] == [0.05, 0.05], "by a momentum of 1.9"
    assert optimizer.steps == [1]
    assert optimizer.state[real]["momentum_buffer"].tolist() == [1, 1]


def test_the_copy_of_a_scheduler_drives_the_copy_of_its_optimizer() -> None:
    real, other = parameter(), parameter()
    optimizer = torch.optim.SGD([real], lr=1.0)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    (copied,), (schedule,) = copy_optimizers([optimizer], [scheduler], [(real, other)])
    assert schedule.optimizer is copied
    schedule.step()
    assert (copied.param_groups[0]["lr"], optimizer.param_groups[0]["lr"]) == (0.25, 0.5)
    copied.step()
    assert other.tolist() == [0.75, 0.75], "and no step of the original, which the scheduler has wrapped"
    assert real.tolist() == [0, 0]


def test_what_hooks_are_bound_to_is_not_copied() -> None:
    class Holder:
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("copied along")

        def note(self, *_: Any) -> None:
            """Called before a step."""

    real, other = parameter(), parameter()
    optimizer = torch.optim.SGD([real], lr=1.0)
    optimizer.register_step_pre_hook(Holder().note)
    (copied,), _ = copy_optimizers([optimizer], [], [(real, other)])
    assert len(copied._optimizer_step_pre_hooks) == 1


def test_optimizers_are_found_in_attributes_and_in_plain_containers() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=1.0)
    module: Any = nn.Identity()
    module.one = optimizer
    module.listed = [optimizer]
    module.named = {"a": optimizer}
    module.other = ["none"]
    assert [name for name, _ in attributes_stepped_in(module)] == ["one", "listed", "named"]
