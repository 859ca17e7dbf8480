"""What an error of a replica does not say by itself: which module raised it, and what its device held."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import BackwardHook

from lightning_dpx.devices import allocated_and_peak, capacity_of, is_out_of_memory
from lightning_dpx.torch_compat import tree_leaves
from lightning_dpx.units import MIB, format_mib


def annotate(error: BaseException, module: nn.Module, device: torch.device, first_nan: "FirstNaN") -> None:
    """Adds what is known to the notes of ``error``, which stays the same object."""
    # It is that of the last forward that was watched, and later steps are watched only in anomaly mode.
    if first_nan.path and torch.is_anomaly_enabled():
        error.add_note(f"The first module whose output held a NaN was {first_nan.path}.")
    if path := _module_path(error, module):
        error.add_note(f"In module {path}.")
    is_full = is_out_of_memory(error)
    # Memory that runs out is no end of a device.
    if isinstance(error, torch.AcceleratorError) and not is_full:
        error.add_note(
            f"After such an error {device} is lost to this process, and so is what it held: nothing was saved from it. "
            "Start a new process and resume from the last checkpoint file."
        )
    if is_full:
        held, peak = allocated_and_peak(device)
        total = capacity_of(device).total
        limit = f" of {total / MIB:.1f}" if total else ""
        error.add_note(
            f"{device} held {held / MIB:.1f}{limit} MiB when it was asked for more; its peak was {format_mib(peak)}."
        )


def note_replica(error: BaseException, replica: int, device: torch.device, stage: str) -> None:
    """Says where ``error`` was raised."""
    error.add_note(f"In replica {replica} on {device}, during {stage}.")


@contextmanager
def trial_noted(replica: int, device: torch.device, stage: str, purpose: str) -> Iterator[None]:
    """Says of an error that it is of a step which was only tried.

    Args:
        replica: For which one.
        device: Where.
        stage: Which step.
        purpose: What for, as the end of "a trial run ...".
    """
    try:
        yield
    except BaseException as error:
        error.add_note(f"In replica {replica} on {device}, during {stage}, in a trial run {purpose}.")
        raise


def _module_path(error: BaseException, module: nn.Module) -> str:
    """The innermost submodule whose forward or hook raised ``error``; empty where no frame tells."""
    names = {id(child): name for name, child in module.named_modules()}
    path = ""
    # A traceback leads from the outermost call inwards, so the last submodule on the way is the innermost.
    entry = error.__traceback__
    while entry is not None:
        # A method of a module has it for ``self``; a backward hook has a helper that knows it.
        owner = entry.tb_frame.f_locals.get("self")
        if isinstance(owner, BackwardHook):
            owner = owner.module
        path = names.get(id(owner)) or path
        entry = entry.tb_next
    return path


class FirstNaN:
    """Under ``detect_anomaly``, remembers where a forward first made a NaN: backward only tells the operator.

    Attributes:
        path: The innermost module whose output held a NaN before any other's; empty if there was none.
    """

    def __init__(self) -> None:
        self.path: str = ""

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Looks for the first NaN in one forward of ``module``."""
        self.path = ""
        handles = []
        for name, child in module.named_modules():
            if name:
                handles.append(child.register_forward_hook(partial(self._see, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
        # Modules end from the inside out, so the first one with a NaN is the innermost.
        if not self.path and any(bool(tensor.isnan().any()) for tensor in tensors):
            self.path = name
