"""Hooks that a run puts on or takes off, as libraries do in a first forward, are put back with what notes them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_dpx as dpx
from lightning_dpx.memory.execute.module_calls import CallNames
from lightning_dpx.python_objects.leave_no_trace import untouched
from lightning_dpx.torch_compat import forward_hooks_of, forward_pre_hooks_of

Register = Callable[["Hooked"], Any]


class Hooked(nn.Module):
    """Puts hooks on in its first forward, and notes that it has."""

    def __init__(self, register: Register) -> None:
        super().__init__()
        self.first, self.last, self.register = nn.Linear(64, 64), nn.Linear(64, 64), register
        self.is_hooked = False
        self.seen = list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            self.register(self)
            self.is_hooked = True
        self.seen.clear()
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out + sum(self.seen)


def _sees(module: Hooked, _part: nn.Module, _inputs: Any, output: Tensor) -> None:
    module.seen.append(output)


def _doubles(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad *= 2


REGISTERED: dict[str, Register] = {
    "forward": lambda module: module.first.register_forward_hook(partial(_sees, module)),
    "before": lambda module: module.first.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,)),
    "with names": lambda module: module.first.register_forward_pre_hook(
        lambda _, inputs, named: ((inputs[0] * 2,), named), with_kwargs=True
    ),
    "backward": lambda module: module.first.register_full_backward_hook(lambda _, given, __: (given[0],)),
    "before backward": lambda module: module.last.register_full_backward_pre_hook(lambda _, given: (given[0] * 2,)),
    "of a gradient": lambda module: module.first.weight.register_hook(lambda gradient: gradient * 2),
    "after it": lambda module: module.first.weight.register_post_accumulate_grad_hook(_doubles),
}


def _results(module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    out = module(x)
    out.sum().backward()
    return [out.detach(), *(parameter.grad for parameter in module.parameters())]


def _hooked(name: str) -> tuple[Hooked, Tensor]:
    torch.manual_seed(0)
    return Hooked(REGISTERED[name]), torch.randn(48, 64, requires_grad=True)


@pytest.mark.parametrize("name", REGISTERED)
def test_hooks_that_a_search_has_seen_put_on_work_once(name: str) -> None:
    module, x = _hooked(name)
    expected = _results(module, x)
    module, x = _hooked(name)
    dpx.search_plan(module, x)
    assert not module.is_hooked
    assert all(map(torch.equal, _results(module, x), expected))


def test_a_hook_that_takes_itself_off_is_there_for_the_step_that_counts() -> None:
    layer = nn.Linear(4, 4)
    calls = list[str]()

    def once(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        calls.append("once")
        handle.remove()

    handle = layer.register_forward_hook(once, always_call=True)
    layer.register_forward_hook(lambda *_: calls.append("always"))
    for _ in range(2):
        with untouched(layer):
            layer(torch.ones(4))
    layer(torch.ones(4))
    layer(torch.ones(4))
    assert calls == ["once", "always"] * 3 + ["always"]


def test_hooks_of_ours_come_and_go_by_themselves() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    gone = CallNames(module)
    with untouched(module):
        gone.remove()
        stays = CallNames(module)
        module[0].register_forward_hook(lambda *_: None)
    assert [len(forward_pre_hooks_of(module[0])), len(forward_hooks_of(module[0]))] == [1, 1]
    stays.remove()
    assert not forward_pre_hooks_of(module[0])
    assert not forward_hooks_of(module[0])
