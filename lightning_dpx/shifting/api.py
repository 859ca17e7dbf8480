"""Put a shift on a module, and take it off: what users and the strategy call."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_dpx.activations import example_run, inputs_of, preserve_module_state, step_on
from lightning_dpx.arguments import check_is_module
from lightning_dpx.devices import canonical_device
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.shifting.choose import Names, check_shifts, choose_modules, source_of
from lightning_dpx.shifting.hooks import remove_hooks_of
from lightning_dpx.shifting.shift import SHIFTS, Shift


def shift_activations(
    module: nn.Module,
    activations: Names,
    shifts: Mapping[Any, Any],
    *batch: Any,
    kwargs: Mapping[str, Any] | None = None,
) -> Shift:
    """Runs parts of ``module`` on another device from now on.

    Args:
        module: The model; it keeps its class, its names and its state dict.
        activations: Names of submodules, or patterns as for file names (``"encoder.layers.[0-3]"``). A submodule's own
            submodules go with it. Activations from :func:`trace_activations`, and their names, stand for their modules.
        shifts: ``{from: to}``; parts of the model that live on ``from`` move to ``to``.
        batch: As for :func:`trace_activations`. What cannot be shifted shows when the model runs: with a batch, or
            where the module has an ``example_input_array``, it runs once now; otherwise it shows in the first step.
        kwargs: As for :func:`trace_activations`, beside a batch or instead of one.

    Returns:
        The shift, which :func:`unshift_activations` takes back.

    Raises:
        ConfigurationError: a device is both source and target, a pattern matches nothing (with the nearest names), the
            target has no room for the parameters, ``kwargs`` are none of the module's step, or it is shifted already.
        UnsupportedError: an in-place operator, or a checkpointed region, lies across the cut. Nothing is shifted then.

    Examples:
        >>> dpx.simulate(2)
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to("sim:0")
        >>> rows = torch.ones(4, 8, device="sim:0")
        >>> shift = dpx.shift_activations(net, "2", {"sim:0": "sim:1"}, rows)
        >>> net[2].weight.device
        device(type='sim', index=1)
        >>> net(rows).device  # copies are inserted, also back
        device(type='sim', index=0)
    """
    check_is_module(module)
    inputs = inputs_of(module, batch, kwargs)
    shift = apply_shift(module, activations, shifts)
    is_given = inputs.positional or inputs.named
    run = step_on(module, inputs) if is_given else example_run(module, shift.source)
    if run is not None:
        try:
            with preserve_module_state(module), shift.active():
                run()
        # Ctrl-C in the middle of the run takes the shift off again, too.
        except BaseException as error:
            unshift_activations(module)
            error.add_note(f"It happened in the run that checks {shift.entry} before training; nothing is shifted.")
            raise
    return shift


def apply_shift(module: nn.Module, activations: Names, shifts: Mapping[Any, Any]) -> Shift:
    """:func:`shift_activations` without a run."""
    if module in SHIFTS:
        raise ConfigurationError("The module is shifted already; call unshift_activations(module) first.")
    # All that can be wrong with the arguments is found before the first tensor moves.
    placed = check_shifts(shifts)
    chosen = choose_modules(module, activations)
    source = source_of(module, placed)
    shift = Shift(module, chosen, source, placed[source])
    shift.install(module)
    SHIFTS[module] = shift
    return shift


def unshift_activations(module: nn.Module, device: torch.device | str | None = None) -> None:
    """Takes :func:`shift_activations` back: everything runs, and lives, where it did before.

    Args:
        module: The model.
        device: Where the shifted parts go instead, for example ``"cpu"`` when the source is full.

    Raises:
        ConfigurationError: the module is not shifted.

    Examples:
        >>> dpx.simulate(2)
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)).to("sim:0")
        >>> shift = dpx.shift_activations(net, "1", {"sim:0": "sim:1"}, torch.ones(4, 8, device="sim:0"))
        >>> dpx.unshift_activations(net)
        >>> net[1].weight.device
        device(type='sim', index=0)
    """
    check_is_module(module)
    shift = SHIFTS.pop(module, None)
    if shift is None:
        raise ConfigurationError("The module is not shifted.")
    shift.remove(None if device is None else canonical_device(device))


def applied_shift(module: nn.Module) -> Shift | None:
    """The shift of ``module``, if there is one."""
    return SHIFTS.get(module)


def has_shifts() -> bool:
    """Whether any module of this process is shifted."""
    return len(SHIFTS) > 0


def shift_like(module: nn.Module, shift: Shift) -> None:
    """Shifts ``module``, a copy of the one that ``shift`` is of, in the same way."""
    own = Shift(module, list(shift.chosen), shift.source, shift.target)
    own.install(module)
    SHIFTS[module] = own


def forget_shift(module: nn.Module) -> None:
    """Takes a shift off ``module``, if it has one, and leaves every tensor where it is."""
    shift = SHIFTS.pop(module, None)
    if shift is not None:
        remove_hooks_of(shift, module)
