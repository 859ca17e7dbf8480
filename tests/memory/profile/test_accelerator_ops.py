"""What accelerators keep of dropout and attention, on the CPU."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_dpx.memory import profile_module
from lightning_dpx.memory.profile.accelerator_ops import AsOnAccelerators

CUDA = torch.device("cuda")


def saved_dtypes(run) -> list[torch.dtype]:
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t):
        run()
    return kept


@pytest.mark.parametrize("dropout", [lambda x: F.dropout(x, 0.5), lambda x: torch.dropout(x, 0.5, True), nn.Dropout()])
def test_dropout_keeps_a_byte_per_element(dropout) -> None:
    rows = torch.ones(4, requires_grad=True)
    assert torch.bool not in saved_dtypes(lambda: dropout(rows))
    with AsOnAccelerators(CUDA):
        assert torch.bool in saved_dtypes(lambda: dropout(rows))


def test_dropout_that_does_nothing_is_left_alone() -> None:
    rows = torch.ones(4, requires_grad=True)
    with AsOnAccelerators(CUDA):
        assert F.dropout(rows, 0.5, training=False) is not None
        assert F.dropout(rows, 0.0).tolist() == [1] * 4
        assert F.dropout(rows, 1.0).tolist() == [0] * 4


@pytest.mark.parametrize("by_name", [False, True])
def test_attention_with_dropout_keeps_no_scores(by_name: bool) -> None:
    query = torch.rand(1, 1, 64, 8, requires_grad=True)

    def run() -> torch.Tensor:
        if by_name:
            return F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
        return F.scaled_dot_product_attention(query, query, query, None, 0.5)

    with AsOnAccelerators(CUDA):
        first = run()
        assert torch.equal(first, run()), "as without dropout"
    assert not torch.equal(run(), run())


def test_an_unrolled_lstm_keeps_what_the_fused_kernel_of_cuda_keeps() -> None:
    """What an H200 was seen to keep of a cell: both products, the gates and the cell state, 13 times the state."""

    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(64, 64)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            hidden = cell = torch.zeros(128, 64)
            for _ in range(8):
                hidden, cell = self.cell(rows, (hidden, cell))
            return hidden

    profile = profile_module(Unrolled(), torch.ones(128, 64), device="cuda")
    state = 128 * 64 * 4
    operators = Counter(value.operator for value in profile.values if value.storage >= 0)
    assert operators["ThnnFusedLstmCellBackward0"] >= 15
    assert operators["MmBackward0"] == 16
    assert 13 * 8 * state <= profile.peak <= 15 * 8 * state


class Cells(nn.Module):
    """An LSTM that is unrolled by ``torch.lstm_cell``, or by its module."""

    def __init__(self, by: str, *, bias: bool = True) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(64, 64, bias=bias)
        self.by = by

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weights = self.cell
        states = torch.zeros(128, 64), torch.zeros(128, 64)
        biases = {"b_ih": weights.bias_ih, "b_hh": weights.bias_hh}
        for _ in range(8):
            if self.by == "module":
                states = weights(rows, states)
            elif self.by == "order":
                states = torch.lstm_cell(rows, states, weights.weight_ih, weights.weight_hh, **biases)
            else:
                names = {"input": rows, "hx": states, "w_ih": weights.weight_ih, "w_hh": weights.weight_hh}
                states = torch.lstm_cell(**names, **biases)
        return states[0]


@pytest.mark.parametrize(("by", "bias"), [("order", True), ("names", True), ("module", False)])
def test_lstm_cells_without_biases_or_given_by_name_are_cells_as_well(by: str, bias: bool) -> None:
    rows = torch.ones(128, 64)
    found = profile_module(Cells(by, bias=bias), rows, device="cuda").peak
    assert found == pytest.approx(profile_module(Cells("module"), rows, device="cuda").peak, rel=0.01)
