"""What an error of a replica does not say by itself: which module raised it, and what its device held."""

import torch
from torch import nn
from torch.utils.hooks import BackwardHook

from lightning_dpx.devices import allocated_and_peak, capacity_of


def annotate(error: BaseException, module: nn.Module, device: torch.device) -> None:
    """Adds what is known to the notes of ``error``, which stays the same object."""
    if path := _module_path(error, module):
        error.add_note(f"In module {path}.")
    if isinstance(error, torch.OutOfMemoryError):
        (held, peak), total = allocated_and_peak(device), capacity_of(device).total
        limit = f" of {total / 2**20:.1f}" if total else ""
        error.add_note(
            f"{device} held {held / 2**20:.1f}{limit} MiB when it was asked for more; its peak was "
            f"{peak / 2**20:.1f} MiB."
        )


def _module_path(error: BaseException, module: nn.Module) -> str:
    """The innermost submodule whose forward or hook raised ``error``; empty where no frame tells."""
    names, path, entry = {id(child): name for name, child in module.named_modules()}, "", error.__traceback__
    while entry is not None:
        owner = entry.tb_frame.f_locals.get("self")
        if isinstance(owner, BackwardHook):
            owner = owner.module
        path, entry = names.get(id(owner)) or path, entry.tb_next
    return path
