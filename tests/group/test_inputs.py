"""Inputs by position and by name, cut and put on the replicas, and the gradients that they get there."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from tests.conftest import places

pytestmark = pytest.mark.usefixtures("hardware")


@pytest.mark.parametrize(("request_", "expected"), [("write", [1, 1]), ("add", [1, 2])])
def test_write_and_add_are_for_inputs_too(make_group, request_, expected) -> None:
    module = nn.Linear(3, 2)
    group = make_group(module, places(2), grad_req=request_, inputs_need_grad=True)
    once = module.weight.detach().sum(0)
    found = []
    for _ in range(2):
        rows = torch.randn(4, 3, device=once.device)
        group.forward(rows)
        group.backward(torch.ones(4, 2, device=once.device))
        found.append(group.input_grads_merged()[0])
    for times, grads in zip(expected, found, strict=True):
        torch.testing.assert_close(grads, times * once.expand(4, 3))
    # Other shapes, or a wish for them, begin anew.
    for num_rows in (6, 6):
        group.reshape(num_rows)
        group.forward(torch.ones(num_rows, 3, device=once.device))
        group.backward(torch.ones(num_rows, 2, device=once.device))
        torch.testing.assert_close(group.input_grads_merged()[0], once.expand(num_rows, 3))


class Recurrent(nn.Module):
    """Time-major rows (T, B, 3) and lengths (B,) to scores (T, B, 2) and sums (B, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 2)

    def forward(self, rows, *, lengths, bias):
        scores, _ = self.rnn(rows)
        mask = torch.arange(len(rows), device=rows.device)[:, None] < lengths
        return scores * mask[..., None] + bias


def test_layouts_per_input_named_inputs_and_merged_input_gradients(make_group, execution) -> None:
    torch.manual_seed(0)
    plain, rows, bias = Recurrent(), torch.randn(5, 6, 3), torch.randn(2)
    lengths = torch.tensor([5, 1, 3, 2, 4, 5])
    layout = {"0": 1, "lengths": 0, "bias": -1, "output": 1}
    device = places(1)[0]
    group = make_group(copy.deepcopy(plain), places(3), batch_dim=layout, inputs_need_grad=True, execution=execution)
    group.forward(rows.to(device), lengths=lengths.to(device), bias=bias.to(device))
    assert [tuple(part.shape) for part in group.outputs()] == [(5, 2, 2)] * 3
    whole_rows, whole_bias = rows.clone().requires_grad_(), bias.clone().requires_grad_()
    expected = plain(whole_rows, lengths=lengths, bias=whole_bias)
    out_grads = torch.randn(5, 6, 2)
    expected.backward(out_grads)
    torch.testing.assert_close(group.outputs_merged().cpu(), expected)
    with pytest.raises(dpx.SliceError, match="out_grads has 4 rows, the outputs have 6"):
        group.backward(out_grads[:, :4].to(device))
    for wrong in (None, out_grads[..., :1].to(device), [out_grads.to(device)] * 2):
        with pytest.raises(dpx.SliceError, match=r"The outputs have shapes \[5, 2, 2\], and their gradients"):
            group.backward(wrong)
    group.backward(out_grads.to(device))
    row_grad, length_grad, bias_grad = group.input_grads_merged()
    torch.testing.assert_close(row_grad.cpu(), whole_rows.grad)
    assert length_grad is None
    torch.testing.assert_close(bias_grad.cpu(), whole_bias.grad)
    for name, parameter in group.replicas[0].module.named_parameters():
        torch.testing.assert_close(parameter.grad.cpu(), plain.get_parameter(name).grad)


@pytest.mark.parametrize("name", ["image", "1", "outputs"])
def test_inputs_that_the_module_does_not_take_are_named(make_group, name) -> None:
    with pytest.raises(dpx.ConfigurationError, match=rf"batch_dim names '{name}'; Linear.forward takes input"):
        make_group(nn.Linear(4, 2), places(2), batch_dim={name: 1})
    make_group(nn.Linear(4, 2), places(2), batch_dim={"input": 0, "0": 0, "output": 0})


def test_input_gradients_before_a_step_are_asked_for_in_vain() -> None:
    group = dpx.ReplicaGroup(nn.Linear(4, 2), ["cpu", "cpu"], inputs_need_grad=True, execution="inline")
    for ask in (group.input_grads, group.input_grads_merged):
        with pytest.raises(
            dpx.ConfigurationError, match=r"input_grads\(\) needs a forward\(\) and a backward\(\) before"
        ):
            ask()


@dataclass
class Rows:
    rows: torch.Tensor
    scale: float


class OfObjects(nn.Module):
    """Takes a dataclass and a packed sequence, returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rnn = nn.Linear(3, 2), nn.GRU(3, 2, batch_first=True)

    def forward(self, batch, packed):
        _, last = self.rnn(packed)
        return Rows(self.linear(batch.rows) * batch.scale + last[0], batch.scale)


def test_inputs_of_any_kind_come_to_their_replica(make_group) -> None:
    torch.manual_seed(0)
    plain, rows = OfObjects(), torch.randn(4, 3)
    group = make_group(copy.deepcopy(plain), places(2), inputs_need_grad=True)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(4, 5, 3), torch.tensor([5, 4, 2, 1]), batch_first=True)
    group.forward(Rows(rows, 2.0), packed)
    outputs, whole = group.outputs_merged(), rows.clone().requires_grad_()
    expected = plain(Rows(whole, 2.0), packed)
    torch.testing.assert_close(outputs.rows.cpu(), expected.rows)
    out_grads = torch.randn(4, 2)
    expected.rows.backward(out_grads)
    group.backward(Rows(out_grads.to(places(1)[0]), 2.0))
    of_rows, of_packed = group.input_grads_merged()
    torch.testing.assert_close(of_rows.rows.cpu(), whole.grad)
    assert of_packed is None
    assert [part.rows.shape for part in group.input_grads()[0]] == [(2, 3), (2, 3)]
