"""Gradients on simulated devices, and the bytes that travel between these."""

import torch

from lightning_dpx.simulate import traffic

SIZE = 100_000  # floats of each of 40 gradients


def sim_grads(num_replicas: int) -> tuple[list[torch.device], list[list[torch.Tensor | None]]]:
    devices = [torch.device("sim", index) for index in range(num_replicas)]
    return devices, [[torch.ones(SIZE // 40, device=device) for _ in range(40)] for device in devices]


def bytes_out_and_in(num_replicas: int) -> list[tuple[int, int]]:
    seen = traffic()
    return [
        (
            sum(t.num_bytes for t in seen if t.source == torch.device("sim", k)),
            sum(t.num_bytes for t in seen if t.target == torch.device("sim", k)),
        )
        for k in range(num_replicas)
    ]
