"""What hooks do to a module in a list reaches the replicas' copies of it."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dpx.replicas.hidden_modules import HiddenModules
from lightning_dpx.replicas.replica import Replica
from tests.conftest import Classifier, assert_equal, make_loader, make_trainer, strategy_in

CPU = torch.device("cpu")


def move(teacher: nn.Sequential, module: Any) -> None:
    teacher.to(module.device)


def set_attribute(teacher: nn.Sequential, module: Any) -> None:
    teacher[2].negative_slope = 0.5 + module.current_epoch


def change_mode(teacher: nn.Sequential, module: Any) -> None:
    teacher[1].weight.data.fill_(0.5)
    teacher[4].train(module.current_epoch == 0)


def rebind_buffer(teacher: nn.Sequential, module: Any) -> None:
    teacher[1].running_mean = teacher[1].running_mean + 1


def exchange_parameter(teacher: nn.Sequential, module: Any) -> None:
    teacher[0].weight = nn.Parameter(teacher[0].weight.detach() * 2)


def exchange_part(teacher: nn.Sequential, module: Any) -> None:
    teacher[2] = nn.Tanh()


def add_hook(teacher: nn.Sequential, module: Any) -> None:
    teacher[2].register_forward_hook(lambda part, args, output: output * (1 + part.negative_slope))


def append_to_a_list_inside(teacher: nn.Sequential, module: Any) -> None:
    teacher[3].factors.append(2.0)


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = [1.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * sum(self.factors)


class Doubles(nn.Module):
    """Another thing in training mode than in an evaluation, and the same for every row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x if self.training else x


def make_teacher() -> nn.Sequential:
    parts = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LeakyReLU(), Scales(), Doubles(), nn.Linear(8, 3)]
    return nn.Sequential(*parts).eval()


class Learns(Classifier):
    """From a teacher that is no submodule; a hook sees to it at the beginning of every epoch."""

    def __init__(self, change: Callable[[nn.Sequential, Any], None]) -> None:
        super().__init__()
        self.teacher = [make_teacher()]
        self.change = change

    def on_train_epoch_start(self) -> None:
        self.teacher[0].to(self.device)
        self.change(self.teacher[0], self)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher[0](batch[0])
        return (self.net(batch[0]) - wanted).square().mean()


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize(
    "change",
    [
        move,
        set_attribute,
        change_mode,
        rebind_buffer,
        exchange_parameter,
        exchange_part,
        add_hook,
        append_to_a_list_inside,
    ],
)
def test_a_teacher_in_a_list_is_what_hooks_make_of_it(change: Any, execution: str) -> None:
    weights = []
    for options in ({}, {"strategy": strategy_in(execution), "devices": 2}):
        torch.manual_seed(0)
        model = Learns(change)
        make_trainer(**options).fit(model, make_loader(), make_loader(16))
        weights.append(dict(model.state_dict()))
    assert_equal(weights[1], weights[0])


class LearnsFromNormed(Classifier):
    """Its critic, in a list, is sent to the device by a hook; every forward of it goes on with the buffers before."""

    def __init__(self) -> None:
        super().__init__()
        self.critics = [nn.utils.spectral_norm(nn.Linear(8, 3))]

    def on_fit_start(self) -> None:
        self.critics[0].to(self.device)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.net(batch[0]) - self.critics[0](batch[0]).detach()).square().mean()


@pytest.mark.usefixtures("hardware")
def test_buffers_of_a_module_in_a_list_are_those_before_the_step_for_every_replica(execution: str) -> None:
    states = []
    for options in ({}, {"strategy": strategy_in(execution), "devices": 3}):
        torch.manual_seed(0)
        model = LearnsFromNormed()
        make_trainer(**options).fit(model, make_loader(), make_loader(16))
        critic = {f"critic.{name}": value.cpu() for name, value in model.critics[0].state_dict().items()}
        states.append({**model.state_dict(), **critic})
    assert_equal(states[1], states[0])


def take_the_place(teachers: list[nn.Module], teacher: nn.Module) -> None:
    teachers[0] = teacher


def come_beside(teachers: list[nn.Module], teacher: nn.Module) -> None:
    teachers.append(teacher)


