"""The second meaning of a shift: the computation stays, only what it keeps for backward rests on another device."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_dpx.devices import canonical_device
from lightning_dpx.errors import ConfigurationError
from lightning_dpx.shifting.shift import choose_modules

_PARKED: "weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]]" = weakref.WeakKeyDictionary()


def park_activations(module: nn.Module, activations: str | Sequence[str], device: torch.device | str = "cpu") -> None:
    """What the chosen submodules keep for backward rests on ``device`` from forward to backward.

    Parameters and buffers stay where they are.

    Args:
        module: The model.
        activations: Submodules, as for :func:`shift_activations`.
        device: Where the tensors rest; the host's memory unless given.

    Raises:
        ConfigurationError: a pattern matches nothing, or the module is parked already.
    """
    if module in _PARKED:
        raise ConfigurationError("The module is parked already; call unpark_activations(module) first.")
    place = canonical_device(device)
    handles = []
    for name in choose_modules(module, [activations] if isinstance(activations, str) else activations):
        parking = _Parking(module, place)
        child = module.get_submodule(name)
        handles.append(child.register_forward_pre_hook(parking.enter, prepend=True))
        handles.append(child.register_forward_hook(parking.leave, always_call=True))
    _PARKED[module] = handles


def unpark_activations(module: nn.Module) -> None:
    """What is kept stays where it was computed again.

    Raises:
        ConfigurationError: the module is not parked.
    """
    handles = _PARKED.pop(module, None)
    if handles is None:
        raise ConfigurationError("The module is not parked.")
    for handle in handles:
        handle.remove()


class _Parking:
    """Hooks of one submodule."""

    def __init__(self, module: nn.Module, place: torch.device) -> None:
        self._module, self._place = weakref.ref(module), place
        self._entered: list[Any] = []

    def enter(self, _module: nn.Module, _inputs: Any) -> None:
        root = self._module()
        stay = {t.untyped_storage().data_ptr() for t in (*root.parameters(), *root.buffers())} if root else set()

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.device == self._place or tensor.untyped_storage().data_ptr() in stay:
                return tensor
            return tensor.device, tensor.to(self._place, non_blocking=True)

        def unpack(saved: Any) -> torch.Tensor:
            if isinstance(saved, torch.Tensor):
                return saved
            device, tensor = saved
            arrived: torch.Tensor = tensor.to(device, non_blocking=True)
            return arrived

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        hooks.__enter__()  # type: ignore[no-untyped-call]
        self._entered.append(hooks)

    def leave(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._entered.pop().__exit__(None, None, None)
