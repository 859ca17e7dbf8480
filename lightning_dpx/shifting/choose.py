"""What a shift is given: devices that are there, and submodules by name, by pattern or by activation."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from lightning_dpx.activations import Activation
from lightning_dpx.devices import canonical_device
from lightning_dpx.errors import ConfigurationError, some_of

Names = str | Activation | Sequence[str | Activation]


def check_shifts(shifts: Mapping[Any, Any]) -> dict[torch.device, torch.device]:
    """``{from: to}`` with real devices.

    Raises:
        ConfigurationError: nothing to shift, an unknown device, one that is both source and target.
    """
    if not isinstance(shifts, Mapping) or not shifts:
        what = "empty" if not shifts else f"{shifts!r}, which is no mapping"
        raise ConfigurationError(f"shifts is {what}; give {{from: to}}, for example {{'cuda:0': 'cuda:1'}}.")
    placed = {}
    for source, target in shifts.items():
        try:
            placed[canonical_device(source)] = canonical_device(target)
            torch.empty(0, device=target)  # is it there?
        except torch.OutOfMemoryError:  # it is, and full; what moves there will be weighed
            continue
        # torch asserts that it was built for the type of device.
        except (RuntimeError, AssertionError, ConfigurationError) as error:
            raise ConfigurationError(f"shifts[{source!r}]={target!r} names an unknown device: {error}") from error
    for source, target in placed.items():
        if target in placed:
            what = "itself" if source == target else "a device that is shifted too"
            raise ConfigurationError(
                f"shifts[{str(source)!r}]={str(target)!r} shifts to {what}; sources and targets must differ."
            )
    return placed


def source_of(module: nn.Module, shifts: Mapping[torch.device, torch.device]) -> torch.device:
    """The one device of the module that ``shifts`` names."""
    # One pair of devices is all that a shift knows; operands elsewhere are left alone.
    homes = {canonical_device(parameter.device) for parameter in module.parameters()}
    sources = [device for device in shifts if device in homes]
    if len(sources) != 1:
        lives = ", ".join(sorted(map(str, homes)))
        raise ConfigurationError(
            f"The module lives on {lives}; shifts must name exactly one of its devices, not "
            f"{', '.join(map(str, shifts))}."
        )
    return sources[0]


def choose_modules(module: nn.Module, activations: Names) -> list[str]:
    """Paths of the chosen submodules, without those inside of another chosen one.

    Raises:
        ConfigurationError: no patterns, or one that matches nothing; with the nearest names.
    """
    given = [activations] if isinstance(activations, str | Activation) else activations
    if not isinstance(given, Iterable):
        raise ConfigurationError(f"activations={given!r} is not allowed; give names of submodules, or activations.")
    if not given:
        raise ConfigurationError("activations is empty; name at least one submodule.")
    # Of an activation the module, and not the tensor, can run elsewhere.
    patterns = [one.module if isinstance(one, Activation) else one for one in given]
    names = [name for name, _ in module.named_modules() if name]
    chosen: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigurationError(f"activations holds {pattern!r}; give names of submodules, or activations.")
        path = pattern.partition("#")[0].partition(":")[0]
        if not path:
            raise ConfigurationError(
                f"activations names {pattern!r}, what {type(module).__name__}'s own code keeps; only submodules can be "
                f"chosen: {some_of(names, 10)}."
            )
        matching = [name for name in names if fnmatchcase(name, path)]
        if not matching:
            near = difflib.get_close_matches(path, names, n=3, cutoff=0.3)
            found = f"the nearest are: {', '.join(near)}" if near else f"there are: {some_of(names, 10)}"
            raise ConfigurationError(f"activations names {pattern!r}, which matches no submodule; {found}.")
        chosen.update(matching)
    return [name for name in names if name in chosen and not has_ancestor(name, chosen)]


def has_ancestor(name: str, chosen: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:length]) in chosen for length in range(1, len(parts)))
