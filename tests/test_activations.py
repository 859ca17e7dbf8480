"""What a model keeps between forward and backward, by module call."""

from typing import Any

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.activations import CallStack, Inputs, arguments_of_step, example_run, inputs_of, step_on


def test_every_saved_tensor_belongs_to_the_innermost_call_and_a_storage_counts_once() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    found = dpx.trace_activations(module, torch.ones(4, 2))
    assert [(one.name, one.shape, one.num_bytes) for one in found] == [("1", (4, 3), 48), ("2", (4, 3), 0)]


def test_later_calls_of_a_module_are_numbered() -> None:
    tanh = nn.Tanh()
    found = dpx.trace_activations(nn.Sequential(nn.Linear(1, 1), tanh, nn.Linear(1, 1), tanh), torch.ones(1, 1))
    assert "1" in [one.name for one in found]
    calls = CallStack(module := nn.Sequential(tanh))
    seen = []
    tanh.register_forward_hook(lambda *_: seen.append(calls.name))
    with calls.tracked():
        module(torch.ones(1))
        module(torch.ones(1))
    assert seen == ["0", "0#2"]
    assert not tanh._forward_pre_hooks, "followed no longer"


def test_a_trace_leaves_no_trace() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5))
    state = torch.get_rng_state()
    dpx.trace_activations(module, torch.ones(4, 2))
    assert module[0].num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), state)


class Steps(nn.Module):
    def training_step(self, batch, index):
        return batch, index


def test_a_training_step_is_called_as_lightning_calls_it() -> None:
    assert step_on(Steps(), Inputs(("batch",), {}))() == ("batch", 0)
    assert arguments_of_step(lambda batch: None, "batch") == ("batch",)
    assert arguments_of_step(lambda *args: None, "batch", 3) == ("batch", 3)
    assert arguments_of_step(lambda batch, *, extra=1: None, "batch") == ("batch",)
    assert step_on(nn.Tanh(), Inputs((torch.zeros(1),), {}))() == 0


def test_forward_gets_its_keyword_inputs_by_name() -> None:
    inputs = inputs_of(nn.Tanh(), (), {"input": torch.zeros(1)})
    assert step_on(nn.Tanh(), inputs)() == 0
    assert dpx.trace_activations(nn.Tanh(), kwargs={"input": torch.ones(4)}) == []
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    assert [one.shape for one in dpx.trace_activations(net, kwargs={"input": torch.ones(4, 2)})] == [(4, 3)]


@pytest.mark.parametrize(
    ("module", "kwargs", "message"),
    [
        (nn.Tanh(), ["input"], "kwargs of list is not allowed; give the keyword inputs of forward by name"),
        (nn.Tanh(), {1: 2}, r"kwargs of \[1\] is not allowed"),
        (Steps(), {"mask": 1}, "kwargs names mask, and a training_step gets nothing by keyword; give its batch alone"),
    ],
)
def test_what_are_no_keyword_inputs_is_refused(module: nn.Module, kwargs: Any, message: str) -> None:
    with pytest.raises(dpx.ConfigurationError, match=message):
        dpx.trace_activations(module, torch.ones(1), kwargs=kwargs)


def test_an_example_runs_in_evaluation_mode_and_the_mode_stays() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    assert example_run(module, torch.device("cpu")) is None
    for example in (torch.ones(1, 2), (torch.ones(1, 2),), {"input": torch.ones(1, 2)}):
        module.example_input_array = example
        run = example_run(module, torch.device("cpu"))
        assert run().shape == (1, 2), "batch norm refuses to train on one row"
    assert module[0].training
