"""What libraries take on a device for themselves, and keep.

CUDA's library for matrix products (cuBLAS, and hipBLAS) has a workspace for every thread that calls it on a device, of
32 MiB on Hopper and 8 MiB on others. PyTorch takes it from its own allocator at the first product and never gives it
back, so it counts like a tensor: a step in threads that have not multiplied before takes more than the same step in a
thread that has. Autograd has a thread of its own for each device.
"""

import os

import torch

_WIDTH = 64  # cuBLASLt is given no matrices of a single row or column
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
    # Small products will do. One with a bias is another library's (cuBLASLt): on an H200 it left 1 MiB more.
    with torch.inference_mode(False), torch.enable_grad():
        rows = torch.ones(_WIDTH, _WIDTH, device=device, requires_grad=True)
        products = torch.nn.functional.linear(rows @ rows, rows, rows[0])
        # Autograd's thread begins with the square, as a product would warn that it has no context of the device yet.
        torch.autograd.grad(products.square().sum(), rows)
