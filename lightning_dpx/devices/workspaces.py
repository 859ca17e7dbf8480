"""What libraries take on a device for themselves, and keep.

CUDA's library for matrix products (cuBLAS, and hipBLAS) has a workspace for every thread that calls it on a device, of
32 MiB on Hopper and 8 MiB on others. PyTorch takes it from its own allocator at the first product and never gives it
back, so it counts like a tensor: a step in threads that have not multiplied before takes more than the same step in a
thread that has. Autograd has a thread of its own for each device.
"""

import os

import torch

_HOW_TO_REPEAT = "CUBLAS_WORKSPACE_CONFIG"
_REPEATABLE = (":4096:8", ":16:8")  # torch takes no other value for one that gives the same each time


def keeps_workspaces(device: torch.device) -> bool:
    """Whether libraries keep memory for the threads that compute on ``device``."""
    # Every product is an error then, so there are none. A model without any runs, and is to be planned for as well.
    must_repeat = (
        torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    if must_repeat and os.environ.get(_HOW_TO_REPEAT) not in _REPEATABLE:
        return False
    return device.type == "cuda"


def take_workspaces(device: torch.device) -> None:
    """Has the libraries take now what they keep for the calling thread and for autograd's.

    Args:
        device: One that :func:`keeps_workspaces`.
    """
    # The smallest product will do: how much they take does not depend on it. Its backward is that of autograd's thread.
    with torch.inference_mode(False), torch.enable_grad():
        rows = torch.ones(1, 1, device=device, requires_grad=True)
        torch.autograd.grad(rows @ rows, rows)