class LearnsFromAnother(Classifier):
    """A hook puts another teacher into the list, a later one changes it, and yet another one takes it out."""

    def __init__(self, come: Callable[[list[nn.Module], nn.Module], None]) -> None:
        super().__init__()
        self.teachers: list[nn.Module] = [nn.Linear(8, 3)]
        self.come = come

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.teachers[0].to(self.device)
            self.come(self.teachers, nn.Sequential(nn.Linear(8, 3), nn.LeakyReLU()).to(self.device))
        if batch_idx == 1:
            self.teachers[-1][1].negative_slope = 3.0
        if batch_idx == 2:
            self.teachers[-1] = nn.Linear(8, 3).to(self.device)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            wanted = sum(teacher(batch[0]) for teacher in self.teachers)
        return (self.net(batch[0]) - wanted).square().mean()


@pytest.mark.usefixtures("hardware")
@pytest.mark.parametrize("come", [take_the_place, come_beside])
def test_a_teacher_that_comes_later_is_followed_as_well(come: Any) -> None:
    weights = []
    for options in ({}, {"strategy": "dpx", "devices": 2}):
        torch.manual_seed(0)
        model = LearnsFromAnother(come)
        make_trainer(**options).fit(model, make_loader(), make_loader(16))
        weights.append(dict(model.state_dict()))
    assert_equal(weights[1], weights[0])


def hidden_pair(
    other: Replica | None = None,
) -> tuple[HiddenModules, nn.Sequential, nn.Sequential]:
    hidden = HiddenModules(Replica(0, CPU, nn.Linear(1, 1)), others=() if other is None else (other,))
    mine, theirs = make_teacher(), make_teacher()
    for part, other in zip(mine.modules(), theirs.modules(), strict=True):
        hidden.add((0, "teacher"), 1, part, other)
    return hidden, mine, theirs


def test_only_modules_that_are_no_submodules_are_hidden() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    hidden = HiddenModules(Replica(0, CPU, module), (nn.ReLU,))
    assert not hidden.is_hidden(module[0])
    assert not hidden.is_hidden(nn.ReLU()), "others look after it"
    assert hidden.is_hidden(nn.Tanh())
    assert not HiddenModules().is_hidden(nn.Tanh())


def test_attributes_are_sent_and_what_is_exchanged_is_named_once() -> None:
    hidden, mine, theirs = hidden_pair()
    hidden.sync(1, lambda value: value)
    assert hidden.note() == []
    mine[2].negative_slope = 0.7
    del mine[3].factors
    hidden.sync(1, lambda value: value)
    assert theirs[2].negative_slope == 0.7
    assert not hasattr(theirs[3], "factors")
    assert hidden.note() == []
    exchange_parameter(mine, None)
    assert hidden.note() == [(0, "teacher")]
    assert mine[0] not in dict(hidden.pairs(1)), "its copy is outdated"
    assert dict(hidden.pairs(1))[mine[1]] is theirs[1]


def test_a_buffer_that_is_exchanged_in_every_step_is_sent_alone() -> None:
    # All that leads to it, copied anew in every step, would take ten times as long as the step.
    other = Replica(1, CPU, nn.Linear(1, 1))
    hidden, mine, theirs = hidden_pair(other)
    for number in range(1, 4):
        hidden.sync(1, lambda value: value)
        assert hidden.note() == []
        rebind_buffer(mine, None)
        hidden.sync(1, lambda value: value)
        assert theirs[1].running_mean is not mine[1].running_mean
        assert theirs[1].running_mean.tolist() == [float(number)] * 8
    mine[1].running_mean.mul_(2)
    other.hidden.follow()
    assert theirs[1].running_mean.tolist() == [6.0] * 8, "what is written into it is followed from here on"
    hidden.note()
    mine[1].register_buffer("another", torch.zeros(1))
    assert hidden.note() == [(0, "teacher")]


def test_a_module_to_which_two_attributes_lead_is_forgotten_with_the_second() -> None:
    hidden, mine, theirs = hidden_pair()
    hidden.add((0, "twin"), 1, mine, theirs)
    assert hidden.forget((0, "teacher"))
    assert list(hidden.pairs(1)) == [(mine, theirs)]
    assert not hidden.forget((0, "teacher"))
    assert hidden.forget((0, "twin"))
    assert len(hidden) == 0


def test_no_module_that_is_gone_is_kept() -> None:
    hidden, mine, theirs = hidden_pair()
    hidden.sync(1, lambda value: value)
    hidden.note()
    assert hidden.forget((0, "teacher"))
    gone = [weakref.ref(mine), weakref.ref(mine[0].weight), weakref.ref(theirs)]
    del mine, theirs
    assert [one() for one in gone] == [None, None, None]
