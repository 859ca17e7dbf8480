"""The options of the strategy, checked before any device is touched."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from lightning_dpx.arguments import check_choice, is_number, is_whole_number
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.lightning.memory.out_of_memory import OnOOM
from lightning_dpx.reducers import REDUCERS, GradientReducer, make_communication_hook
from lightning_dpx.replicas import (
    BufferMode,
    Execution,
    MicroBatches,
    Slicer,
    check_batch_dim,
    check_micro_batches,
    check_workload,
    make_slicer,
)
from lightning_dpx.shifting import check_shifts
from lightning_dpx.step import LossReduction

Workload = Literal["even", "auto"] | list[float]
CommunicationDtype = Literal["float16", "bfloat16"]
Verify = Literal["warn", "raise", "first", "off"]
LONGEST_TIMEOUT = 1e9  # seconds; what torch.distributed can count
_CHOICES: dict[str, Any] = {
    "execution": Execution,
    "buffers": BufferMode,
    "loss_reduction": LossReduction,
    "on_oom": OnOOM,
    "verify": Verify,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StrategyOptions:
    """What :class:`DPXStrategy` was asked for; its docstring says what each of these means.

    Budgets, planners and plans are read by :class:`MemoryPlanning`, which refuses what it does not understand.

    Raises:
        ConfigurationError: an option has a value that is not allowed; names it, the value and what is allowed.
    """

    reducer: str | GradientReducer
    workload: Workload
    batch_dim: int | dict[str, int]
    batch_slicer: Slicer | Callable[[Any, list[int]], list[Any]] | None
    execution: Execution
    buffers: BufferMode
    loss_reduction: LossReduction
    communication_dtype: CommunicationDtype | None
    communication_hook: Any
    gradient_buckets: int
    shifts: dict[str, str] | Literal["auto"] | None
    shift_activations: list[str] | None
    memory_budget: Any
    example_batch: Any
    on_oom: OnOOM
    process_group_backend: str | None
    timeout: float
    check_replicas_every_n_steps: int
    verify: Verify
    micro_batches: MicroBatches | Literal["auto"]
    device_shifts: dict[torch.device, torch.device] = field(init=False)
    shifted_parts: list[str] = field(init=False)

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            check_choice(name, getattr(self, name), get_args(kind))
        if not isinstance(self.reducer, GradientReducer) and self.reducer != "auto":
            # For its error, which names the reducers that are registered.
            REDUCERS[self.reducer]
        if self.communication_dtype is not None:
            check_choice("communication_dtype", self.communication_dtype, get_args(CommunicationDtype))
        if self.communication_hook is not None:
            # For its error: wrong values are refused before a device is touched, and made once
            # more in setup.
            make_communication_hook(self.communication_hook)
        _check_count("gradient_buckets", self.gradient_buckets)
        _check_count("check_replicas_every_n_steps", self.check_replicas_every_n_steps)
        check_workload(self.workload)
        check_batch_dim(self.batch_dim)
        if self.micro_batches != "auto":
            check_micro_batches(self.micro_batches, ', or "auto"')
        if self.batch_slicer is not None:
            # Likewise, as the replicas that use it are made in setup only.
            make_slicer("batch_slicer", self.batch_slicer)
        if self.process_group_backend is not None and not isinstance(self.process_group_backend, str):
            raise ConfigurationError(
                f"process_group_backend={self.process_group_backend!r} is not allowed; give a name such as 'gloo'."
            )
        _check_timeout(self.timeout)
        device_shifts, shifted_parts = parse_shifts(self.shifts, self.shift_activations) or ({}, [])
        # The dataclass is frozen, and these follow from what was given.
        object.__setattr__(self, "device_shifts", device_shifts)
        object.__setattr__(self, "shifted_parts", shifted_parts)
        if self.example_batch is not None and self.memory_budget is None:
            raise ConfigurationError("example_batch is what a plan is made from; give memory_budget with it.")

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """What gradients travel in between devices; ``None`` for their own dtype."""
        dtype: torch.dtype | None = getattr(torch, self.communication_dtype) if self.communication_dtype else None
        return dtype

    @property
    def chooses_micro_batches(self) -> bool:
        """Whether the first batch decides into how many micro-batches slices are cut."""
        return self.micro_batches == "auto" and self.memory_budget is not None

    @property
    def chooses_shifts(self) -> bool:
        """Whether the first batch decides what is shifted."""
        return self.shifts == "auto"

    @property
    def shifts_activations(self) -> bool:
        """Whether parts of the replicas run, or may run, on other devices."""
        return bool(self.device_shifts) or self.chooses_shifts

    @property
    def number_rule(self) -> Literal["mean", "sum"]:
        """What is taken for the loss, and for numbers that metrics get, before a rehearsal knows better."""
        if self.loss_reduction == "sum":
            return "sum"
        return "mean"


def _check_count(name: str, count: object) -> None:
    if not is_whole_number(count) or count < 0:
        raise ConfigurationError(f"{name}={count!r} is not allowed; give 0 or a positive integer.")


def _check_timeout(timeout: object) -> None:
    if not is_number(timeout) or not 0 < timeout < LONGEST_TIMEOUT:
        raise ConfigurationError(f"timeout={timeout!r} is not allowed; give a positive number of seconds.")


def parse_shifts(
    shifts: Any, shift_activations: list[str] | str | None
) -> tuple[dict[torch.device, torch.device], list[str]] | None:
    """Where from and to, and which parts; ``None`` for ``"auto"``.

    Raises:
        ConfigurationError: one without the other, or a value that is not allowed.
    """
    if shifts is not None and shifts != "auto" and not isinstance(shifts, Mapping):
        raise ConfigurationError(f"shifts={shifts!r} is not allowed; give 'auto' or {{from: to}}.")
    # A text is a sequence of letters, which would each be taken for a name.
    parts = [shift_activations] if isinstance(shift_activations, str) else shift_activations
    if parts is not None and (not isinstance(parts, list | tuple) or not parts):
        raise ConfigurationError(f"shift_activations={parts!r} is not allowed; name at least one submodule.")
    if shifts == "auto":
        if parts is not None:
            raise ConfigurationError("shifts='auto' chooses the parts itself; leave shift_activations out.")
        return None
    # Neither means anything without the other, and to ignore one would hide a mistake.
    if (shifts is None) != (parts is None):
        given, missing = ("shifts", "shift_activations") if shifts is not None else ("shift_activations", "shifts")
        raise ConfigurationError(f"{given} needs {missing}: where from and to, and which parts of the module.")
    return (check_shifts(shifts) if shifts is not None else {}), list(parts or [])
