"""A small module with parameters and buffers, twice."""

import torch
from torch import nn

from lightning_dpx.replicas.replica import Replica
from lightning_dpx.replicas.replicate import replicate

CPU = torch.device("cpu")


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


def pair(device: torch.device = CPU) -> tuple[Replica, Replica]:
    return replicate(Net(), [CPU, device])
