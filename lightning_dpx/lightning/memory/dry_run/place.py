"""Where a step that is planned for is run: on its device where that is there, and else on this machine's CPU, as fakes.

A device that is there tells what no fake tensor can: what its kernels and libraries take, how long they take for it,
and how long the host needs to start them.
"""

import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from lightning_dpx.devices import accelerators, free_garbage, is_host, is_modelled, is_out_of_memory
from lightning_dpx.errors import PlanError
from lightning_dpx.lightning.lightning_api import AcceleratorRegistry, rank_zero_warn
from lightning_dpx.lightning.memory.profiling import DoesNotFitError
from lightning_dpx.lightning.processes.one_process import OneProcess
from lightning_dpx.lightning.strategy import DPXStrategy

Found = TypeVar("Found")


def device_there(devices: Sequence[torch.device]) -> torch.device | None:
    """The first accelerator of ``devices`` that this process, and a Trainer, can use; ``None`` where there is none."""
    usable = accelerators()
    known = AcceleratorRegistry.available_accelerators()
    for device in map(with_index, devices):
        if device in usable and device.type in known:
            return device
    return None


def with_index(device: torch.device) -> torch.device:
    """The device that a name means which need not be there; the CPU has no index."""
    # "cuda" names the first one here, whichever is the current one: forecasts are by index.
    if device.index is None and not is_host(device):
        return torch.device(device.type, 0)
    return device


def trainer_on(devices: Sequence[torch.device]) -> dict[str, Any]:
    """What a Trainer is told so that it has these devices, which are of one type."""
    kind = devices[0].type
    # A CPU is counted, and other devices are named.
    if is_host(devices[0]):
        return {"accelerator": kind, "devices": len(devices)}
    return {"accelerator": kind, "devices": [device.index for device in devices]}


def trainer_to_look(home: torch.device) -> dict[str, Any]:
    """What a Trainer is told with which a step is only looked at, on ``home``: nothing is trained."""
    strategy: Any = "auto"
    if not is_host(home):
        # As in the run: Lightning's own strategies do not know every accelerator, and give some the autocast of CUDA.
        strategy = strategy_to_look()
    return {**trainer_on([home]), "num_nodes": 1, "strategy": strategy, "num_sanity_val_steps": 0}


def strategy_to_look(**options: Any) -> DPXStrategy:
    """With it steps are looked at or timed in this process alone, and nothing is compared with one device.

    Args:
        options: Of the strategy.
    """
    # In a job of SLURM, or under torchrun, there would be others to wait for, none of which looks at a step.
    return DPXStrategy(verify="off", cluster_environment=OneProcess(), **options)


def on_its_device(
    devices: Sequence[torch.device], look: Callable[[torch.device], Found], *, dry: bool = False
) -> Found:
    """What ``look`` finds with a Trainer on the first of ``devices`` that is there, or else on this machine's CPU.

    A step that does not fit on the device is looked at on the CPU, on fake tensors, which is announced.

    Args:
        devices: That are planned for.
        look: Makes a Trainer on a device, and looks at a step with it.
        dry: Whether no device is used although it is there.
    """
    there = None if dry else device_there(devices)
    if there is None:
        return look(torch.device("cpu"))
    try:
        return look(there)
    except (RuntimeError, PlanError) as error:
        if not (is_out_of_memory(error) or isinstance(error, DoesNotFitError)):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold on to what did not fit
    free_garbage()
    rank_zero_warn(
        f"dpx: a step, or the module itself, does not fit on {there} as it is, so it is predicted from fake tensors."
    )
    return look(torch.device("cpu"))


def describe_measured(home: torch.device, others: Sequence[torch.device], *, on_fewer_rows: bool) -> str:
    """What figures rest on that come from steps that were run on ``home``.

    Args:
        home: Where they were run; the host needs no words.
        others: For which devices the figures are.
        on_fewer_rows: Whether not all of the rows were run.
    """
    if is_host(home):
        return ""
    how = "a step that was run" if not on_fewer_rows else "steps on fewer rows that were run"
    clock = "with the times of its model" if is_modelled(home) else "timed with what the host needs for it"
    told = f"from {how} on {home}, {clock}"
    if any(with_index(device) != home for device in others):
        return f"{told}; it stands for all devices"
    return told
