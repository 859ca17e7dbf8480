"""The arguments of the strategy, checked before any device is touched."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from lightning_dpx.errors import ConfigurationError
from lightning_dpx.lightning.memory.out_of_memory import OnOOM
from lightning_dpx.lightning.rehearsal.rehearsal import Verify
from lightning_dpx.reducers import REDUCERS, GradientReducer
from lightning_dpx.replicas import BufferMode, Execution, check_batch_dim, check_choice, check_workload, make_slicer
from lightning_dpx.shifting import check_shifts
from lightning_dpx.step import LossReduction

Workload = Literal["even", "auto"] | list[float]
CommunicationDtype = Literal["float16", "bfloat16"]
LONGEST_TIMEOUT = 1e9  # seconds; what torch.distributed can count


def check_arguments(
    *,
    reducer: object,
    workload: object,
    batch_dim: object,
    batch_slicer: object,
    communication_dtype: object,
    gradient_buckets: object,
    process_group_backend: object,
    timeout: object,
    check_replicas_every_n_steps: object,
    **choices: object,
) -> None:
    """Refuses what :class:`DPXStrategy` does not understand.

    Raises:
        ConfigurationError: names the argument, the value and what is allowed.
    """
    kinds: dict[str, Any] = {
        "execution": Execution, "buffers": BufferMode, "loss_reduction": LossReduction, "on_oom": OnOOM,
        "verify": Verify,
    }  # fmt: skip
    for name, value in choices.items():
        check_choice(name, value, get_args(kinds[name]))
    if not isinstance(reducer, GradientReducer) and reducer != "auto":
        REDUCERS[reducer]  # type: ignore[index]
    if communication_dtype is not None:
        check_choice("communication_dtype", communication_dtype, get_args(CommunicationDtype))
    for name, count in (
        ("gradient_buckets", gradient_buckets), ("check_replicas_every_n_steps", check_replicas_every_n_steps),
    ):  # fmt: skip
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ConfigurationError(f"{name}={count!r} is not allowed; give 0 or a positive integer.")
    check_workload(workload)
    check_batch_dim(batch_dim)
    if batch_slicer is not None:
        make_slicer("batch_slicer", batch_slicer)
    if process_group_backend is not None and not isinstance(process_group_backend, str):
        raise ConfigurationError(
            f"process_group_backend={process_group_backend!r} is not allowed; give a name such as 'gloo'."
        )
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < LONGEST_TIMEOUT:
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
    parts = [shift_activations] if isinstance(shift_activations, str) else shift_activations
    if parts is not None and (not isinstance(parts, list | tuple) or not parts):
        raise ConfigurationError(f"shift_activations={parts!r} is not allowed; name at least one submodule.")
    if shifts == "auto":
        if parts is not None:
            raise ConfigurationError("shifts='auto' chooses the parts itself; leave shift_activations out.")
        return None
    if (shifts is None) != (parts is None):
        given, missing = ("shifts", "shift_activations") if shifts is not None else ("shift_activations", "shifts")
        raise ConfigurationError(f"{given} needs {missing}: where from and to, and which parts of the module.")
    return (check_shifts(shifts) if shifts is not None else {}), list(parts or [])
