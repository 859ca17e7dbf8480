"""What hooks keep is found wherever they lead, but for what the module has itself."""

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_dpx.python_objects.hook_state import hooks_of_parameters, kept_by_hooks


class Recorder:
    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, *args: Any) -> None:
        self.kept.append(args)

    def hook(self, *args: Any) -> None:
        self.kept.append(args)


def names(module: nn.Module) -> list[str]:
    return [name.rpartition(".")[2] for name, _ in kept_by_hooks(module)]


def test_methods_and_objects_lead_to_attributes() -> None:
    for hook in (Recorder().hook, Recorder()):
        net = nn.Sequential(nn.Linear(2, 2))
        net[0].register_forward_hook(hook)
        assert dict(kept_by_hooks(net)) == {"Recorder.kept": []}


def test_functions_lead_to_what_they_have_captured_and_partials_to_their_arguments() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    captured: list[Any] = []
    given: dict[str, Any] = {}
    net[0].register_forward_pre_hook(lambda *args: captured.append(args))
    net.register_full_backward_hook(functools.partial(Recorder.hook, given))  # type: ignore[arg-type]
    assert sorted(names(net)) == ["args[0]", "captured"]


def test_two_hooks_that_lead_to_one_object_tell_of_it_once() -> None:
    recorder = Recorder()
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for layer in net:
        layer.register_forward_hook(recorder.hook)
    assert names(net) == ["kept"]


def test_what_the_module_leads_to_is_left_to_its_own_attributes() -> None:
    net: Any = nn.Sequential(nn.Linear(2, 2))
    taps = net.taps = {}
    net.recorder = Recorder()
    net[0].register_forward_hook(lambda module, args, output: taps.update(out=output))
    net[0].register_forward_hook(net.recorder.hook)
    net[0].register_forward_hook(net.forward)
    assert names(net) == []


def test_modules_that_are_no_part_of_it_lead_to_attributes_and_buffers() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    statistics = nn.BatchNorm1d(2)
    net[0].register_forward_hook(lambda module, args, output: statistics(output))
    assert {"running_mean", "running_var", "num_batches_tracked", "momentum"} <= set(names(net))
    net.append(statistics)
    assert names(net) == []


def test_modules_without_hooks_and_parametrized_ones_keep_nothing() -> None:
    assert names(nn.Linear(2, 2)) == []
    assert names(parametrizations.weight_norm(nn.Linear(2, 2))) == []


def test_hooks_of_parameters_are_found_by_name() -> None:
    net = nn.Linear(2, 2)
    net.weight.register_hook(torch.clone)
    net.bias.register_post_accumulate_grad_hook(lambda _: None)
    named = hooks_of_parameters(net)
    assert len(named) == 2
    assert "a hook of weight" in next(iter(named))
    assert "a hook of bias" in list(named)[1]
