"""Outputs have their rows along dims of their own."""

from typing import Any

import pytest
import torch
from torch import nn

import lightning_dpx as dpx
from lightning_dpx.replicas import OutputDims
from tests.conftest import places

ROWS = torch.randn(6, 5, 3, generator=torch.Generator().manual_seed(0))
STATES = {"0": 0, "output.1": 1}


def lstm() -> nn.LSTM:
    """Rows (B, T, 3) to hidden (B, T, 8) and two states (4, B, 4)."""
    torch.manual_seed(0)
    return nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)


def test_what_lies_within_has_the_dim_of_the_nearest_path_that_is_named() -> None:
    dims = OutputDims.read({"rows": 3, "output": 2, "output.1": 1, "output.1.b": -1})
    assert [dims.of(path) for path in ("", "0", "1", "1.a", "1.b", "1.b.0", "10")] == [2, 2, 1, 1, -1, -1, 2]
    assert dims.is_whole("1.b.0")
    assert OutputDims.read(-1).of("0") == 0, "an input is given whole, and outputs are those of slices"
    assert OutputDims.read({"output": -1}).of("0") == 0


@pytest.mark.parametrize("workload", [None, [2, 1]], ids=["alike", "unlike"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_states_of_recurrent_nets_are_those_of_all_rows(hardware: str, workload: Any, micro_batches: int) -> None:
    devices = places(2)
    plain = lstm().to(devices[0])
    rows = ROWS.to(devices[0])
    expected, (state, cell) = plain(rows)
    out_grads = (torch.ones_like(expected), (state.detach(), cell.detach()))
    torch.autograd.backward([expected, state, cell], [out_grads[0], *out_grads[1]])
    with dpx.ReplicaGroup(lstm(), devices, workload=workload, batch_dim=STATES, micro_batches=micro_batches) as group:
        group.forward(rows)
        ours = group.outputs_merged()
        torch.testing.assert_close(ours, (expected, (state, cell)))
        group.backward(out_grads)
        module = group.replicas[0].module
        for parameter, other in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.parametrize("workload", [None, [2, 1]], ids=["alike", "unlike"])
def test_rows_along_a_dim_that_nobody_named_are_not_averaged(workload: Any) -> None:
    message = (
        r"for result\.1\.0: no rows along dim 0, and along dim 1 as many as each replica has.*"
        r'batch_dim=\{"output\.1\.0": 1\}, or -1'
    )
    with dpx.ReplicaGroup(lstm(), ["cpu", "cpu"], workload=workload) as group:
        group.forward(ROWS)
        with pytest.raises(dpx.GatherError, match=message):
            group.outputs_merged()


class LastState(nn.Module):
    """Rows (B, T, 3) to a state (4, B, 4) alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = lstm()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.net(rows)[1][0]


def test_a_refusal_of_the_only_output_names_ways_that_lead_out() -> None:
    with dpx.ReplicaGroup(LastState(), ["cpu", "cpu"]) as group:
        group.forward(ROWS)
        with pytest.raises(dpx.GatherError, match=r'batch_dim=\{"output": 1\}, or read outputs\(\)\.$'):
            group.outputs_merged()
    with dpx.ReplicaGroup(LastState(), ["cpu", "cpu"], batch_dim={"output": 1}) as group:
        group.forward(ROWS)
        torch.testing.assert_close(group.outputs_merged(), LastState()(ROWS))


class Shares(nn.Module):
    """Rows (B, 3) to their product (B, 3), and to what has no rows: the weight (3, 3) and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3) * 2)

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        product = rows @ self.weight
        return {"rows": product, "weight": self.weight * 1, "mean": product.mean()}


def test_what_is_the_same_on_all_replicas_is_given_once_and_means_are_averaged() -> None:
    rows = torch.arange(18.0).reshape(6, 3)
    plain = Shares()
    expected = plain(rows)
    grads = {"rows": torch.ones(6, 3), "weight": torch.arange(9.0).reshape(3, 3), "mean": None}
    torch.autograd.backward([expected["rows"], expected["weight"]], [grads["rows"], grads["weight"]])
    # By its shape, (3, 3), the weight has rows.
    with dpx.ReplicaGroup(Shares(), ["cpu", "cpu"], batch_dim={"output.weight": -1}) as group:
        group.forward(rows)
        torch.testing.assert_close(group.outputs_merged(), expected)
        group.backward(grads)
        torch.testing.assert_close(group.replicas[0].module.weight.grad, plain.weight.grad)


def test_an_output_that_is_not_there_is_refused() -> None:
    with dpx.ReplicaGroup(lstm(), ["cpu", "cpu"], batch_dim={"output.2": 1}) as group:
        group.forward(ROWS)
        with pytest.raises(dpx.ConfigurationError, match=r"names 'output\.2', but the outputs are 'output\.0'"):
            group.outputs_merged()
