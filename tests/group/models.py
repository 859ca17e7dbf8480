"""Modules that several tests of groups train."""

from torch import nn


class TwoHeads(nn.Module):
    """Takes a dict and returns one; its batch norm has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.norm = nn.Linear(3, 2), nn.Linear(3, 1), nn.BatchNorm1d(3)

    def forward(self, images):
        rows = self.norm(images["pixels"])
        return {"left": self.left(rows), "right": self.right(rows)}
