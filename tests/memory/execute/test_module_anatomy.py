"""What a module consists of is found once, and again where something in it was replaced."""

import torch
from torch import nn

from lightning_dpx.memory.execute.module_anatomy import Anatomies, Anatomy, Passive


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def test_it_is_found_once_until_a_part_is_replaced() -> None:
    module = net()
    anatomies = Anatomies()
    first, _ = anatomies.of(module)
    assert anatomies.of(module)[0] is first
    module[1] = nn.GELU()
    second, _ = anatomies.of(module)
    assert second is not first
    assert second.parts[-1] is module[1]
    module.register_forward_hook(lambda *_: None)
    assert anatomies.of(module)[0].obstacle == "a Sequential in it has forward hooks"


def test_hooks_that_do_nothing_are_no_obstacle() -> None:
    class Silent(Passive):
        def __call__(self, *_: object) -> None: ...

    module = net()
    module.register_forward_hook(Silent())
    assert Anatomy(module).obstacle == ""


def test_parts_are_as_they_were_for_as_long_as_it_is_asked() -> None:
    module = net()
    anatomy = Anatomy(module)
    weight = module[0].weight
    training = anatomy.training()
    other = nn.Parameter(torch.zeros(2, 2))
    module[0].weight = other
    module.eval()
    assert not anatomy.is_same()
    with anatomy.as_it_was(training):
        assert module[0].weight is weight
        assert module[1].training
    assert module[0].weight is other
    assert not module[1].training


def test_parameters_that_a_step_puts_in_are_an_obstacle() -> None:
    module = net()
    del module[0]._parameters["weight"]
    module[0]._parameters["weight"] = torch.zeros(2, 2, requires_grad=True) * 1
    assert "other tensors in the place of its parameters" in Anatomy(module).obstacle
