"""What libraries take on a device for themselves, and keep.

CUDA's library for matrix products (cuBLAS, and hipBLAS) has a workspace for every thread that calls it on a device, of
32 MiB on Hopper and 8 MiB on others. PyTorch takes it from its own allocator at the first product and never gives it
back, so it counts like a tensor: a step in threads that have not multiplied before takes more than the same step in a
thread that has. Autograd has a thread of its own for each device.
"""

import os

import torch

_HOW_TO_REPEAT = "CUBLAS_WORKSPACE_CONFIG"


def keeps_workspaces(device: torch.device) -> bool:
    """Whether libraries keep memory for the threads that compute on ``device``."""
    if torch.are_deterministic_algorithms_enabled() and _HOW_TO_REPEAT not in os.environ:
        return False  # every product is an error, so there are none
    return device.type == "cuda"


def take_workspaces(device: torch.device) -> None:
    """Has the libraries take now what they keep for the calling thread and for autograd's.

    Args:
        device: One that :func:`keeps_workspaces`.
    """
    with torch.inference_mode(False), torch.enable_grad():
        rows = torch.ones(1, 1, device=device, requires_grad=True)
        torch.autograd.grad(rows @ rows, rows)
