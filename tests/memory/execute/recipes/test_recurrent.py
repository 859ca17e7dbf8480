"""Fused cells, which only GPUs have."""

import pytest
import torch
from torch import Tensor, nn

from tests.memory.execute.recipes.probe import check_on_a_gpu


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["lstm", "gru", "rms norm"])
def test_fused_cells_and_norms_on_a_gpu(kind: str) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru, self.norm = nn.LSTMCell(64, 64), nn.GRUCell(64, 64), nn.RMSNorm(64)

        def forward(self, x: Tensor) -> Tensor:
            h = c = x
            for _ in range(3):
                if kind == "lstm":
                    h, c = self.lstm(x, (h, c))
                else:
                    h = self.gru(x, h) if kind == "gru" else torch.sin(self.norm(h))
            return h * c.cos()

    node = {"lstm": "ThnnFusedLstmCell", "gru": "ThnnFusedGruCell", "rms norm": "FusedRmsNorm"}[kind]
    check_on_a_gpu(Cell().cuda(), torch.rand(64, 64, device="cuda", requires_grad=True), node)
